import numpy as np
import pytest
from mlflow import MlflowClient

from rcir.data import load_splits
from rcir.runs import read_run
from tuning import TuningConfig, sweep

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.usefixtures("ray_cluster"),
]


def test_a_sweep_ranks_its_trials_by_the_size_they_certify(tiny):
    space = {"optimizer.lr": {"grid": [1e-3, 1e-7]}}
    best, worst = sweep(TuningConfig(tiny("sweep", epochs=2), space, trials=1, alpha=0.4))
    assert best.certified_size <= worst.certified_size
    assert {best.values["optimizer.lr"], worst.values["optimizer.lr"]} == {1e-3, 1e-7}

    run = read_run(best.folder)
    assert run.finished
    assert run.config["optimizer"]["lr"] == best.values["optimizer.lr"]
    assert best.recall_at_1 == pytest.approx(nearest_other_is_right(run))
    parents = {
        MlflowClient(run.tracking_uri)
        .get_run(read_run(trial.folder).mlflow_run)
        .data.tags["mlflow.parentRunId"]
        for trial in (best, worst)
    }
    assert len(parents) == 1


def nearest_other_is_right(run):
    """Recall at 1 of the validation images among themselves, one by one."""
    images = load_splits(run.data).validation
    vectors = run.encoder().embed(run.preprocessing(images.images)).mean.numpy()
    right = 0
    for row, vector in enumerate(vectors):
        distance = np.linalg.norm(vectors - vector, axis=1)
        distance[row] = np.inf
        right += images.labels[distance.argmin()] == images.labels[row]
    return right / len(vectors)
