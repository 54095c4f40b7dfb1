"""The README's commands run, the example script works, and documents name what exists."""

import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rcir
from rcir.config import parse
from rcir.data.vector_writing import write_vectors
from rcir.runs.folder import read_run
from training import TrainingConfig
from tuning import TuningConfig
from tuning.__main__ import spelled_out

ROOT = Path(__file__).parents[1]
# Options that let a command of the README finish within seconds.
SHORTER = {
    "-m training": ["--epochs", "1"],
    "digits-btl.yaml": ["--data.options", '{"train": 500, "validation": 300}'],
    "own-folder.yaml": ["--preprocessing.size", "[20, 20]"],
}


def readme_commands():
    """Return the README's shell commands that run this project, in order."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if not line.startswith(("make", "mlflow"))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_commands_of_the_readme_run_in_order(demo, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(demo / "runs" / "demo")
    write_photos_and_vectors(tmp_path)
    weights = Path(os.environ.get("RCIR_DATA", "")) / "models" / "tf_efficientnet_lite0.safetensors"
    lines = [line for line in readme_commands() if "tune-" not in line]
    if weights.is_file():
        monkeypatch.setitem(SHORTER, "rcir embed", ["--checkpoint", str(weights)])
    else:  # the command would download them
        lines = [line for line in lines if "photos.parquet" not in line]
    assert len(lines) >= 9
    for line in lines:
        run(line, monkeypatch)
    assert (tmp_path / "runs" / "digits-btl" / "retriever" / "manifest.json").is_file()


def write_photos_and_vectors(folder):
    """Write a folder of photos in eight classes, and two tables of vectors in five classes."""
    rng = np.random.default_rng(0)
    for name in "abcdefgh":
        (folder / "photos" / name).mkdir(parents=True)
        pattern = rng.integers(0, 200, (20, 20, 3))
        for number in range(6):
            pixels = (pattern + rng.integers(0, 56, (20, 20, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    centres = rng.standard_normal((5, 8))
    for name in ("gallery", "queries"):
        classes = rng.integers(5, size=200)
        vectors = (centres[classes] + 0.5 * rng.standard_normal((200, 8))).astype(np.float32)
        ids = [f"{name} {row}" for row in range(200)]
        labels = {"label": [f"kind {number}" for number in classes]}
        write_vectors(folder / f"{name}.parquet", vectors, ids, labels, None, "m")


def run(line, monkeypatch):
    """Run a shell command in this process, shortened; it has to succeed."""
    words = shlex.split(line)
    module = "rcir.cli" if words[0].endswith("rcir") else words[words.index("-m") + 1]
    options = words[1:] if module == "rcir.cli" else words[3:]
    shorter = [word for part, more in SHORTER.items() if part in line for word in more]
    monkeypatch.setattr(sys, "argv", [words[0], *options, *shorter])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert stop.value.code in (0, None), line


def test_sweep_of_the_readme_is_a_valid_configuration(monkeypatch):
    """Running a sweep is tested with the `tuning` package."""
    monkeypatch.chdir(ROOT)
    (line,) = (line for line in readme_commands() if "-m tuning" in line)
    options = spelled_out(shlex.split(line)[3:])
    config = parse(TuningConfig, options, "python -m tuning", "")
    assert config.calibrate
    assert (config.trials, config.scheduler) == (12, "asha")


def test_files_and_make_targets_that_documents_name_exist():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = document.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
        for path in re.findall(r"`((?:rcir|training|calibration|tuning|configs)/[\w/.-]*)`", text):
            assert (ROOT / path).exists(), f"{document.name}: {path}"
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    names = re.findall(r"make ([a-z]+)\b", (ROOT / "README.md").read_text())
    assert {"demo", "test", "lint", "bench", "setup"} <= {*names} <= {*targets, "are"}


def test_demo_trains_its_configuration_file(demo):
    run_config = read_run(demo / "runs" / "demo" / "training").config
    path = ROOT / "configs" / "digits-btl.yaml"
    config = parse(TrainingConfig, ["--config", str(path)], "test", "")
    expected = json.loads(json.dumps(asdict(config)))
    differences = {key for key in expected if expected[key] != run_config[key]}
    assert differences == {"name", "storage", "micro_batches"}
    assert run_config["micro_batches"] == config.n_micro_batches


def test_example_makes_a_retriever_of_a_folder_of_images(
    trained, splits, tmp_path, monkeypatch, capsys
):
    images, calibration = tmp_path / "images", splits.calibration
    for pixels, label, name in zip(
        calibration.images, calibration.labels, calibration.ids, strict=True
    ):
        (images / f"{label:02d}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(images / f"{label:02d}" / f"{name}.png")
    spec = importlib.util.spec_from_file_location("own_images", ROOT / "examples" / "own_images.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    output = tmp_path / "retriever"
    options = ["--run", str(trained.path), "--images", str(images), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["own_images.py", *options])
    example.main()
    assert f"{len(calibration) // 2} images" in capsys.readouterr().out

    retriever = rcir.load(output)
    alpha = retriever.controllers[None].miss().minimum_alpha(0.1) + 0.05
    query = next(images.glob("*/*.png"))
    answer = retriever.retrieve(query, alpha, 0.1)
    assert len(set(answer.ids)) == answer.size
    assert all((images / name).is_file() for name in answer.ids)
    # Half is indexed, a sixth fits the score function, the rest calibrates.
    n = len(calibration)
    assert answer.guarantee.n_calibration == n - n // 2 - n // 6
    # Each id has its own distance; the order of the answer is the score function's.
    results = retriever.search([query])
    distances = dict(zip(retriever.ids[results.positions[0]], results.distances[0], strict=True))
    expected = [distances[name] for name in answer.ids]
    np.testing.assert_allclose(answer.distances, expected, atol=1e-4)
