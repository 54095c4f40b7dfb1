"""Training with a full disk, an absent tracking server, a locked folder or a loss that is NaN."""

import json
import socket
import subprocess
import sys
import time

import mlflow
import pytest
import torch
from mlflow import MlflowClient

from rcir import tracking
from rcir.encoders import EncoderConfig
from rcir.errors import CheckpointFailed, InvalidConfig, TrackingUnavailable, TrainingDiverged
from rcir.files import owner
from rcir.runs.folder import lock_run, read_run
from tests.kills import DEAD, limited_file_size
from tests.training.helpers import steps
from training import OptimizerConfig, train
from training.checkpoint import History
from training.workers import Workers


def test_training_continues_from_the_checkpoint_before_the_disk_was_full(
    tiny, tmp_path, monkeypatch
):
    # 1.5 MB of weights fit within the limit below, Adam's 3 MB do not.
    options = {"epochs": 2, "encoder": EncoderConfig(dim=400)}
    add = History.add
    with monkeypatch.context() as patch, limited_file_size() as limit:

        def fill_in_second(self, epoch, metrics):
            add(self, epoch, metrics)
            if epoch == 2:
                limit(2_000_000)

        patch.setattr(History, "add", fill_in_second)
        with pytest.raises(CheckpointFailed, match="room"):
            train(tiny("full", **options))
    checkpoints = tmp_path / "runs" / "full" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["epoch-0001"]
    run = train(tiny("full", **options))
    assert steps(run) == [1, 2]
    assert run.finished


def test_metrics_that_cannot_be_written_raise_checkpoint_failed(tmp_path):
    with History(tmp_path, tracking.start_run("full", {})) as history:
        history.add(1, {"loss": 1.0, "time": 5.0})
    with limited_file_size() as limit:
        limit(10)
        with pytest.raises(CheckpointFailed, match="metrics"):
            history.add(2, {"loss": 2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written == {"1": {"loss": 1.0, "time": 5.0}}


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
    command, pipes = [sys.executable, "-c", f"{code}; input()"], {"stdin": -1, "stdout": -1}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()  # it has the lock
        with pytest.raises(InvalidConfig, match="another process"):
            train(tiny(epochs=1))
        other.kill()
    with lock_run(folder):  # the lock ended with the process
        pass


def test_epochs_that_an_earlier_process_left_are_logged_with_their_time(tmp_path):
    run = tracking.start_run("left", {})
    run.log_metrics({"loss": 1.0}, 1, 10.0)
    steps = {"50": [2.5, 15.25], "100": [2.25, 20.0]}
    epochs = {"1": {"loss": 1.0, "time": 10.0}, "2": {"loss": 2.0, "time": 20.5, "steps": steps}}
    (tmp_path / "metrics.json").write_text(json.dumps(epochs))
    before = time.time()
    with History(tmp_path, run) as history:
        history.step(150, 3.5)
        history.add(3, {"loss": 3.0})
    client = MlflowClient(mlflow.get_tracking_uri())
    first, second, third = client.get_metric_history(run.id, "loss")
    assert [(m.step, m.value) for m in (first, second, third)] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert (first.timestamp, second.timestamp) == (10_000, 20_500)
    assert before - 1 < third.timestamp / 1000 < time.time()
    assert client.get_run(run.id).data.metrics.keys() == {"loss", "train/loss_step"}
    losses = sorted(client.get_metric_history(run.id, "train/loss_step"), key=lambda m: m.step)
    assert [(m.step, m.value) for m in losses] == [(50, 2.5), (100, 2.25), (150, 3.5)]
    assert [m.timestamp for m in losses[:2]] == [15_250, 20_000]
    assert before - 1 < losses[2].timestamp / 1000 <= third.timestamp / 1000
    History(tmp_path, run).log()
    assert len(client.get_metric_history(run.id, "loss")) == 3
    assert len(client.get_metric_history(run.id, "train/loss_step")) == 3


def test_training_does_not_wait_for_a_server_that_never_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("rcir.tracking.runs.DRAIN_S", 0.5)
    run = tracking.start_run("hanging", {})
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections, and no more
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        started = time.monotonic()
        with History(tmp_path, tracking.TrackedRun(run.id, address)) as history:
            for epoch in (1, 2, 3):
                history.add(epoch, {"loss": float(epoch)})
        assert time.monotonic() - started < 4.5  # one request takes 5 s
        with pytest.raises(TrackingUnavailable):
            history.log()
    History(tmp_path, run).log()
    history = MlflowClient(run.uri).get_metric_history(run.id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.slow
@pytest.mark.distributed
def test_metrics_wait_for_a_server_that_is_away(server, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("rcir.tracking.runs.RETRY_AFTER_S", 0.1)
    client = MlflowClient(server.address)
    add, epochs = History.add, []

    def away_after_first(self, epoch, metrics):
        add(self, epoch, metrics)
        epochs.append(epoch)
        if epoch == 1:
            run = read_run(tmp_path / "runs" / "outage").mlflow_run
            while not client.get_metric_history(run, "loss"):
                time.sleep(0.05)
            server.stop()

    with monkeypatch.context() as patch:
        patch.setattr(History, "add", away_after_first)
        with pytest.raises(TrackingUnavailable, match="server"):
            train(tiny("outage", epochs=3))
    assert epochs == [1, 2, 3]
    assert capsys.readouterr().out.count("will be logged later") == 1
    half = read_run(tmp_path / "runs" / "outage")
    assert (half.path / "encoder.safetensors").is_file()
    assert not half.finished

    server.start()
    again = train(tiny("outage", epochs=3))
    assert "epoch" not in capsys.readouterr().out
    assert again.mlflow_run == half.mlflow_run
    assert steps(again) == steps(train(tiny("outage", epochs=3))) == [1, 2, 3]
    assert client.get_run(again.mlflow_run).info.status == "FINISHED"
    run = tracking.start_run("waiting", {})
    with History(tmp_path, run) as history:
        history.add(1, {"loss": 1.0})
        while tracking.TrackedRun(run.id, run.uri).steps("loss") != {1}:
            time.sleep(0.05)
        server.stop()
        history.add(2, {"loss": 2.0})
        while "logged later" not in capsys.readouterr().out:
            time.sleep(0.05)
        server.start()
        history.add(3, {"loss": 3.0})  # and what could not be logged before
        until = time.monotonic() + 60
        while run.steps("loss") != {1, 2, 3} and time.monotonic() < until:
            time.sleep(0.05)
    logged = client.get_metric_history(run.id, "loss")
    assert [(metric.step, metric.value) for metric in logged] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_shared_memory_of_killed_workers_is_freed(tmp_path, monkeypatch):
    monkeypatch.setattr("training.workers.SHARED_MEMORY", tmp_path / "rcir")
    living = tmp_path / f".rcir-{owner()}-00000000"
    for path in (living, tmp_path / f".rcir-{DEAD}-00000000"):
        path.write_bytes(b"memory")
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        rows = Workers(0, 1, torch.device("cpu")).allocate_shared((2, 3), torch.float32)
    finally:
        torch.distributed.destroy_process_group()
    assert rows.shape == (2, 3)
    assert list(tmp_path.glob(".rcir*")) == [living]
