"""Training that does not get anywhere says so, on the screen's side and in MLflow."""

import mlflow
import pytest
import torch
from mlflow import MlflowClient

from rcir.errors import InvalidConfig, TrainingDiverged
from training import OptimizerConfig, train


def status(name):
    """Of the last MLflow run of a name."""
    client = MlflowClient(mlflow.get_tracking_uri())
    experiment = client.get_experiment_by_name("rcir")
    filtered = f"attributes.run_name = '{name}'"
    return client.search_runs([experiment.experiment_id], filtered)[0].info.status


@pytest.mark.parametrize("batch", [16, 1000])
def test_nan_stops_the_training(tiny, batch):
    """In many small steps the loss becomes NaN, in one large step only the weights do."""
    config = tiny(f"nan-{batch}", batch=batch, optimizer=OptimizerConfig(lr=1e30))
    with pytest.raises(TrainingDiverged, match=r"lower optimizer\.lr"):
        train(config)
    assert status(config.name) == "FAILED"


def test_a_gpu_is_not_replaced_by_the_cpu_silently(tiny):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(InvalidConfig, match="use_gpu is true"):
        train(tiny(use_gpu=True))
