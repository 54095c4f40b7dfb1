"""A trial that is killed, then the sweep itself, and the same command again."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import yaml

from rcir.config import from_plain
from rcir.runs.folder import read_run
from tests.training.helpers import ON_RAY, processes_on, same_weights, steps
from training import TrainingConfig, train
from training.config import override

pytestmark = [pytest.mark.slow, *ON_RAY]

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


def trials(folder):
    """The records of the trials of a sweep, by number."""
    path = folder / "sweep.json"
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
    return (folder / f"trial-{number:03d}" / "checkpoints" / "epoch-0001").is_dir()


def files(folder):
    """The files of a folder, and when each was written."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_a_killed_trial_and_a_killed_sweep_end_as_undisturbed_ones(
    ray_cluster, tmp_path, new_store, runs_in
):
    new_store(tmp_path / "mlflow.db")
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    folder = tmp_path / "runs" / "sweep"
    process = start(tmp_path, ray_cluster)
    try:
        wait_for(lambda: has_checkpoint(folder, 1), process, tmp_path)
        (running,) = processes_on(ray_cluster, "ray::ImplicitFunc")
        os.kill(running, signal.SIGKILL)
        wait_for(lambda: has_checkpoint(folder, 2), process, tmp_path)
        process.kill()
        process.wait()
        before, files_before = trials(folder), files(folder / "trial-000")
        process = start(tmp_path, ray_cluster)
        process.wait(timeout=400)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (tmp_path / "screen").read_text()

    # The killed trial was recorded, and the sweep went on.
    states = [trial["state"] for trial in before.values()]
    assert states == ["finished", "failed", "running", "waiting"]
    assert "died" in before[1]["reason"]
    # The same command finished all trials as they were drawn.
    after = trials(folder)
    assert [trial["state"] for trial in after.values()] == ["finished"] * 4
    assert [trial["reason"] for trial in after.values()] == [""] * 4
    assert [after[number]["values"] for number in before] == [
        trial["values"] for trial in before.values()
    ]
    assert len({trial["values"]["optimizer.lr"] for trial in after.values()}) == 4
    assert json.loads((folder / "sweep.json").read_text())["finished"]
    assert (folder / "best.yaml").is_file()
    # The trial that had ended was not trained again.
    assert files_before == files(folder / "trial-000")
    assert {"encoder.safetensors", "validation.safetensors"} <= {path.name for path in files_before}
    assert after[0] == before[0]

    # Nothing is in MLflow twice.
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    runs = runs_in(store)
    assert sorted(runs) == ["sweep", "trial-000", "trial-001", "trial-002", "trial-003"]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    runs.pop("sweep")
    for name, run in runs.items():
        assert steps(read_run(folder / name)) == [1, 2, 3, 4]
        assert run.data.tags["rcir.state"] == "finished"
    for number in (1, 2):
        config = override(from_plain(TrainingConfig, SWEEP["training"]), after[number]["values"])
        run = train(replace(config, name=f"undisturbed-{number}"))
        assert same_weights(read_run(folder / f"trial-{number:03d}"), run)
