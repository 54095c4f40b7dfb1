"""A callback is called after every epoch, and may stop a run."""

import threading

import pytest
import ray.train
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.encoders import EncoderConfig
from tests.training.test_continued import equal, steps
from training import train
from training.checkpoint import last_epoch


class Recorder(ray.train.UserCallback):
    """Keeps what is reported, and stops the run after some epoch."""

    def __init__(self, folder=None, stop=None):
        self.epochs, self.threads, self.kept, self.recalls = [], set(), [], []
        self.folder, self.stop = folder, stop

    def after_report(self, run_context, metrics, checkpoint):
        assert run_context is None
        assert checkpoint is None
        (first,) = metrics
        self.epochs.append(first["epoch"])
        self.recalls.append(first["validation/recall_at_1"])
        self.threads.add(threading.get_ident())
        self.kept.append(last_epoch(self.folder) if self.folder else None)
        if first["epoch"] == self.stop:
            raise SystemExit(0)


@pytest.fixture(scope="module")
def whole(tiny, tracking_uri, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        return train(tiny(epochs=3))


def test_every_epoch_is_reported_once_its_checkpoint_is_there(tiny, tmp_path):
    recorder = Recorder(tmp_path / "runs" / "tiny")
    run = train(tiny(epochs=3), callback=recorder)
    assert recorder.epochs == recorder.kept == [1, 2, 3]
    assert recorder.threads == {threading.get_ident()}
    history = MlflowClient(run.tracking_uri).get_metric_history(
        run.mlflow_run, "validation/recall_at_1"
    )
    assert recorder.recalls == [metric.value for metric in history]


def test_a_run_that_is_stopped_is_noted_as_killed_and_continues(tiny, tmp_path, whole):
    folder = tmp_path / "runs" / "tiny"
    with pytest.raises(SystemExit):
        train(tiny(epochs=3), callback=Recorder(folder, stop=2))
    assert last_epoch(folder) == 2
    assert not (folder / "encoder.safetensors").exists()
    client = MlflowClient(whole.tracking_uri)
    experiment = client.get_experiment_by_name("rcir").experiment_id
    (stopped,) = client.search_runs([experiment], f"tags.`rcir.folder` = '{folder}'")
    assert stopped.info.status == "KILLED"

    recorder = Recorder(folder)
    again = train(tiny(epochs=3), callback=recorder)
    assert recorder.epochs == [3]
    assert again.mlflow_run == stopped.info.run_id
    assert client.get_run(again.mlflow_run).info.status == "FINISHED"
    assert steps(again, "loss") == [1, 2, 3]
    assert same_weights(again, whole)


def test_in_another_thread_the_weights_are_the_same(tiny, whole):
    """The function of a Ray Tune trial runs in a thread of its own."""
    runs = []
    torch.manual_seed(5)
    thread = threading.Thread(target=lambda: runs.append(train(tiny(epochs=3))))
    thread.start()
    thread.join()
    assert same_weights(runs[0], whole)


def test_members_of_an_ensemble_are_not_reported(tiny):
    recorder = Recorder()
    encoder = EncoderConfig("deep-ensemble", dim=8, options={"members": 2})
    train(tiny(epochs=1, encoder=encoder), callback=recorder)
    assert recorder.epochs == []


def same_weights(first, second):
    return equal(*(load_file(run.path / "encoder.safetensors") for run in (first, second)))
