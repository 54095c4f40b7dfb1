"""Training with a full disk, an absent tracking server, a locked folder or a loss that is NaN."""

import json
import resource
import subprocess
import sys
from contextlib import contextmanager

import mlflow
import pytest
import torch
from mlflow import MlflowClient

from rcir import tracking
from rcir.encoders import EncoderConfig
from rcir.errors import CheckpointFailed, InvalidConfig, TrackingUnavailable, TrainingDiverged
from rcir.runs.folder import read_run
from tests.training.helpers import same_weights, steps
from training import OptimizerConfig, train
from training.checkpoint import History


@contextmanager
def limited_file_size():
    """Yield a function after which no file of this process may grow further than some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_training_continues_from_the_checkpoint_before_the_disk_was_full(tiny, monkeypatch):
    # 1.5 MB of weights fit within the limit below, Adam's 3 MB do not.
    options = {"epochs": 2, "encoder": EncoderConfig(dim=400)}
    whole = train(tiny("whole", **options))
    add = History.add
    with monkeypatch.context() as patch, limited_file_size() as limit:

        def fill_in_second(self, epoch, metrics):
            add(self, epoch, metrics)
            if epoch == 2:
                limit(2_000_000)

        patch.setattr(History, "add", fill_in_second)
        with pytest.raises(CheckpointFailed, match="room"):
            train(tiny("full", **options))
    checkpoints = whole.path.parent / "full" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["epoch-0001"]
    assert same_weights(train(tiny("full", **options)), whole)


def test_metrics_that_cannot_be_written_raise_checkpoint_failed(tmp_path):
    history = History(tmp_path, tracking.start_run("full", {}))
    history.add(1, {"loss": 1.0})
    with limited_file_size() as limit:
        limit(10)
        with pytest.raises(CheckpointFailed, match="metrics"):
            history.add(2, {"loss": 2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"1": {"loss": 1.0}}


@pytest.mark.parametrize("batch", [32, 1000])
def test_nan_stops_the_training(tiny, batch):
    """In several steps the loss becomes NaN, in one large step only the weights do."""
    config = tiny(f"nan-{batch}", batch=batch, optimizer=OptimizerConfig(lr=1e30))
    with pytest.raises(TrainingDiverged, match=r"optimizer\.lr"):
        train(config)
    client = MlflowClient(mlflow.get_tracking_uri())
    experiment = client.get_experiment_by_name("rcir").experiment_id
    runs = client.search_runs([experiment], f"attributes.run_name = '{config.name}'")
    assert [run.info.status for run in runs] == ["FAILED"]


def test_a_missing_gpu_is_not_replaced_by_the_cpu(tiny):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(InvalidConfig, match="use_gpu"):
        train(tiny(use_gpu=True))


def test_two_processes_do_not_train_in_one_folder(tiny, tmp_path):
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    code = (
        f"from filelock import FileLock as L; l = L('{folder}/lock'); l.acquire(); print(flush=1)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        other.stdout.readline()  # it has the lock
        with pytest.raises(InvalidConfig, match="another process"):
            train(tiny(epochs=1))
    finally:
        other.kill()
        other.communicate()
    assert train(tiny(epochs=1)).finished  # the lock ended with the process


@pytest.mark.slow
@pytest.mark.distributed
def test_metrics_wait_for_a_server_that_is_away(server, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    history = History(tmp_path, tracking.start_run("waiting", {}))
    history.add(1, {"loss": 1.0, "more": 0.1})
    add, epochs = History.add, []

    def away_after_first(self, epoch, metrics):
        add(self, epoch, metrics)
        epochs.append(epoch)
        if epoch == 1:
            server.stop()

    with monkeypatch.context() as patch:
        patch.setattr(History, "add", away_after_first)
        with pytest.raises(TrackingUnavailable, match="server"):
            train(tiny("outage", epochs=3))
    assert epochs == [1, 2, 3]
    assert capsys.readouterr().out.count("will be logged later") == 2
    half = read_run(tmp_path / "runs" / "outage")
    assert (half.path / "encoder.safetensors").is_file()
    assert not half.finished
    history.add(2, {"loss": 2.0})

    server.start()
    history.add(3, {"loss": 3.0})  # and what could not be logged before
    again = train(tiny("outage", epochs=3))
    assert "epoch" not in capsys.readouterr().out.replace("epoch 2 will be logged later", "")
    assert again.mlflow_run == half.mlflow_run
    assert steps(again) == steps(train(tiny("outage", epochs=3))) == [1, 2, 3]
    client = MlflowClient(server.address)
    assert client.get_run(again.mlflow_run).info.status == "FINISHED"
    (waiting,) = client.search_runs(
        [client.get_experiment_by_name("rcir").experiment_id],
        "attributes.run_name = 'waiting'",
    )
    metrics = client.get_metric_history(waiting.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in metrics] == [(1, 1.0), (2, 2.0), (3, 3.0)]
