"""A tracking server that is away for a while: training goes on, and nothing is missing later."""

import pytest
from mlflow import MlflowClient

from rcir import tracking
from rcir.errors import TrackingUnavailable
from rcir.runs.folder import read_run
from training import train
from training.history import History

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def logged(run_id, address, name="loss"):
    history = MlflowClient(address).get_metric_history(run_id, name)
    return [(metric.step, metric.value) for metric in sorted(history, key=lambda each: each.step)]


def test_metrics_wait_for_a_server_that_is_away(server, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = tracking.start_run("waiting", {})
    history = History(tmp_path, run)
    history.add(1, {"loss": 1.0, "more": 0.1})
    assert logged(run.id, server.address) == [(1, 1.0)]

    add, epochs = History.add, []

    def away_after_first(self, epoch, metrics):
        add(self, epoch, metrics)
        epochs.append(epoch)
        if epoch == 1:
            server.stop()

    with monkeypatch.context() as patch:
        patch.setattr(History, "add", away_after_first)
        with pytest.raises(TrackingUnavailable, match="start its server"):
            train(tiny("outage", epochs=3))
    assert epochs == [1, 2, 3]
    assert capsys.readouterr().out.count("will be logged later") == 2
    half = read_run(tmp_path / "runs" / "outage")
    assert (half.path / "encoder.safetensors").is_file()
    assert not half.finished
    history.add(2, {"loss": 2.0})

    server.start()
    history.add(3, {"loss": 3.0})
    assert logged(run.id, server.address) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    found = train(tiny("outage", epochs=3))
    assert "epoch" not in capsys.readouterr().out.replace("epoch 2 will be logged later", "")
    assert found.mlflow_run == half.mlflow_run
    assert [step for step, _ in logged(found.mlflow_run, server.address)] == [1, 2, 3]
    assert MlflowClient(server.address).get_run(found.mlflow_run).info.status == "FINISHED"
    again = train(tiny("outage", epochs=3))
    assert [step for step, _ in logged(again.mlflow_run, server.address)] == [1, 2, 3]
