"""Options that change while a run is trained."""

import json
from dataclasses import asdict, replace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rcir.config import parse
from rcir.data import Augmentation
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig
from tests.training.test_continued import equal, unfinish
from training import Change, OptimizerConfig, TrainingConfig, train
from training.config import override

LATER = {
    "optimizer.lr": 0.004,
    "optimizer.weight_decay": 0.01,
    "loss.margin": 0.3,
    "loss.kl_scale": 1e-3,
    "mining.negatives": "margin-violating",
    "augmentation.jitter": [0.2, 0.2, 0.0, 0.0],
}


@pytest.mark.parametrize(("schedule", "gamma"), [("cosine", 0.99), ("exponential", 0.7)])
def test_rates_are_those_of_torch(schedule, gamma):
    config, epochs = OptimizerConfig(0.3, schedule=schedule, gamma=gamma), 17
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], config.lr)
    schedules = torch.optim.lr_scheduler
    scheduler = (
        schedules.CosineAnnealingLR(optimizer, epochs)
        if schedule == "cosine"
        else schedules.ExponentialLR(optimizer, gamma)
    )
    for epoch in range(1, epochs + 1):
        assert config.rate(epoch, epochs) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()
    assert replace(config, schedule="constant").rate(epochs, epochs) == config.lr


def test_a_changed_run_is_one_that_was_stopped_and_changed_by_hand(tiny):
    constant = OptimizerConfig(schedule="constant")
    changed = train(tiny("changed", optimizer=constant, changes=(Change(3, LATER),)))
    same = train(tiny("same", optimizer=constant))

    byhand = train(tiny("byhand", optimizer=constant, epochs=2))
    unfinish(byhand.path)
    new = tiny(
        "byhand",
        micro_batches=1,
        optimizer=replace(constant, lr=0.004, weight_decay=0.01),
        loss={"margin": 0.3, "kl_scale": 1e-3},
        mining=MiningConfig("nearest", "margin-violating"),
        augmentation=Augmentation(jitter=(0.2, 0.2, 0.0, 0.0)),
    )
    stored = json.loads((byhand.path / "run.json").read_text())
    (byhand.path / "run.json").write_text(json.dumps(stored | {"config": asdict(new)}))
    byhand = train(new)

    last = "checkpoints/epoch-0004/model.safetensors"
    found, expected, unchanged = (load_file(run.path / last) for run in (changed, byhand, same))
    assert equal(found, expected)
    assert not equal(found, unchanged)
    rates = json.loads((changed.path / "metrics.json").read_text())
    assert [rates[str(epoch)]["lr"] for epoch in (1, 2, 3, 4)] == [0.001, 0.001, 0.004, 0.004]


def test_what_is_in_force_adds_up():
    config = TrainingConfig(
        "run",
        seed=3,
        changes=(
            Change(2, {"loss.margin": 0.2, "mining.num_negatives": 30, "mining.pool": 40}),
            Change(5, {"loss.margin": 0.5, "augmentation.flip": True}),
        ),
    )
    assert config.at(1) == replace(config, changes=())
    assert config.at(2) == config.at(4)
    assert (config.at(4).loss["margin"], config.at(4).augmentation.flip) == (0.2, False)
    assert config.at(8).loss == {"margin": 0.5, "kl_scale": 1e-6}
    assert (config.at(8).mining.num_negatives, config.at(8).mining.pool, config.at(8).seed) == (
        30,
        40,
        3,
    )
    assert config.at(8).augmentation == Augmentation(flip=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([(1, {"loss.margin": 0.1})], "changes name epoch 1; at least 2"),
        ([(2, {"encoder.dim": 4})], "changes name encoder.dim; only options of optimizer, loss"),
        ([(2, {"epochs": 4})], "changes name epochs; only"),
        ([(3, {}), (3, {})], "epochs 3, 3; they must go up, to at most epochs, which is 8"),
        ([(9, {})], "epochs 9; they must go up"),
        ([(2, {"loss.margins": 0.1})], "changes at epoch 2: .*margins"),
        ([(2, {"loss": 0.1})], "changes name loss; only options of"),
        ([(2, {"loss.margin": -1})], r"changes at epoch 2: loss\.margin is -1"),
        ([(2, {"loss.margin": "x"})], "changes at epoch 2: .*margin.* 'x'"),
        ([(2, {"optimizer.schedule": "cosin"})], "changes at epoch 2: .*schedule.*cosin"),
        (
            [(2, {"mining.num_negatives": 9}), (3, {"mining.pool": 8})],
            "epoch 3: mining.pool is 8, smaller",
        ),
        ([(2, {"mining.scope": "batch", "mining.samples_per_class": 5})], "epoch 2: batch is 64"),
    ],
)
def test_what_cannot_change_is_refused(changes, said):
    with pytest.raises(InvalidConfig, match=said):
        TrainingConfig("run", changes=tuple(Change(*change) for change in changes))


def test_images_must_suit_what_is_in_force_later(tiny, tmp_path):
    within = {"mining.scope": "batch", "mining.samples_per_class": 2}
    with pytest.raises(InvalidConfig, match="changes at epoch 2: batch is 33"):
        tiny(batch=33, changes=(Change(2, within),))
    config = tiny(batch=280, changes=(Change(2, within),))
    with pytest.raises(Exception, match="images of 60 labels"):
        train(config)
    assert not list(tmp_path.iterdir())


def test_changes_go_through_yaml_and_json_and_back(tiny, tmp_path):
    config = tiny(epochs=2, changes=(Change(2, LATER | {"optimizer.lr": 1e-5}),))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    read = parse(TrainingConfig, ["--config", str(tmp_path / "config.yaml")], "training", "")
    assert read == config
    run = train(config)
    assert train(read).mlflow_run == run.mlflow_run
    stored = json.loads((run.path / "run.json").read_text())
    assert stored["config"]["changes"] == [{"epoch": 2, "options": config.changes[0].options}]
    with pytest.raises(InvalidConfig, match="another changes:"):
        train(tiny(epochs=2, changes=(Change(2, LATER),)))


def test_other_values_take_the_place_of_those_named():
    config = TrainingConfig("run", batch=20)
    found = override(
        config, {"batch": 40, "mining.pool": 30, "mining.num_negatives": 20, "loss.margin": 1}
    )
    assert (found.batch, found.loss["margin"]) == (40, 1.0)
    assert found.mining == replace(config.mining, pool=30, num_negatives=20)
    assert found == replace(config, batch=40, mining=found.mining, loss=found.loss)
    for name in ("lr", "optimiser.lr", "name.lr", "a.b.c", "optimizer.rate"):
        with pytest.raises(InvalidConfig, match=name.rpartition(".")[2]):
            override(config, {name: 1})
    with pytest.raises(InvalidConfig, match="batch"):
        override(config, {"batch": "many"})
