"""Checkpoints: what they restore, which of them are kept, and when training stops early."""

import json
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rcir.errors import InvalidData
from rcir.mining import MiningConfig
from rcir.risk import Certified
from tests.training.helpers import equal, logged, steps
from training import checkpoint, train
from training.checkpoint import (
    CheckpointWriter,
    TrainState,
    checkpoint_folder,
    last_epoch,
    read_state,
    restore,
    restore_validation,
)
from training.validation import CERTIFIED_SIZE, MEAN_AVERAGE_PRECISION, RECALL, Validation

FILES = [
    *("model.safetensors", "optimizer.safetensors", "state.json"),
    *("validation.json", "validation.safetensors"),
]


def advanced(values, sizes=None, min_delta=0.0):
    """The state of a training with these scores and sizes."""
    state = TrainState()
    for value, size in zip(values, sizes or [np.inf] * len(values), strict=True):
        state.advance(size, value, min_delta)
    return state


@pytest.mark.parametrize(
    ("sizes", "values", "best"),
    [
        ((1.4, 1.2, 1.3), (0.5, 0.6, 0.7), 2),  # sizes decide
        ((1.205, 1.2, 1.21), (0.6, 0.5, 0.7), 3),  # of those within 1%, the precision
        ((1.205, 1.2, 1.213), (0.6, 0.5, 0.7), 1),
        ((1.205, 1.19, 1.2), (0.6, 0.5, 0.55), 3),
        ((1.4, 1.0, 1.0), (0.5, 0.7, 0.6), 2),  # of equal sizes, the precision
        ((np.inf, 9.0, np.inf), (0.5, 0.6, 0.7), 2),  # a size is better than none
        ((1.0, 1.0, 1.0), (0.7, 0.7, 0.7), 3),  # of equal epochs, the last
        ((np.inf,), (0.0,), 1),
    ],
)
def test_the_best_epoch_has_the_smallest_certified_sets(sizes, values, best):
    state = advanced(values, sizes)
    assert (state.epoch, state.best_epoch) == (len(values), best)
    assert (state.best_size, state.best_score) == (sizes[best - 1], values[best - 1])


@pytest.mark.parametrize(
    ("values", "min_delta", "improved"),
    [
        ((0.5, 1.0, 1.0, 1.0), 0.0, 2),  # the first of equal epochs
        ((0.5, 0.54, 0.56, 0.58), 0.05, 3),  # 0.56 is above 0.5 + 0.05, 0.58 not above 0.61
        ((0.5, 0.75, 0.5), 0.25, 1),  # as much as min_delta is not more
    ],
)
def test_patience_counts_from_the_last_improvement(values, min_delta, improved):
    state = advanced(values, min_delta=min_delta)
    assert state.improved_epoch == improved
    assert state.improved == values[improved - 1]


