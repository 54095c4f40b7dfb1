"""Trainings that are killed at random moments, and continued until they end."""

import json
import os
import subprocess
import sys

import pytest
from mlflow import MlflowClient

from rcir.runs.folder import read_run
from tests.random_kills import N_RUNS
from tests.training.helpers import same_weights, steps

MEASURED = ("time", "seconds", "images_per_second")


def metrics(run):
    """The metrics of each epoch and the losses of its steps, without times."""
    epochs = json.loads((run.path / "metrics.json").read_text())
    for values in epochs.values():
        values["steps"] = {step: loss for step, (loss, _) in values.get("steps", {}).items()}
    return {
        epoch: {name: value for name, value in values.items() if name not in MEASURED}
        for epoch, values in epochs.items()
    }


@pytest.mark.slow
def test_trainings_killed_at_random_moments_end_as_undisturbed_ones(tmp_path, new_store):
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": new_store(tmp_path / "mlflow.db"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.random_kills", "trainings"]
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    whole = read_run(tmp_path / "runs" / "whole")
    client = MlflowClient(whole.tracking_uri)
    experiment = client.get_experiment_by_name("rcir").experiment_id
    for number in range(N_RUNS):
        run = read_run(tmp_path / "runs" / f"killed-{number}")
        assert same_weights(run, whole)
        assert same_weights(run, whole, "checkpoints/epoch-0004/optimizer.safetensors")
        assert metrics(run) == metrics(whole)
        assert steps(run) == [1, 2, 3, 4]
        assert list(run.path.rglob(".*")) == []
        tracked = client.search_runs([experiment], f"tags.`rcir.folder` = '{run.path}'")
        assert [each.info.status for each in tracked] == ["FINISHED"]
