"""The README's commands run, the example script works, and documents name what exists."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rcir
from rcir.config import parse
from rcir.risk import minimum_alpha
from rcir.runs.folder import read_run
from tests.waits import record
from training import TrainingConfig

ROOT = Path(__file__).parents[1]
PARTS = ("rcir", "training", "calibration", "tuning")
# Names in docstrings that the code does not use: of other packages, of files, of formulas.
FOREIGN_NAMES = {
    *("A_d", "Q_k", "z_k", "z_t"),
    *("autolog", "ColorJitter", "File", "Form", "weights_only"),
    *("limit_concurrency", "timeout_keep_alive", "c1s1", "car_ims"),
}
MAX_SILENCE_S = 5.0  # also on a loaded machine
# Options that let a command of the README finish within seconds.
SHORTER = {
    "rcir train": """--epochs 1 --data.options '{"train": 500, "validation": 300}'""",
    "rcir tune": "--trials 1 --training.epochs 2 --interval 1",
}


def readme_commands():
    """Return the README's shell commands that run this project, in order."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.fixture
def shell(tmp_path, ray_settings, monkeypatch):
    """`shell(line)`: run a command in the folder; it has to succeed, or goes on after a `&`.

    Returns the longest time for which it showed nothing, before its last output.
    """
    monkeypatch.chdir(tmp_path)
    settings = ray_settings | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "RCIR_PROGRESS": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    servers = []

    def shell(line):
        if line.endswith("&"):
            servers.append(subprocess.Popen(f"exec {line[:-1]}", shell=True))
            return 0
        shown = record(["/bin/sh", "-c", f"exec {line}"])
        assert shown.status == 0, f"{line}\n{shown.text}"
        (last, _) = shown.pieces[-1]
        return max(length for length, start, _ in shown.gaps() if start < last)

    yield shell
    for server in servers:
        server.terminate()
        server.wait()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_commands_of_the_readme_run_in_order(tmp_path, shell):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_photos(tmp_path)
    weights = Path(os.environ.get("RCIR_DATA", "")) / "models" / "tf_efficientnet_lite0.safetensors"
    lines = readme_commands()
    options = dict(SHORTER)
    if weights.is_file():
        options["rcir certify"] = f"--checkpoint {weights}"
    else:  # the command would download them
        lines = [line for line in lines if "photos" not in line and "certified" not in line]
    assert len(lines) >= 5
    assert all(part in " ".join(lines) for part in SHORTER)
    for line in lines:
        silence = shell(" ".join([line, *(more for part, more in options.items() if part in line)]))
        print(f"longest silence {silence:.1f} s: {line}")
        assert silence < MAX_SILENCE_S, line
    retries = "--fail --retry 300 --retry-connrefused --retry-delay 1"
    shell(f"curl {retries} http://127.0.0.1:5000")
    assert (tmp_path / "runs" / "digits-btl" / "retriever" / "current.json").is_file()
    if not weights.is_file():
        pytest.skip(f"photographs of the README: needs RCIR_DATA/models/{weights.name}")
    shell(f"curl {retries} -F picture=@new/0.png http://127.0.0.1:8000/retrieve")


def write_photos(folder):
    """Write photos in eight class folders, and new ones in one folder."""
    rng = np.random.default_rng(0)
    for name in "abcdefgh":
        (folder / "photos" / name).mkdir(parents=True)
        pattern = rng.integers(0, 200, (20, 20, 3))
        for number in range(30):
            pixels = (pattern + rng.integers(0, 56, (20, 20, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    shutil.copytree(folder / "photos" / "a", folder / "new")


def test_files_and_make_targets_that_documents_name_exist():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = document.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            is_generated = link.startswith("reference/")  # as `make docs` builds it
            assert is_generated or (document.parent / link).exists(), f"{document.name}: {link}"
        for path in re.findall(r"`((?:rcir|training|calibration|tuning|configs)/[\w/.-]*)`", text):
            assert (ROOT / path).exists(), f"{document.name}: {path}"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    documents = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    names = re.findall(r"`make\s+([a-z-]+)", "".join(documents))
    assert {"demo", "test", "test-all", "test-old-cpu"} <= {*names} <= {*targets}


def test_parts_are_defined_where_the_architecture_says():
    text = " ".join((ROOT / "ARCHITECTURE.md").read_text().split())
    pairs = re.findall(r"`([A-Za-z_.]+)` (?:in |\()`([a-z_/]+\.py)`", text)
    for name, file in pairs:
        last = re.escape(name.rpartition(".")[2])
        defines = re.compile(rf"^ *(class|def) {last}\b|^ *{last}\b.*[=:]", re.MULTILINE)
        paths = [path for part in PARTS for path in (ROOT / part).rglob(Path(file).name)]
        sources = [path.read_text() for path in paths if f"{path}".endswith(f"/{file}")]
        assert any(map(defines.search, sources)), f"{file} does not define {name}"
    assert len(pairs) > 30


def test_names_in_docstrings_exist():
    used, quoted = set(FOREIGN_NAMES), []
    for path in (path for part in PARTS for path in (ROOT / part).rglob("*.py")):
        used.update(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node) or ""
                quoted += [(path, name) for name in re.findall(r"`([A-Za-z_][\w.]*)`", docstring)]
            # Names, attributes, parameters, keywords, imports, definitions, and strings as keys.
            for field in ("id", "attr", "arg", "name", "module", "value"):
                if isinstance(name := getattr(node, field, None), str):
                    used.update(re.split("[.:]", name))
    assert len(quoted) > 500
    missing = [f"{path}: {name}" for path, name in quoted if not used.issuperset(name.split("."))]
    assert not missing


def test_demo_trains_its_configuration_file(demo, pytestconfig):
    run_config = read_run(demo / "runs" / "demo" / "training").config
    path = ROOT / "configs" / "digits-btl.yaml"
    config = parse(TrainingConfig, ["--config", str(path)], "test")
    expected = json.loads(json.dumps(asdict(config)))
    differences = {key for key in expected if expected[key] != run_config[key]}
    shortened = set() if pytestconfig.getoption("full") else {"epochs"}
    assert differences == {"name", "storage", "micro_batches"} | shortened
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
    alpha = minimum_alpha(0.1, retriever.calibration.miss_rule.evidence) + 0.05
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
