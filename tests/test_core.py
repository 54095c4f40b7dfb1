"""The bare core in an environment of its own: vectors in, certified sets out, without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
LIMIT_MB = 700
ABSENT = ("torch", "ray", "mlflow", "optuna")


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def core(wheel_file, tmp_path_factory):
    """An environment that holds the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("core")
    uv = Path(sys.executable).with_name("uv")
    environment = folder / "environment"
    assert run(uv, "venv", "--python", sys.executable, environment).returncode == 0
    constraints = ROOT / "constraints.txt"
    python = environment / "bin" / "python"
    made = run(uv, "pip", "install", "--python", python, "--constraint", constraints, wheel_file)
    assert made.returncode == 0, made.stderr
    return environment


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A gallery and queries of ten clusters, each as .npy beside .csv."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((10, 8))
    for name, n in (("gallery", 300), ("queries", 400)):
        labels = rng.integers(10, size=n)
        found = centres[labels] + 1.2 * rng.standard_normal((n, 8))
        np.save(folder / f"{name}.npy", found.astype(np.float32))
        rows = [f"{name}-{row},kind {label}" for row, label in enumerate(labels)]
        (folder / f"{name}.csv").write_text("\n".join(["id,label", *rows]))
    return folder


def clean():
    """Without what lends the environment packages of this one, or names a tracking store."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "MLFLOW"))
    }


def test_the_core_is_light(core):
    files = [path for path in core.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) / 2**20 <= LIMIT_MB
    installed = {path.name for path in core.glob("lib/*/site-packages/*")}
    assert "faiss" in installed
    assert not installed & set(ABSENT)


def test_the_core_certifies_sets_from_npy_files(core, vectors, tmp_path):
    command = (core / "bin" / "rcir", "certify", "--gallery", vectors / "gallery.npy")
    asked = ("--queries", vectors / "queries.npy", "--alpha", "0.2", "--output", tmp_path / "out")
    outcome = run(*command, *asked, cwd=tmp_path, env=clean())
    assert outcome.returncode == 0, outcome.stderr
    assert "With probability at least 0.9" in outcome.stdout
    row = json.loads((tmp_path / "out" / "results.json").read_text())["rows"][0]
    assert row["alpha"] == 0.2
    assert row["mean_size"] < row["constant_size"]
    ask = (
        "import numpy as np, rcir, sys\n"
        f"retriever = rcir.load({str(tmp_path / 'out' / 'retriever')!r})\n"
        f"query = np.load({str(vectors / 'queries.npy')!r})[0]\n"
        "print(retriever.retrieve(query, alpha=0.2, delta=0.1).size)\n"
        "assert 'torch' not in sys.modules"
    )
    answer = run(core / "bin" / "python", "-c", ask, cwd=tmp_path, env=clean())
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) >= 1


def test_a_tracking_store_needs_mlflow_which_is_said_first(core, vectors, tmp_path):
    command = (core / "bin" / "rcir", "certify", "--gallery", vectors / "gallery.npy")
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    outcome = run(*command, cwd=tmp_path, env=clean() | store)
    assert outcome.returncode == 1
    assert "mlflow is not installed: pip install 'rcir[train]' brings it" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [("-m", "training", "--help"), ("-m", "tuning", "--help"), ("-m", "calibration", "--help")],
    ids=lambda command: command[1],
)
def test_jobs_say_which_extra_they_need(core, tmp_path, command):
    outcome = run(core / "bin" / "python", *command, cwd=tmp_path, env=clean())
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("error: ")
    assert "is not installed: pip install 'rcir[train]' brings it" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    "line", ["import training; training.train", "from rcir.data import Preprocessing"]
)
def test_an_import_says_which_extra_it_needs(core, tmp_path, line):
    outcome = run(core / "bin" / "python", "-c", line, cwd=tmp_path, env=clean())
    assert outcome.stderr.splitlines()[-1].endswith("pip install 'rcir[train]' brings it")