def model_of(seed):
    """A small network with batch statistics, and an optimizer that has taken a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * seed, weight_decay=0.1 * seed)
    model(torch.randn(2, 2, 5, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def validation(n=6):
    ranks = np.append(np.arange(1.0, n), np.inf)
    scores = ranks.astype(np.float32)
    part = Certified(scores, np.tile(np.arange(n, dtype=np.float32), (n, 1)))
    return Validation(ranks, np.arange(n) / 7, ranks < 9, 1 / ranks, n - 1, [part])


def save(run, state, seed=1):
    model, optimizer = model_of(seed)
    with CheckpointWriter(run) as writer:
        writer.save(state, model, optimizer, validation(state.epoch + 3))
    return model, optimizer


def test_a_checkpoint_restores_weights_optimizer_state_and_validation(tmp_path):
    state = TrainState(3, 2, best_size=1.5, best_score=0.9, improved_epoch=1, steps=7)
    model, optimizer = save(tmp_path, state)
    other, stepped = model_of(2)
    assert restore(tmp_path, (3, 0), other, stepped) == (state, None, {})
    assert equal(other.state_dict(), model.state_dict())
    expected, restored = optimizer.state_dict(), stepped.state_dict()
    for ours, theirs in zip(restored["param_groups"], expected["param_groups"], strict=True):
        assert {**ours, "betas": None} == {**theirs, "betas": None}
    for number, moments in expected["state"].items():
        assert equal(restored["state"][number], moments)
    # Fused optimizers need moments that are laid out in memory as their weights.
    weight = other[0].weight
    assert stepped.state[weight]["exp_avg"].stride() == weight.stride()
    assert stepped.state[weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    stored = restore_validation(tmp_path, 3)
    np.testing.assert_array_equal(stored.ranks, validation(6).ranks)
    np.testing.assert_array_equal(stored.certified[0].scores, validation(6).certified[0].scores)
    assert stored.metrics() == validation(6).metrics()
    assert sorted(path.name for path in checkpoint_folder(tmp_path, 3).iterdir()) == FILES


def test_only_the_last_and_the_best_checkpoint_are_kept(tmp_path):
    # Left half written by a lost worker.
    (tmp_path / "checkpoints" / ".epoch-0002-another-host").mkdir(parents=True)
    assert last_epoch(tmp_path) == 0
    state = TrainState()
    for number, (precision, kept) in enumerate(
        [(0.5, {1}), (0.6, {2}), (0.4, {2, 3}), (0.5, {2, 4}), (0.7, {5})], 1
    ):
        state.advance(np.inf, precision, 0.0)
        save(tmp_path, state)
        assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
            f"epoch-{epoch:04d}" for epoch in kept
        }
        assert last_epoch(tmp_path) == number
        assert read_state(tmp_path).best_epoch == state.best_epoch == min(kept)


def test_restoring_waits_for_another_node_but_not_endlessly(tmp_path, monkeypatch):
    writer = threading.Timer(0.2, lambda: save(tmp_path, TrainState(4, 4)))
    writer.start()
    assert restore(tmp_path, (4, 0), *model_of(2))[0].epoch == 4
    writer.join()
    monkeypatch.setattr(checkpoint, "SHARED_FOLDER_DELAY", 0)
    with pytest.raises(FileNotFoundError):
        restore(tmp_path, (5, 0), *model_of(1))


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    save(tmp_path, TrainState(1, 1))
    path = checkpoint_folder(tmp_path, 1) / "state.json"
    numbers = json.loads(path.read_text())
    numbers["train_state"]["best"] = numbers["train_state"].pop("best_score")
    path.write_text(json.dumps(numbers))
    with pytest.raises(InvalidData, match="version"):
        restore(tmp_path, (1, 0), *model_of(1))


@pytest.mark.parametrize("moment", range(0, 24, 3))
def test_killed_while_it_saves_a_run_keeps_a_whole_checkpoint(tmp_path, kill, moment):
    save(tmp_path, TrainState(1, 1), seed=1)
    kill(moment, lambda: save(tmp_path, TrainState(2, 2), seed=2))
    last = last_epoch(tmp_path)
    assert last in (1, 2)
    model, optimizer = model_of(3)
    state, _, _ = restore(tmp_path, (last, 0), model, optimizer)
    assert state.epoch == read_state(tmp_path).best_epoch == last
    assert equal(model.state_dict(), model_of(last)[0].state_dict())
    save(tmp_path, TrainState(2, 2), seed=2)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"epoch-0002"}


def test_a_run_that_learns_nothing_stops_and_is_finished(tiny):
    # No negative is farther than the nearest positive and nearer than it at once: no steps.
    never = MiningConfig("nearest", "semi-hard", margin=0.0)
    run = train(tiny("still", epochs=9, patience=2, mining=never))
    assert run.finished
    assert logged(run) == {1: 0.0, 2: 0.0, 3: 0.0}
    assert read_state(run.path).best_epoch == 3  # the last of equal epochs


@pytest.mark.parametrize("selection", ["certified-size", "recall"])
def test_a_run_stops_when_its_patience_ends_and_ships_its_best_weights(
    tiny, monkeypatch, selection
):
    left = [0.5, 0.54, 0.56, 0.58, 0.57, 0.58, 0.7]

    def metrics(self):
        score = left.pop(0) if len(left) > 1 else left[0]
        if selection == "recall":  # by which sizes and precision do not count
            return {RECALL: score, MEAN_AVERAGE_PRECISION: 1 - score, CERTIFIED_SIZE: 8 - len(left)}
        return {MEAN_AVERAGE_PRECISION: score, RECALL: 1 - score}

    monkeypatch.setattr(Validation, "metrics", metrics)
    run = train(tiny(epochs=7, patience=2, min_delta=0.05, selection=selection))
    assert steps(run) == [1, 2, 3, 4, 5]  # neither 0.58 nor 0.57 is above 0.56 + 0.05
    assert read_state(run.path).best_epoch == 4
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == {
        "epoch-0004",
        "epoch-0005",
    }
    best, last = (load_file(checkpoint_folder(run.path, epoch) / FILES[0]) for epoch in (4, 5))
    assert equal(load_file(run.path / "encoder.safetensors"), best)
    assert not equal(best, last)
