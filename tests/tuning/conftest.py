"""Fixtures of sweeps."""

import numpy as np
import pytest
from mlflow import MlflowClient
from safetensors.numpy import load_file
from scipy.stats import binom

from rcir.data import DataConfig


@pytest.fixture(scope="module")
def store(tmp_path_factory, new_store):
    """A tracking store that only the tests of one file use."""
    uri = new_store(tmp_path_factory.mktemp("store") / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        yield uri


@pytest.fixture(scope="session")
def small(tiny, tmp_path_factory):
    """`tiny` with enough validation images to certify something."""
    parts = {"train": 300, "validation": 400, "gallery": 200, "tuning": 100, "test": 200}
    defaults = {
        "data": DataConfig("digits", options={**parts, "calibration": 200}),
        "storage": str(tmp_path_factory.mktemp("runs")),
        "epochs": 2,
    }
    return lambda name, **changes: tiny(name, **(defaults | changes))


@pytest.fixture(scope="session")
def certified():
    """`certified(run folder, alpha, delta)`: the mean set size, counted one by one, or None."""

    def counted(folder, alpha, delta):
        arrays, sizes = load_file(folder / "validation.safetensors"), []
        for part in range(4):
            scores, candidate_scores = arrays[f"scores.{part}"], arrays[f"candidate_scores.{part}"]
            for threshold in np.sort(scores[np.isfinite(scores)]):
                if binom.cdf(sum(scores > threshold), len(scores), alpha) <= delta:
                    largest = np.float32(float(threshold) * 1.001)  # what is a tie, at the cut-off
                    sizes += [sum(price <= largest for price in row) for row in candidate_scores]
                    break
            else:
                return None
        return np.mean(sizes)

    return counted


@pytest.fixture(scope="session")
def runs_in():
    """`runs_in(store, parent)`: MLflow runs by name, which are all different; below one or all."""

    def found(store, parent=None):
        client = MlflowClient(store)
        (experiment,) = client.search_experiments(filter_string="name = 'rcir'")
        below = f"tags.`mlflow.parentRunId` = '{parent}'" if parent else ""
        runs = client.search_runs([experiment.experiment_id], below)
        by_name = {run.info.run_name: run for run in runs}
        assert len(by_name) == len(runs), sorted(run.info.run_name for run in runs)
        return by_name

    return found
