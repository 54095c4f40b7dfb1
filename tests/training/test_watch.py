"""Warnings of trainings that go wrong without an error."""

import math

import numpy as np
import pytest

from rcir.encoders import EncoderConfig
from rcir.mining import MiningConfig
from training import OptimizerConfig, train
from training.checkpoint import TrainState, best_epoch
from training.validation import MEAN_AVERAGE_PRECISION, Validation
from training.watch import TrainingWatch, warn_of_chance


def metrics(loss, precision=0.5):
    return {"loss": loss, "tuples": 10.0, MEAN_AVERAGE_PRECISION: precision}


def test_a_criterion_at_its_highest_is_said_once(capsys):
    watch = TrainingWatch()
    for epoch, precision in enumerate((0.9, 1.0, 1.0), 1):
        watch.after(epoch, metrics(0.5, precision), 0.1)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: from epoch 2 on")
    assert "at least three" in line


@pytest.mark.parametrize(
    ("losses", "warnings"),
    [((0.3, 0.0995, 0.1004, 0.1), 1), ((0.1, 0.2, 0.1), 0), ((0.11, 0.11), 0)],
)
def test_a_loss_that_stays_where_a_collapsed_encoders_is_is_said_once(losses, warnings, capsys):
    watch = TrainingWatch()
    for epoch, loss in enumerate(losses, 1):
        watch.after(epoch, metrics(loss), 0.1)
    assert capsys.readouterr().out.count("warning: the loss stays at 0.1") == warnings


@pytest.mark.parametrize(
    ("method", "loss", "expected"),
    [
        ("deterministic", {"margin": 0.25}, 0.25),
        ("deterministic", {"form": "unsquared"}, 0.1),
        ("deterministic", {"form": "soft"}, math.log(2)),
        ("btl", {"kl_scale": 0.0}, math.log(2)),
    ],
)
def test_the_loss_of_a_collapsed_encoder_is_its_margin_or_log_2(
    method, loss, expected, tiny, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        TrainingWatch, "after", lambda self, epoch, metrics, collapsed: seen.append(collapsed)
    )
    train(tiny(epochs=1, encoder=EncoderConfig(method, dim=8), loss=loss))
    assert seen == pytest.approx([expected], rel=1e-5)


def test_a_training_that_collapses_says_so(tiny, capsys):
    still = OptimizerConfig(lr=0.05, schedule="constant", weight_decay=10.0)
    mining = MiningConfig("farthest", "hardest")
    encoder = EncoderConfig("deterministic", dim=8)
    train(tiny(epochs=4, optimizer=still, encoder=encoder, mining=mining))
    assert "the loss stays at 0.1" in capsys.readouterr().out


def validation(uncertainty, correct):
    n = len(correct)
    ranks = np.where(correct, 1.0, 2.0)
    return Validation(ranks, np.asarray(uncertainty), np.ones(n, bool), 1 / ranks, n - 1)


def test_an_uncertainty_no_better_than_chance_is_said(capsys):
    rng = np.random.default_rng(0)
    correct = rng.uniform(size=400) < 0.7
    warn_of_chance(validation(rng.uniform(size=400), correct))
    assert "no better than chance" in capsys.readouterr().out
    warn_of_chance(validation(rng.uniform(size=400) + ~correct, correct))
    warn_of_chance(validation(rng.uniform(size=30), correct[:30]))  # too few to tell
    warn_of_chance(validation(np.arange(30.0), np.ones(30, bool)))
    assert capsys.readouterr().out == ""


def test_of_equal_epochs_the_last_is_kept_and_patience_counts_from_the_first():
    state = TrainState()
    for precision in (0.5, 1.0, 1.0, 1.0):
        state.advance({MEAN_AVERAGE_PRECISION: precision}, min_delta=0.0)
    assert (state.best_epoch, state.improved_epoch) == (4, 2)


@pytest.mark.parametrize(
    ("sizes", "precisions", "kept"),
    [
        ((1.4, 1.2, 1.3), (0.5, 0.6, 0.7), 2),  # sizes decide
        ((1.4, 1.0, 1.0), (0.5, 0.7, 0.6), 2),  # of equal sizes, the precision
        ((None, 9.0, None), (0.5, 0.6, 0.7), 2),  # a size is better than none
        ((None, None, None), (0.5, 0.7, 0.6), 2),
        ((1.0, 1.0, 1.0), (0.7, 0.7, 0.7), 3),
    ],
)
def test_the_epoch_with_the_smallest_certified_sets_is_kept(sizes, precisions, kept):
    state = TrainState()
    for size, precision in zip(sizes, precisions, strict=True):
        known = {} if size is None else {"validation/certified_size_0.1": size}
        state.advance({MEAN_AVERAGE_PRECISION: precision} | known, min_delta=0.0)
    assert state.best_epoch == kept


def test_a_saturated_training_ships_its_last_weights(tiny, monkeypatch, capsys):
    monkeypatch.setattr(
        Validation, "metrics", lambda self: {MEAN_AVERAGE_PRECISION: 1.0, RECALL: 1.0}
    )
    run = train(tiny(epochs=3))
    assert best_epoch(run.path) == 3
    assert capsys.readouterr().out.count("cannot be told apart") == 1


RECALL = "validation/recall_at_1"
