"""What training leaves in MLflow."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Metric
from safetensors.torch import load

from training.checkpoint import best_epoch

REST = ("state.json", "validation.safetensors")
METRICS = {"loss", "tuples", "lr", "seconds", "validation/recall_at_1", "validation/auroc_miss"}


@pytest.fixture(scope="module")
def client(trained):
    return MlflowClient(trained.tracking_uri)


@pytest.fixture(scope="module")
def run(client, trained):
    return client.get_run(trained.mlflow_run)


def test_the_run_is_finished_and_names_its_folder(run, trained):
    assert run.info.status == "FINISHED"
    assert run.data.tags["rcir.folder"] == str(trained.path)
    assert "mlflow.parentRunId" not in run.data.tags


def test_parameters_are_the_flattened_configuration(run):
    params = run.data.params
    assert params["encoder.method"] == "btl"
    assert params["encoder.dim"] == "8"
    assert params["mining.positive"] == "nearest"
    assert params["data.options.train"] == "300"
    assert params["preprocessing.size"] == "(8, 16)"
    assert params["optimizer.lr"] == "0.001"
    assert params["seed"] == "4"


def test_every_epoch_has_its_metrics_at_its_step(client, run):
    assert set(run.data.metrics) >= METRICS
    for name in METRICS:
        history: list[Metric] = client.get_metric_history(run.info.run_id, name)
        assert sorted(metric.step for metric in history) == [1, 2, 3, 4]


def test_each_training_image_is_an_anchor_once(client, run, trained):
    labels = trained.data.options["train"]
    history = client.get_metric_history(run.info.run_id, "tuples")
    # 300 images of 60 classes, five each: none is without a positive or a negative.
    assert [metric.value for metric in history] == [labels] * 4


def test_the_cosine_schedule_is_that_of_its_formula(client, run):
    history = client.get_metric_history(run.info.run_id, "lr")
    expected = [1e-3 * (1 + torch.cos(torch.tensor(torch.pi * k / 4)).item()) / 2 for k in range(4)]
    assert [metric.value for metric in history] == pytest.approx(expected)


def test_the_chosen_weights_have_metrics_of_the_best_epoch(client, run, trained):
    for name in ("recall_at_1", "mean_average_precision"):
        history = client.get_metric_history(run.info.run_id, f"validation/{name}")
        (expected,) = (
            metric.value for metric in history if metric.step == best_epoch(trained.path)
        )
        assert run.data.metrics[f"chosen/{name}"] == expected


def test_the_best_checkpoint_is_an_artifact(client, run, trained, tmp_path):
    names = {item.path for item in client.list_artifacts(run.info.run_id, "checkpoint")}
    assert names == {
        f"checkpoint/{name}" for name in ("model.safetensors", "optimizer.safetensors", *REST)
    }
    path = client.download_artifacts(run.info.run_id, "checkpoint/model.safetensors", str(tmp_path))
    logged = load(Path(path).read_bytes())
    for name, values in trained.encoder().state_dict().items():
        assert torch.equal(logged[name], values)


def test_the_reliability_diagram_is_an_artifact(client, run, tmp_path):
    path = client.download_artifacts(
        run.info.run_id, "figures/validation_reliability.svg", str(tmp_path)
    )
    assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
