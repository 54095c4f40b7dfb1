"""Warnings of trainings that go wrong without an error."""

import numpy as np
import pytest
import torch

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import embed
from rcir.mining import MiningConfig
from training import OptimizerConfig, train
from training.validation import (
    MEAN_AVERAGE_PRECISION,
    TrainingWatch,
    Validation,
    constant_share,
    hidden_ranges,
    warn_of_chance,
)


def watched(capsys, losses, precisions):
    """Return the output for epochs with these numbers; a collapsed encoder has a loss of 0.1."""
    watch = TrainingWatch()
    for epoch, (loss, precision) in enumerate(zip(losses, precisions, strict=True), 1):
        metrics = {"loss": loss, "tuples": 10.0, MEAN_AVERAGE_PRECISION: precision}
        watch.after(epoch, metrics, 0.1)
    return capsys.readouterr().out


def test_a_saturated_criterion_is_reported_once(capsys):
    (line,) = watched(capsys, (0.5, 0.5, 0.5), (0.9, 1.0, 1.0)).splitlines()
    assert line.startswith("warning")
    assert "epoch 2" in line


@pytest.mark.parametrize(
    ("losses", "warnings"),
    [((0.3, 0.0995, 0.1004, 0.1), 1), ((0.1, 0.2, 0.1), 0), ((0.11, 0.11), 0)],
)
def test_a_loss_that_stays_at_that_of_a_collapsed_encoder_is_reported_once(
    losses, warnings, capsys
):
    assert watched(capsys, losses, [0.5] * len(losses)).count("collapsed") == warnings


def test_a_training_that_collapses_is_reported(tiny, capsys):
    collapsing = OptimizerConfig(lr=0.05, schedule="constant", weight_decay=10.0)
    encoder = EncoderConfig("deterministic", dim=8)
    mining = MiningConfig("farthest", "hardest")
    train(tiny(batch=8, epochs=3, optimizer=collapsing, encoder=encoder, mining=mining))
    assert "collapsed" in capsys.readouterr().out


def test_hidden_units_with_one_value_for_all_images_are_counted():
    config = EncoderConfig("btl", dim=8, options={"variance_hidden": 8, "activation": "relu"})
    encoder = build_encoder(config, 1, (8, 16))
    bias = encoder.variance_head.layers[1].bias
    images = np.random.default_rng(0).integers(256, size=(300, 8, 16), dtype=np.uint8)
    shares = []
    for dead in (slice(0), slice(3), slice(8)):
        with torch.no_grad():
            bias[:] = 10.0
            bias[dead] = -1e6
        with hidden_ranges(encoder) as ranges:
            embed(encoder, Preprocessing(), images)
        shares.append(constant_share(ranges)["validation/constant_units"])
    assert shares == [0, 3 / 8, 1]
    assert not encoder.parts()[1]  # no hook stays
    with hidden_ranges(build_encoder(EncoderConfig("deterministic"), 1, (8, 16))) as ranges:
        assert constant_share(ranges) == {}


def validation(uncertainty, correct):
    n = len(correct)
    ranks = np.where(correct, 1.0, 2.0)
    return Validation(ranks, np.asarray(uncertainty), np.ones(n, bool), 1 / ranks, n - 1)


def test_an_uncertainty_no_better_than_chance_is_reported(capsys):
    rng = np.random.default_rng(0)
    correct = rng.uniform(size=400) < 0.7
    warn_of_chance(validation(rng.uniform(size=400), correct))
    assert "chance" in capsys.readouterr().out
    warn_of_chance(validation(rng.uniform(size=400) + ~correct, correct))
    warn_of_chance(validation(rng.uniform(size=30), correct[:30]))  # too few to tell
    warn_of_chance(validation(np.arange(30.0), np.ones(30, bool)))
    assert capsys.readouterr().out == ""


def test_a_constant_uncertainty_is_reported_as_such(capsys):
    for n in (30, 400):
        warn_of_chance(validation(np.full(n, 0.001), np.arange(n) % 2 == 0))
        (line,) = capsys.readouterr().out.splitlines()
        assert "the same for all validation images" in line
        assert "train longer" not in line
