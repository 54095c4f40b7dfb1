"""Fixtures of sweeps."""

import pytest
from mlflow import MlflowClient

from rcir.data import DataConfig
from rcir.runs.results import VALIDATION, RunResults
from tests.training.helpers import certified_size


@pytest.fixture(scope="module")
def store(tmp_path_factory, new_store):
    """A tracking store that only the tests of one file use."""
    uri = new_store(tmp_path_factory.mktemp("store") / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        yield uri


@pytest.fixture(scope="session")
def small(tiny, tmp_path_factory):
    """`tiny` with enough validation images to certify something.

    A trial takes all CPUs of the cluster, so that one is trained at a time.
    """
    parts = {"train": 300, "validation": 400, "gallery": 200, "tuning": 100, "test": 200}
    defaults = {
        "data": DataConfig("digits", options={**parts, "calibration": 200}),
        "storage": str(tmp_path_factory.mktemp("runs")),
        "epochs": 2,
        "threads": 3,
    }
    return lambda name, **changes: tiny(name, **(defaults | changes))


@pytest.fixture(scope="session")
def certified():
    """`certified(run folder, alpha, delta)`: the mean set size, counted one by one, or None."""

    def counted(folder, alpha, delta):
        results = RunResults.read(folder / VALIDATION)
        parts = [(part.scores, part.candidate_scores) for part in results.parts]
        return certified_size(parts, alpha, delta)

    return counted


@pytest.fixture(scope="session")
def runs_in():
    """`runs_in(store, parent)`: MLflow runs by name, which are all different; below one or all."""

    def runs_by_name(store, parent=None):
        client = MlflowClient(store)
        (experiment,) = client.search_experiments(filter_string="name = 'rcir'")
        below = f"tags.`mlflow.parentRunId` = '{parent}'" if parent else ""
        runs = client.search_runs([experiment.experiment_id], below)
        by_name = {run.info.run_name: run for run in runs}
        assert len(by_name) == len(runs), sorted(run.info.run_name for run in runs)
        return by_name

    return runs_by_name
