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
from rcir.runs.folder import read_run
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
        **{"name": "sweep", "epochs": 4, "batch": 32},
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


def started(folder, address):
    """`python -m tuning` in a folder of its own, tracked there, on the cluster of an address."""
    own = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}", "RAY_ADDRESS": address}
    with (folder / "screen").open("a") as screen:
        return subprocess.Popen(
            [sys.executable, "-m", "tuning", "--config", "sweep.yaml"],
            cwd=folder,
            env={**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=screen,
            stderr=subprocess.STDOUT,
        )


def trial_processes(address):
    """Process ids of the trials on a cluster: children of its raylet."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may be gone by now
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            raylet = Path("/proc", parent, "cmdline").read_bytes()
            name = (folder / "cmdline").read_bytes()
            if name.startswith(b"ray::ImplicitFunc") and address.encode() in raylet:
                found.append(int(folder.name))
    return found


def trials(folder):
    """What is known of the trials, by number."""
    path = folder / "runs" / "sweep" / "sweep.json"
    known = json.loads(path.read_text())["trials"] if path.exists() else []
    return {trial["number"]: trial for trial in known}


def wait_for(condition, process, folder):
    until = time.monotonic() + 150
    while not condition():
        assert process.poll() is None, (folder / "screen").read_text()
        assert time.monotonic() < until, (folder / "screen").read_text()
        time.sleep(0.02)


def in_the_middle(folder, number):
    """Whether a trial has written a checkpoint."""
    run = folder / "runs" / "sweep" / f"trial-{number:03d}"
    return (run / "checkpoints" / "epoch-0001").is_dir()


def files(folder):
    """Which files there are, and when each was written."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


@pytest.fixture(scope="module")
def outcome(one_cpu, tmp_path_factory, new_store):
    """The folder, and what was known in between: of all trials, and the files of the first."""
    folder = tmp_path_factory.mktemp("killed")
    new_store(folder / "mlflow.db")
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    first = folder / "runs" / "sweep" / "trial-000"
    process = started(folder, one_cpu)
    try:
        wait_for(lambda: in_the_middle(folder, 1), process, folder)
        (running,) = trial_processes(one_cpu)
        os.kill(running, signal.SIGKILL)
        wait_for(lambda: in_the_middle(folder, 2), process, folder)
        process.kill()
        process.wait()
        before, kept = trials(folder), files(first)
        process = started(folder, one_cpu)
        process.wait(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (folder / "screen").read_text()
    return folder, before, kept, files(first)


def test_a_killed_trial_is_recorded_and_the_sweep_goes_on(outcome):
    _, before, _, _ = outcome
    states = [trial["state"] for trial in before.values()]
    assert states == ["finished", "failed", "running", "waiting"]
    assert before[1]["reason"].startswith("its process died")


def test_the_same_command_finishes_all_trials_as_they_were_drawn(outcome):
    folder, before, _, _ = outcome
    after = trials(folder)
    assert [trial["state"] for trial in after.values()] == ["finished"] * 4
    assert [trial["reason"] for trial in after.values()] == [""] * 4
    for number, trial in before.items():
        assert after[number]["values"] == trial["values"]
    assert len({trial["values"]["optimizer.lr"] for trial in after.values()}) == 4
    assert json.loads((folder / "runs" / "sweep" / "sweep.json").read_text())["finished"]
    assert (folder / "runs" / "sweep" / "best.yaml").is_file()


def test_a_trial_that_had_ended_is_not_trained_again(outcome):
    folder, before, kept, left = outcome
    assert kept == left
    assert {"encoder.safetensors", "validation.safetensors"} <= {path.name for path in kept}
    assert trials(folder)[0] == before[0]


def test_nothing_is_in_mlflow_twice(outcome):
    folder, *_ = outcome
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'rcir'")
    runs = client.search_runs([experiment.experiment_id])
    names = sorted(run.info.run_name for run in runs)
    assert names == ["sweep", "trial-000", "trial-001", "trial-002", "trial-003"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:
        if run.info.run_name != "sweep":
            history = client.get_metric_history(run.info.run_id, "loss")
            assert [metric.step for metric in history] == [1, 2, 3, 4]
            assert run.data.tags["rcir.state"] == "finished"


@pytest.mark.parametrize("number", [1, 2])
def test_what_was_killed_becomes_what_it_would_have_been(outcome, tmp_path, number):
    folder, *_ = outcome
    values = trials(folder)[number]["values"]
    config = override(from_plain(TrainingConfig, SWEEP["training"] | {"threads": 1}), values)
    found = RunResults.read(folder / "runs" / "sweep" / f"trial-{number:03d}" / VALIDATION)
    run = train(config)
    assert run.path == tmp_path / "runs" / "sweep"
    assert not read_run(run.path).config["changes"]
    expected = RunResults.read(run.path / VALIDATION)
    assert found.metrics == expected.metrics
    for ours, theirs in zip(found.parts, expected.parts, strict=True):
        np.testing.assert_array_equal(ours.candidate_scores, theirs.candidate_scores)
