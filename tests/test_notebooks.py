"""The notebooks run as they are committed, and what a kernel shows of an error."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb"))


def execute(notebook, folder, **options):
    """Run all cells in a folder, and return the outputs of each that has some."""
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=400, resources=resources, **options).execute()
    return [outputs for cell in notebook.cells if (outputs := cell.get("outputs"))]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_shows_an_answer(path, tmp_path, monkeypatch):
    monkeypatch.setenv("RCIR_PROGRESS", "0")
    notebook = nbformat.read(path, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    outputs = [output for cell in execute(notebook, tmp_path) for output in cell]
    kinds = {kind for output in outputs for kind in output.get("data", ())}
    assert {"text/html", "image/png"} <= kinds


@pytest.mark.slow
def test_a_kernel_shows_the_message_of_an_error_alone_and_keeps_the_traceback(tmp_path):
    sources = ['import rcir\nrcir.load("nowhere")', "import traceback\ntraceback.print_last()"]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    (error,), (printed,) = execute(notebook, tmp_path, allow_errors=True)
    (line,) = error["traceback"]
    assert line.startswith("NoRetriever: ")
    assert "nowhere" in line
    assert "rcir/api.py" in printed["text"]
