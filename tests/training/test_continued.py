"""Trainings that stop and continue end with the weights of trainings that did not stop."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import yaml
from mlflow import MlflowClient

from rcir.config import parse
from rcir.data import Augmentation
from rcir.errors import InvalidConfig, InvalidData
from rcir.mining import MiningConfig
from rcir.runs.folder import find_run
from tests.methods import MADE_OF_OTHERS, TRAINED, config_of
from tests.training.helpers import Stop, logged, same_weights, steps, unfinish
from training import Change, OptimizerConfig, TrainingConfig, train
from training.checkpoint import History, last_epoch

LATER = {
    "optimizer.lr": 0.004,
    "optimizer.weight_decay": 0.01,
    "loss.margin": 0.3,
    "loss.kl_scale": 1e-3,
    "mining.negatives": "margin-violating",
    "augmentation.jitter": [0.2, 0.2, 0.0, 0.0],
}


@pytest.fixture(scope="module")
def whole(tiny, train_apart):
    """A run of two epochs that was not interrupted."""
    return train_apart(tiny("whole", epochs=2))


def test_a_run_that_is_stopped_is_killed_in_mlflow_and_continues(tiny, tmp_path, whole):
    folder = tmp_path / "runs" / "tiny"
    first, second = Stop(1, folder), Stop(folder=folder)
    with pytest.raises(SystemExit):
        train(tiny(epochs=2), callback=first)
    assert last_epoch(folder) == 1
    assert not (folder / "encoder.safetensors").exists()
    client = MlflowClient(whole.tracking_uri)
    experiment = client.get_experiment_by_name("rcir").experiment_id
    (stopped,) = client.search_runs([experiment], f"tags.`rcir.folder` = '{folder}'")
    assert stopped.info.status == "KILLED"

    # In another thread, as trials of Ray Tune train, and with other random numbers.
    torch.manual_seed(5)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(train, tiny(epochs=2), callback=second).result()
    assert again.mlflow_run == stopped.info.run_id
    assert client.get_run(again.mlflow_run).info.status == "FINISHED"
    assert steps(again) == [1, 2]
    assert same_weights(again, whole)
    # Every epoch is reported once its checkpoint is there.
    assert (first.epochs, second.epochs) == ([1], [2])
    assert (first.checkpoints, second.checkpoints) == ([1], [2])
    name = "validation/recall_at_1"
    recalls = [report[name] for report in first.reports + second.reports]
    assert recalls == [*logged(again, name).values()]


def test_losses_of_steps_are_logged_once_by_a_run_that_is_stopped_within_an_epoch(
    tiny, whole, monkeypatch
):
    monkeypatch.setattr("training.trainer.LOSS_INTERVAL", 1)
    step, stopped = History.step, []

    def stop_within_second_epoch(self, number, loss):
        step(self, number, loss)
        if number == 15:
            stopped.append(time.time())
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(History, "step", stop_within_second_epoch)
        with pytest.raises(SystemExit):
            train(tiny(epochs=2))
    run = train(tiny(epochs=2))
    assert same_weights(run, whole)
    # 300 anchors in batches of 32 are ten steps.
    losses = logged(run, "train/loss_step")
    assert [*losses] == [*range(1, 21)]
    history = MlflowClient(run.tracking_uri).get_metric_history(run.mlflow_run, "train/loss_step")
    assert [m.timestamp / 1000 <= stopped[0] for m in sorted(history, key=lambda m: m.step)] == (
        [True] * 15 + [False] * 5
    )
    values = np.reshape([*losses.values()], (2, 10))
    np.testing.assert_allclose(values.mean(1), [*logged(run).values()], rtol=1e-5)

    monkeypatch.setattr("training.trainer.MAX_LOSSES", 2)
    fewer = logged(train(tiny("fewer", epochs=1)), "train/loss_step")
    assert [*fewer] == [5, 10]
    np.testing.assert_allclose([*fewer.values()], values[0].reshape(2, 5).mean(1), rtol=0.1)


def plain_metrics(run):
    """The metrics of epochs and the losses of steps, without times."""
    epochs = json.loads((run.path / "metrics.json").read_text())
    for values in epochs.values():
        values["steps"] = {number: loss for number, (loss, _) in values.get("steps", {}).items()}
        for name in ("time", "seconds", "images_per_second"):
            del values[name]
    return epochs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mining": MiningConfig("nearest", "hardest", scope="batch"), "batch": 30},
        {"encoder": config_of("norm-softmax", dim=8), "optimizer": OptimizerConfig("sgd", 0.01)},
    ],
    ids=["mined by epoch", "mined by batch", "by label"],
)
def test_a_run_continues_to_the_bit_from_a_checkpoint_within_an_epoch(tiny, monkeypatch, options):
    monkeypatch.setattr("training.trainer.LOSS_INTERVAL", 1)
    options = {"epochs": 2, "mining": MiningConfig(), **options}
    whole = train(tiny("undisturbed", **options))
    step, done = History.step, []

    def stop_at_fifteenth(self, number, loss):
        step(self, number, loss)
        done.append(number)
        if done == [*range(1, 16)]:
            raise SystemExit

    monkeypatch.setattr(History, "step", stop_at_fifteenth)
    within = tiny("within", **options, checkpoint_steps=4)
    with pytest.raises(SystemExit):
        train(within)
    names = {path.name for path in (within.folder / "checkpoints").iterdir()}
    n_steps = len(plain_metrics(whole)["1"]["steps"])
    saved = (15 - n_steps) // 4 * 4
    assert names == {"epoch-0001", f"epoch-0001-step-{saved:06d}"}
    run = train(replace(within, checkpoint_steps=None))
    assert done[15:] == [*range(n_steps + saved + 1, 2 * n_steps + 1)]
    assert same_weights(run, whole)
    assert same_weights(run, whole, "checkpoints/epoch-0002/optimizer.safetensors")
    assert plain_metrics(run) == plain_metrics(whole)
    assert not [*run.path.rglob("*-step-*")]


def test_a_run_that_stopped_after_its_last_epoch_starts_and_repeats_none(
    whole, tiny, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "runs" / "whole"
    shutil.copytree(whole.path, folder)
    unfinish(folder)
    # Left by a process that was killed while it wrote a checkpoint.
    (folder / "checkpoints" / ".epoch-0003-0123abcd").mkdir()
    monkeypatch.setattr("training.run.launch", None)
    again = train(tiny("whole", epochs=2))
    assert "epoch" not in capsys.readouterr().out
    assert again.finished
    assert again.mlflow_run == whole.mlflow_run
    assert steps(again) == [1, 2]
    assert same_weights(again, whole)


def test_a_run_of_another_version_is_refused(trained, tmp_path):
    folder = shutil.copytree(trained.path, tmp_path / "old")
    stored = json.loads((folder / "run.json").read_text())
    stored["config"]["encoder"]["members"] = 3  # as options were, side by side
    (folder / "run.json").write_text(json.dumps(stored))
    with pytest.raises(InvalidData, match="version"):
        find_run(str(folder)).encoder()


def test_changed_options_are_those_of_a_run_that_was_stopped_and_edited(tiny, tmp_path):
    constant = {"epochs": 2, "optimizer": OptimizerConfig(schedule="constant")}
    config = tiny("changed", changes=(Change(2, LATER),), **constant)
    changed = train(config)

    edited = tiny("edited", micro_batches=1, **constant)
    with pytest.raises(SystemExit):
        train(edited, callback=Stop(1))
    edited = replace(
        edited,
        optimizer=replace(edited.optimizer, lr=0.004, weight_decay=0.01),
        loss={"margin": 0.3, "kl_scale": 1e-3},
        mining=MiningConfig("nearest", "margin-violating"),
        augmentation=Augmentation(jitter=(0.2, 0.2, 0.0, 0.0)),
    )
    file = tmp_path / "runs" / "edited" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"config": asdict(edited)}))
    last = "checkpoints/epoch-0002/model.safetensors"
    assert same_weights(changed, train(edited), last)
    assert logged(changed, "lr") == {1: 0.001, 2: 0.004}

    # Changes survive YAML and JSON, and are part of the run's configuration.
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    read = parse(TrainingConfig, ["--config", str(tmp_path / "config.yaml")], "training")
    assert read == config
    assert train(read).mlflow_run == changed.mlflow_run
    with pytest.raises(InvalidConfig, match="changes"):
        train(replace(config, changes=(Change(2, {"optimizer.lr": 1e-5}),)))


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in TRAINED if name not in MADE_OF_OTHERS])
def test_every_method_continues_to_the_same_weights(method, tiny):
    config = tiny("whole", epochs=2, encoder=config_of(method, dim=8))
    with pytest.raises(SystemExit):
        train(replace(config, name="halved"), callback=Stop(1))
    assert same_weights(train(replace(config, name="halved")), train(config))
