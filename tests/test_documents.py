import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rcir.config import parse
from rcir.data.vector_writing import write_vectors
from training import TrainingConfig
from tuning import TuningConfig
from tuning.__main__ import spelled_out

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml") if "tune" not in path.name)
# What a command of the README needs to be over in seconds.
SHORTER = {
    "-m training": ["--epochs", "1"],
    "digits-btl.yaml": ["--data.options", '{"train": 500, "validation": 300}'],
    "own-folder.yaml": ["--preprocessing.size", "[20, 20]"],
}


def commands():
    """The README's shell commands that run rcir, in order."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if not line.startswith(("make", "mlflow"))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_commands_of_the_readme_run_in_its_order(demo, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(demo / "runs" / "demo")
    rng = np.random.default_rng(0)
    for name in "abcdefgh":
        (tmp_path / "photos" / name).mkdir(parents=True)
        pattern = rng.integers(0, 200, (20, 20, 3))
        for number in range(6):
            pixels = (pattern + rng.integers(0, 56, (20, 20, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    write_vectors_of_kinds(rng, tmp_path)
    weights = Path(os.environ.get("RCIR_DATA", "")) / "models" / "tf_efficientnet_lite0.safetensors"
    lines = [line for line in commands() if "tune-" not in line]
    if weights.is_file():
        monkeypatch.setitem(SHORTER, "rcir embed", ["--checkpoint", str(weights)])
    else:  # they would be downloaded
        lines = [line for line in lines if "photos.parquet" not in line]
    assert len(lines) >= 9
    run(lines, monkeypatch)
    assert (tmp_path / "runs" / "digits-btl" / "retriever" / "manifest.json").is_file()


def write_vectors_of_kinds(rng, folder):
    """The tables `gallery.parquet` and `queries.parquet`, of five kinds."""
    centres = rng.standard_normal((5, 8))
    for name in ("gallery", "queries"):
        kinds = rng.integers(5, size=200)
        vectors = (centres[kinds] + 0.5 * rng.standard_normal((200, 8))).astype(np.float32)
        ids, labels = (
            [f"{word} {n}" for n in each] for word, each in ((name, range(200)), ("kind", kinds))
        )
        write_vectors(folder / f"{name}.parquet", vectors, ids, {"label": labels}, None, "m")


def test_the_sweep_of_the_readme_is_one(monkeypatch):
    """A sweep is run, shown and calibrated in tests/tuning/test_command.py."""
    monkeypatch.chdir(ROOT)
    (line,) = (line for line in commands() if "-m tuning" in line)
    options = spelled_out(shlex.split(line)[3:])
    config = parse(TuningConfig, options, "python -m tuning", "")
    assert config.calibrate
    assert (config.trials, config.scheduler) == (12, "asha")


def run(lines, monkeypatch):
    """Run shell commands in this process, shortened; each succeeds."""
    for line in lines:
        words = shlex.split(line)
        module = "rcir.cli" if words[0].endswith("rcir") else words[words.index("-m") + 1]
        options = words[1:] if module == "rcir.cli" else words[3:]
        short = [word for part, more in SHORTER.items() if part in line for word in more]
        monkeypatch.setattr(sys, "argv", [words[0], *options, *short])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        assert ended.value.code in (0, None), line


def test_every_place_that_a_document_names_exists():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = document.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
        for place in re.findall(r"`((?:rcir|training|calibration|tuning|configs)/[\w/.-]*)`", text):
            assert (ROOT / place).exists(), f"{document.name}: {place}"


def test_every_makefile_target_of_the_readme_exists():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"make ([a-z]+)\b", (ROOT / "README.md").read_text())
    assert {"demo", "test", "lint", "bench", "setup"} <= set(named) <= {*targets, "are"}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_is_valid_and_is_named_like_its_file(name):
    given = ["--name", "digits"] if name == "digits.yaml" else []  # its method is yet to be named
    config = parse(TrainingConfig, ["--config", str(ROOT / "configs" / name), *given], "test", "")
    assert config.name == name.removesuffix(".yaml")


def test_the_demo_trains_what_its_configuration_says(demo):
    from rcir.runs.folder import read_run

    run = read_run(demo / "runs" / "demo" / "training")
    path = ROOT / "configs" / "digits-btl.yaml"
    config = parse(TrainingConfig, ["--config", str(path)], "test", "")
    import json
    from dataclasses import asdict

    expected = json.loads(json.dumps(asdict(config)))
    differing = {key for key in expected if expected[key] != run.config[key]}
    assert differing == {"name", "storage", "micro_batches"}
    assert run.config["micro_batches"] == config.n_micro_batches


def test_the_constraints_name_no_place():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+( ; .+)?", line) for line in lines)
    assert not re.search(r"https?:|file:|--", "\n".join(lines))
