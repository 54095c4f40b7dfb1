"""Training configurations: checks, defaults, overrides, and changes from an epoch on."""

import math
from dataclasses import replace

import pytest
import torch

from rcir.data import Augmentation, DataConfig, Preprocessing
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig
from training import Change, OptimizerConfig, TrainingConfig
from training.config import override

PER_CLASS = MiningConfig("farthest", "hardest", scope="batch", samples_per_class=4)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        *((TrainingConfig, name, -1) for name in ("seed", "num_workers", "patience")),
        *((TrainingConfig, name, 0) for name in ("epochs", "batch", "threads")),
        *((TrainingConfig, "min_delta", value) for value in (-0.1, 1.0, math.nan)),
        (TrainingConfig, "max_failures", -1),
        *((OptimizerConfig, "lr", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *((OptimizerConfig, "weight_decay", value) for value in (-0.1, math.nan)),
        *((OptimizerConfig, "gamma", value) for value in (0.0, 1.1, math.nan)),
        *((OptimizerConfig, "warmup", value) for value in (-1.0, math.nan)),
        *((OptimizerConfig, "clip_norm", value) for value in (0.0, math.nan)),
        *((OptimizerConfig, "momentum", value) for value in (-0.1, 1.0)),
        (OptimizerConfig, "reference_batch", 0),
        (TrainingConfig, "batch_per_worker", 0),
        (TrainingConfig, "storage", "hdfs://node/runs"),
        (DataConfig, "seed", -1),
        (MiningConfig, "scope", "all"),
        *((TrainingConfig, "name", name) for name in ("", ".", "..", "../up", "a/b", ".hidden")),
        # A range of workers goes up.
        *((TrainingConfig, "num_workers", value) for value in ((0, 2), (3, 2), (1, 2, 3))),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(kind, option, value):
    required = {"name": "run"} if kind is TrainingConfig else {}
    with pytest.raises(InvalidConfig, match=option):
        kind(**(required | {option: value}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 3, "num_workers": 4}, "4 workers: .* batch_per_worker"),
        ({"micro_batches": 2, "num_workers": (1, 3)}, "3 workers"),
        ({"batch": 8, "micro_batches": 9}, "9 micro-batches"),
        *(({"batch": batch, "mining": PER_CLASS}, "samples_per_class") for batch in (30, 6, 4)),
        # Occlusion covers square tiles.
        (
            {"augmentation": Augmentation(0.5), "preprocessing": Preprocessing(size=(20, 30))},
            "multiple",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(InvalidConfig, match=message):
        TrainingConfig("run", **options)


def test_each_worker_gets_a_part_of_each_batch():
    counts = [
        TrainingConfig("run", **options).n_micro_batches
        for options in ({}, {"num_workers": (1, 3)}, {"micro_batches": 6, "num_workers": 2})
    ]
    assert counts == [1, 3, 6]


def test_the_environment_names_the_folder_of_runs(monkeypatch):
    monkeypatch.setenv("RCIR_RUNS", "/shared/runs")
    assert TrainingConfig("run").storage == "/shared/runs"


@pytest.mark.parametrize(("schedule", "gamma"), [("cosine", 0.99), ("exponential", 0.7)])
def test_learning_rates_are_those_of_torch(schedule, gamma):
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


def test_a_held_rate_falls_as_that_of_a_training_that_begins_later():
    for schedule in ("cosine", "exponential"):
        optimizer = OptimizerConfig(lr=0.3, schedule=schedule, gamma=0.7, hold=5)
        rates = [optimizer.rate(epoch, 17) for epoch in range(1, 18)]
        later = [replace(optimizer, hold=None).rate(epoch, 12) for epoch in range(1, 13)]
        assert rates == pytest.approx([0.3] * 5 + later)
    assert OptimizerConfig(lr=0.3, hold=9).rate(3, 3) == 0.3


@pytest.mark.parametrize(("kind", "power"), [("adam", 0.5), ("sgd", 1)])
def test_the_rate_follows_the_batch(kind, power):
    optimizer = OptimizerConfig(kind, 0.01, reference_batch=8, schedule="constant")
    for batch in (4, 8, 128):
        assert optimizer.rate(1, 9, batch) == pytest.approx(0.01 * (batch / 8) ** power)
    assert replace(optimizer, reference_batch=None).rate(1, 9, 128) == 0.01


def test_the_rate_rises_in_the_epochs_of_the_warm_up():
    optimizer = OptimizerConfig(lr=1.0, warmup=2, schedule="constant")
    steps = [(epoch, done) for epoch in (1, 2, 3) for done in (0.5, 1.0)]
    rates = [optimizer.rate(epoch, 3, done=done) for epoch, done in steps]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_a_batch_per_worker_is_multiplied_by_the_workers():
    assert [
        TrainingConfig("run", batch_per_worker=8, num_workers=workers).batch
        for workers in (0, 1, 16, (2, 5))
    ] == [8, 8, 128, 40]
    config = TrainingConfig("run", batch_per_worker=8, num_workers=16)
    assert override(config, {"batch_per_worker": 2}).batch == 32
    assert override(config, {"num_workers": 100}).batch == 800
    assert override(config, {"batch": 20}).batch == 20


def test_changes_add_up_over_the_epochs():
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
    assert config.at(8).loss == {"margin": 0.5, "kl_scale": 1e-6, "epsilon": 0.0}
    last = config.at(8)
    assert (last.mining.num_negatives, last.mining.pool, last.seed) == (30, 40, 3)
    assert last.augmentation == Augmentation(flip=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(1, {"loss.margin": 0.1})], "epoch 1"),
        ([(2, {"encoder.dim": 4})], "encoder.dim"),
        ([(2, {"epochs": 4})], "epochs"),
        ([(3, {}), (3, {})], "3, 3"),
        ([(9, {})], "9"),  # of 8 epochs
        ([(2, {"loss": 0.1})], "loss"),
        ([(2, {"loss.margin": -1})], "margin"),
        ([(2, {"optimizer.kind": "sgd"})], "optimizer.kind"),
        ([(2, {"mining.num_negatives": 9}), (3, {"mining.pool": 8})], "epoch 3"),
        ([(2, {"mining.scope": "batch", "mining.samples_per_class": 5})], "batch"),
    ],
)
def test_changes_that_cannot_be_made_are_refused(changes, message):
    with pytest.raises(InvalidConfig, match=message):
        TrainingConfig("run", changes=tuple(Change(*change) for change in changes))


def test_override_replaces_only_the_named_options():
    config = TrainingConfig("run", batch=20)
    changed = override(
        config, {"batch": 40, "mining.pool": 30, "mining.num_negatives": 20, "loss.margin": 1}
    )
    assert (changed.batch, changed.loss["margin"]) == (40, 1.0)
    assert changed.mining == replace(config.mining, pool=30, num_negatives=20)
    assert changed == replace(config, batch=40, mining=changed.mining, loss=changed.loss)
    for name in ("lr", "name.lr", "a.b.c", "optimizer.rate", "loss.margins"):
        with pytest.raises(InvalidConfig, match=name.rpartition(".")[2]):
            override(config, {name: 1})
    for name in ("batch", "loss.margin", "optimizer.schedule"):
        with pytest.raises(InvalidConfig, match=name.rpartition(".")[2]):
            override(config, {name: "many"})
