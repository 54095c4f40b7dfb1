"""A trial that is killed, then the sweep itself, and the same command again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from mlflow import MlflowClient

from rcir.config import from_plain
from rcir.runs.results import VALIDATION, RunResults
from training import TrainingConfig, train
from training.config import override

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own processes
]

PARTS = {"train": 1500, "validation": 400, "gallery": 100, "tuning": 100, "test": 100}
SWEEP = {
    "training": {
        # With as many threads as the cluster has CPUs, one trial is trained at a time.
        **{"name": "sweep", "epochs": 4, "batch": 32, "threads": 3},
        "data": {"options": {**PARTS, "calibration": 100}},
        "encoder": {"dim": 8},
    },
    "space": {
        "optimizer.lr": {"loguniform": [1e-3, 4e-3]},
        "mining.num_negatives": {"uniform": [1, 2]},
    },
    "trials": 4,
    "alpha": 0.2,
}


def start(folder, address):
    """Start `python -m tuning` in a folder with its own tracking store, on a cluster."""
    variables = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}", "RAY_ADDRESS": address}
    with (folder / "screen").open("a") as screen:
        return subprocess.Popen(
            [sys.executable, "-m", "tuning", "--config", "sweep.yaml"],
            cwd=folder,
            env={**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=screen,
            stderr=subprocess.STDOUT,
        )


def trial_processes(address):
    """Process ids of the trials on a cluster: children of its raylet."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may be gone by now
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            raylet = Path("/proc", parent, "cmdline").read_bytes()
            name = (folder / "cmdline").read_bytes()
            if name.startswith(b"ray::ImplicitFunc") and address.encode() in raylet:
                processes.append(int(folder.name))
    return processes


def trials(folder):
    """The records of the trials, by number."""
    path = folder / "runs" / "sweep" / "sweep.json"
    records = json.loads(path.read_text())["trials"] if path.exists() else []
    return {trial["number"]: trial for trial in records}


def wait_for(condition, process, folder):
    until = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, (folder / "screen").read_text()
        assert time.monotonic() < until, (folder / "screen").read_text()
        time.sleep(0.02)


def has_checkpoint(folder, number):
    """Return whether a trial has written its first checkpoint."""
    run = folder / "runs" / "sweep" / f"trial-{number:03d}"
    return (run / "checkpoints" / "epoch-0001").is_dir()


def files(folder):
    """The files of a folder, and when each was written."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


@pytest.fixture(scope="module")
def outcome(ray_cluster, tmp_path_factory, new_store):
    """The folder; the trials before the sweep was started again; files of the first, twice."""
    folder = tmp_path_factory.mktemp("killed")
    new_store(folder / "mlflow.db")
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    first = folder / "runs" / "sweep" / "trial-000"
    process = start(folder, ray_cluster)
    try:
        wait_for(lambda: has_checkpoint(folder, 1), process, folder)
        (running,) = trial_processes(ray_cluster)
        os.kill(running, signal.SIGKILL)
        wait_for(lambda: has_checkpoint(folder, 2), process, folder)
        process.kill()
        process.wait()
        before, files_before = trials(folder), files(first)
        process = start(folder, ray_cluster)
        process.wait(timeout=400)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (folder / "screen").read_text()
    return folder, before, files_before, files(first)


def test_a_killed_trial_is_recorded_and_the_sweep_goes_on(outcome):
    _, before, _, _ = outcome
    states = [trial["state"] for trial in before.values()]
    assert states == ["finished", "failed", "running", "waiting"]
    assert "died" in before[1]["reason"]


def test_the_same_command_finishes_all_trials_as_they_were_drawn(outcome):
    folder, before, files_before, files_after = outcome
    after = trials(folder)
    assert [trial["state"] for trial in after.values()] == ["finished"] * 4
    assert [trial["reason"] for trial in after.values()] == [""] * 4
    for number, trial in before.items():
        assert after[number]["values"] == trial["values"]
    assert len({trial["values"]["optimizer.lr"] for trial in after.values()}) == 4
    assert json.loads((folder / "runs" / "sweep" / "sweep.json").read_text())["finished"]
    assert (folder / "runs" / "sweep" / "best.yaml").is_file()
    # A trial that had ended is not trained again.
    assert files_before == files_after
    assert {"encoder.safetensors", "validation.safetensors"} <= {path.name for path in files_after}
    assert after[0] == before[0]


def test_nothing_is_in_mlflow_twice(outcome, runs_in):
    store = f"sqlite:///{outcome[0] / 'mlflow.db'}"
    runs = runs_in(store)
    assert sorted(runs) == ["sweep", "trial-000", "trial-001", "trial-002", "trial-003"]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    runs.pop("sweep")
    for run in runs.values():
        history = MlflowClient(store).get_metric_history(run.info.run_id, "loss")
        assert [metric.step for metric in history] == [1, 2, 3, 4]
        assert run.data.tags["rcir.state"] == "finished"


@pytest.mark.parametrize("number", [1, 2])
def test_a_killed_trial_ends_as_an_undisturbed_one(outcome, number):
    folder, *_ = outcome
    config = from_plain(TrainingConfig, SWEEP["training"])
    run = train(override(config, trials(folder)[number]["values"]))
    results = RunResults.read(folder / "runs" / "sweep" / f"trial-{number:03d}" / VALIDATION)
    expected = RunResults.read(run.path / VALIDATION)
    assert results.metrics == expected.metrics
    for ours, theirs in zip(results.parts, expected.parts, strict=True):
        np.testing.assert_array_equal(ours.candidate_scores, theirs.candidate_scores)
