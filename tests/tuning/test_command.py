"""`python -m tuning` on the command line, on to a calibrated retriever."""

import json

import numpy as np
import pytest
import yaml

from rcir.data import load_splits
from rcir.retrieval.storage import load
from rcir.runs.folder import read_run
from tuning.__main__ import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.usefixtures("one_cpu"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own processes
]

PARTS = {"train": 300, "validation": 400, "gallery": 200, "tuning": 200, "test": 300}
SWEEP = {
    "training": {
        **{"name": "sweep", "epochs": 2, "batch": 32},
        "data": {"options": {**PARTS, "calibration": 400}},
        "encoder": {"dim": 8},
    },
    "space": {"optimizer.lr": {"grid": [1e-7, 3e-3]}},
    "trials": 1,
    "alpha": 0.2,
}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    return str(tmp_path / "sweep.yaml")


def test_a_sweep_is_shown_and_its_best_trial_calibrated(file, tmp_path, capsys):
    assert main(["--config", file]) == 0
    shown = capsys.readouterr().out
    folder = tmp_path / "runs" / "sweep"
    kept = json.loads((folder / "sweep.json").read_text())
    best, other = sorted(kept["trials"], key=lambda trial: trial["metrics"]["certified_size"])
    assert best["values"]["optimizer.lr"] == 3e-3
    lines = shown.splitlines()
    names = [trial["folders"][0] for trial in (best, other)]
    first, second = (next(line for line in lines if line.startswith(name)) for name in names)
    assert lines.index(first) < lines.index(second)
    assert f"{best['metrics']['certified_size']:.2f} [" in first
    assert f"next: python -m calibration --run {folder / names[0]}" in shown
    assert not list(folder.rglob("retriever"))

    # Given again it has nothing left to train.
    assert main(["--config", file, "--calibrate"]) == 0
    again = capsys.readouterr().out
    assert first in again
    run = read_run(folder / names[0])
    assert f"retriever: {run.path / 'retriever'}" in again
    retriever, test = load(run.path / "retriever"), load_splits(run.data).test
    found = retriever.retrieve(list(test.images), alpha=0.3, delta=0.1)
    missed = [label not in one.labels for one, label in zip(found, test.labels, strict=True)]
    assert len(missed) == 300
    assert 0 < np.mean(missed) < 0.3 + 3 * (0.3 * 0.7 / 300) ** 0.5
