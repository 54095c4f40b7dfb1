"""Checkpoints: a folder per epoch, written aside and without a pickle; which epochs are kept.

model.safetensors      weights
optimizer.safetensors  tensors of the optimizer's state
validation.*           results on the validation images
state.json             epoch, best epoch, numbers of the optimizer, seed
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import nn

from rcir.encoders.weights import save_tensors
from rcir.errors import CheckpointFailed, InvalidData
from rcir.files import write_folder, write_json
from rcir.store import codec
from rcir.tracking import MetricQueue, TrackedRun
from training.validation import Validation

METRICS_FILE = "metrics.json"
LOSS, STEP_LOSS = "loss", "train/loss_step"  # by epoch, and by optimizer step
SIZE_TOLERANCE = 0.01  # relative difference of certified sizes that may be noise
SHARED_FOLDER_DELAY = 60  # seconds after which a shared folder shows what another node wrote
EPOCH_PATTERN = re.compile(r"epoch-(\d+)")


class History:
    """Metrics by epoch and losses by step, in `metrics.json` of a run's folder and in MLflow.

    A thread logs them to MLflow, with the time at which the epoch or step ended, so that training
    does not wait. `log`, or the process that continues the run, logs what is missing then.
    """

    def __init__(self, folder: Path, tracked: TrackedRun) -> None:
        self._file = folder / METRICS_FILE
        self._tracked = tracked
        self._queue = MetricQueue(tracked)
        self._queued: set[str] = set()
        self._losses: dict[str, tuple[float, float]] = {}  # of the epoch being trained, with times

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.close()

    def step(self, step: int, loss: float) -> None:
        """Queue the loss of an optimizer step; `add` writes it to the file, with its epoch."""
        self._losses[str(step)] = loss, time.time()
        self._queue.put(STEP_LOSS, step, {STEP_LOSS: loss}, self._losses[str(step)][1])

    def add(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an epoch and the losses of its steps, and queue them."""
        steps = {"steps": self._losses} if self._losses else {}
        epochs = self._epochs | {str(epoch): {"time": time.time(), **metrics, **steps}}
        with _reporting_full_disk(self._file):
            write_json(self._file, epochs)
        self._epochs, self._losses = epochs, {}
        # An earlier process may have left epochs unlogged.
        for number in sorted(epochs.keys() - self._queued, key=int):
            for point in _points(number, epochs[number]):
                self._queue.put(*point)
        self._queued |= epochs.keys()

    def log(self) -> None:
        """Log what MLflow does not have yet; `TrackingUnavailable` if it cannot be reached."""
        items = [point for epoch in self._epochs.items() for point in _points(*epoch)]
        stored = {marker: self._tracked.steps(marker) for marker in {item[0] for item in items}}
        self._tracked.log_points(
            (name, step, value, at)
            for marker, step, values, at in items
            if step not in stored[marker]
            for name, value in values.items()
        )

    @cached_property
    def _epochs(self) -> dict[str, dict[str, Any]]:
        return read_epochs(self._file.parent)


def read_epochs(run: Path) -> dict[str, dict[str, Any]]:
    """Return the metrics of the epochs of a run by number; "time" is the end of an epoch."""
    file = run / METRICS_FILE
    if not file.is_file():
        return {}
    epochs: dict[str, dict[str, Any]] = json.loads(file.read_text())
    return epochs


def _points(
    epoch: str, metrics: Mapping[str, Any]
) -> Iterator[tuple[str, int, dict[str, float], float]]:
    """Yield the points to log of an epoch: marker (see `MetricQueue`), step, metrics and time."""
    for step, (loss, at) in metrics.get("steps", {}).items():
        yield STEP_LOSS, int(step), {STEP_LOSS: loss}, at
    values = {name: value for name, value in metrics.items() if name not in ("time", "steps")}
    yield LOSS, int(epoch), values, metrics["time"]


@contextmanager
def _reporting_full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointFailed(
            f"{path} could not be written ({error.strerror or error}): make room; the same command "
            "continues from the last checkpoint"
        ) from error


