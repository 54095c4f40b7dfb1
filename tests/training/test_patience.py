"""A run whose recall no longer rises stops, and keeps the best weights it had."""

import pytest
import torch
from safetensors.torch import load_file

from tests.training.test_continued import equal, steps, unfinish
from training import OptimizerConfig, train
from training.checkpoint import best_epoch, checkpoint_folder
from training.validation import MEAN_AVERAGE_PRECISION, Validation


def script(monkeypatch, precisions):
    """Let validation state these precisions, epoch by epoch, and the last of them from then on."""
    left = list(precisions)

    def metrics(self):
        now = left.pop(0) if len(left) > 1 else left[0]
        return {MEAN_AVERAGE_PRECISION: now, "validation/recall_at_1": now}

    monkeypatch.setattr(Validation, "metrics", metrics)


def test_a_run_that_learns_nothing_stops_and_is_done(tiny, capsys):
    still = OptimizerConfig(lr=1e-12, schedule="constant")  # less than a weight's rounding
    config = tiny("still", epochs=9, patience=2, optimizer=still)
    run = train(config)
    assert run.finished
    assert steps(run, "loss") == [1, 2, 3]
    assert best_epoch(run.path) == 3  # of equal ones the last
    weights = load_file(run.path / "encoder.safetensors")
    unfinish(run.path)
    capsys.readouterr()

    again = train(config)
    assert "epoch" not in capsys.readouterr().out
    assert again.finished
    assert steps(again, "loss") == [1, 2, 3]
    assert equal(load_file(run.path / "encoder.safetensors"), weights)


@pytest.mark.parametrize(
    ("patience", "min_delta", "last", "best"),
    [
        (2, 0.0, 6, 6),  # 0.57 and 0.58 are not above 0.58; of equal ones the last is kept
        (2, 0.05, 5, 4),  # 0.54 is not far enough above 0.50, but 0.56 is; 0.58 not above that
        (1, 0.05, 2, 2),
        (3, 0.0, 7, 7),  # waits long enough for 0.7, the last epoch
        (0, 0.0, 7, 7),
        (0, 0.15, 7, 7),
    ],
)
def test_patience_counts_epochs_since_the_best(patience, min_delta, last, best, tiny, monkeypatch):
    script(monkeypatch, [0.5, 0.54, 0.56, 0.58, 0.57, 0.58, 0.7])
    run = train(tiny(epochs=7, patience=patience, min_delta=min_delta))
    assert steps(run, "loss") == list(range(1, last + 1))
    assert best_epoch(run.path) == best
    checkpoint = load_file(checkpoint_folder(run.path, best) / "model.safetensors")
    assert equal(load_file(run.path / "encoder.safetensors"), checkpoint)


def test_what_a_stopped_run_keeps_is_the_best_and_the_last_checkpoint(tiny, monkeypatch):
    script(monkeypatch, [0.5, 0.6, 0.55, 0.4])
    run = train(tiny(epochs=9, patience=2))
    kept = {path.name for path in (run.path / "checkpoints").iterdir()}
    assert kept == {"epoch-0002", "epoch-0004"}
    first, last = (
        load_file(checkpoint_folder(run.path, epoch) / "model.safetensors") for epoch in (2, 4)
    )
    assert not all(torch.equal(values, last[name]) for name, values in first.items())