@dataclass
class TrainState:
    """Numbers that training continues from."""

    epoch: int = 0  # number of complete epochs
    best_epoch: int = 0  # the one to keep so far, the last of several; 0 before the first
    _: KW_ONLY
    best_size: float = float("inf")  # see `advance`
    best_score: float = -1.0
    smallest_size: float = float("inf")  # of all epochs
    # The last epoch whose score exceeded that of the improved epoch before it by more than
    # `min_delta`, from which patience counts; and its score.
    improved_epoch: int = 0
    improved: float = -1.0
    seed: int = 0
    steps: int = 0  # of the optimizer

    def advance(self, size: float, score: float, min_delta: float) -> None:
        """Count an epoch; the best has the highest score of those with about the smallest size."""
        self.epoch += 1
        self.smallest_size = min(self.smallest_size, self.best_size, size)
        limit = self.smallest_size * (1 + SIZE_TOLERANCE)
        if self.best_size > limit or (size <= limit and score >= self.best_score):
            self.best_epoch, self.best_size, self.best_score = self.epoch, size, score
        if self.epoch == 1 or score > self.improved + min_delta:
            self.improved_epoch, self.improved = self.epoch, score


def checkpoint_folder(run: Path, epoch: int) -> Path:
    """Return the folder of an epoch's checkpoint."""
    return run / "checkpoints" / f"epoch-{epoch:04d}"


def save_checkpoint(
    run: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    validation: Validation,
) -> None:
    """Write the checkpoint of `state.epoch`, then drop all but it and the best."""
    optimizer_state = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value
        for index, values in optimizer_state["state"].items()
        for name, value in values.items()
    }
    numbers = {"train_state": vars(state), "param_groups": optimizer_state["param_groups"]}

    def fill(folder: Path) -> None:
        save_tensors(model.state_dict(), folder / "model.safetensors")
        save_tensors(tensors, folder / "optimizer.safetensors")
        codec.write(validation, folder, "validation")
        (folder / "state.json").write_text(json.dumps(numbers, indent=1))

    folder = checkpoint_folder(run, state.epoch)
    with _reporting_full_disk(folder):
        write_folder(folder, fill)
    for epoch in _epochs(run):
        if epoch not in (state.epoch, state.best_epoch):
            shutil.rmtree(checkpoint_folder(run, epoch))
    # Left by workers that were lost while writing, also on other hosts.
    for aside in folder.parent.glob(".epoch-*"):
        shutil.rmtree(aside, ignore_errors=True)


def restore(
    run: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> TrainState:
    """Load the checkpoint of an epoch; wait until a shared folder shows it on this node."""
    folder = checkpoint_folder(run, epoch)
    until = time.monotonic() + SHARED_FOLDER_DELAY
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(1)
    restore_weights(run, epoch, model)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments: dict[int, dict[str, Any]] = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        index, name = key.split(".", 1)
        weight = weights[int(index)].detach()
        # Fused optimizers need the memory layout of the weight.
        laid_out = torch.empty_like(weight).copy_(value) if value.shape == weight.shape else value
        moments.setdefault(int(index), {})[name] = laid_out
    state, param_groups = _read_state(folder)
    optimizer.load_state_dict({"state": moments, "param_groups": param_groups})
    return state


def _read_state(folder: Path) -> tuple[TrainState, list[dict[str, Any]]]:
    numbers = json.loads((folder / "state.json").read_text())
    try:
        return TrainState(**numbers["train_state"]), numbers["param_groups"]
    except TypeError as error:
        raise InvalidData(
            f"{folder} is of another version of rcir ({error}): train under another name"
        ) from error


def last_epoch(run: Path) -> int:
    """Return the epoch of the last checkpoint; 0 if there is none."""
    return max(_epochs(run), default=0)


def read_state(run: Path) -> TrainState:
    """Read the state of the last checkpoint, which must exist."""
    return _read_state(checkpoint_folder(run, last_epoch(run)))[0]


def restore_validation(run: Path, epoch: int) -> Validation:
    """Read the validation results of an epoch."""
    return codec.read(Validation, checkpoint_folder(run, epoch), "validation")


def restore_weights(run: Path, epoch: int, model: nn.Module) -> None:
    """Load the weights of one epoch."""
    model.load_state_dict(load_file(checkpoint_folder(run, epoch) / "model.safetensors"))


def _epochs(run: Path) -> list[int]:
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := EPOCH_PATTERN.fullmatch(name)))
