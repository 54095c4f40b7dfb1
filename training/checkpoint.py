"""Checkpoints: a folder per epoch, and which epoch is kept; written aside, without a pickle.

    model.safetensors      weights
    optimizer.safetensors  tensors of the optimizer's state
    validation.safetensors what the validation images showed
    state.json             epoch, best epoch, numbers of the optimizer, seed

Every random draw of an epoch comes from generators seeded by (seed, epoch), so these two are the
random state: training that continues from a checkpoint draws what it would have drawn anyway.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays
from safetensors.torch import load_file
from torch import nn

from rcir.errors import CheckpointFailed, InvalidData, TrackingUnavailable
from rcir.files import write_folder, write_json
from rcir.retrieval.stored_parts import save_tensors
from rcir.terminal import console
from rcir.tracking import TrackedRun
from training.validation import CERTIFIED_SIZE, MEAN_AVERAGE_PRECISION, Validation

METRICS_FILE = "metrics.json"


class History:
    """Metrics by epoch, in `metrics.json` of a run's folder and in its MLflow run.

    Training does not wait for a tracking server that is away: what could not be logged is logged
    with a later epoch, or by the process that continues the run. No epoch is logged twice.
    """

    def __init__(self, folder: Path, tracked: TrackedRun) -> None:
        self._file = folder / METRICS_FILE
        self._tracked = tracked

    def add(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write down the metrics of an epoch, and log what is not logged yet.

        Raises:
            CheckpointFailed: the disk is full, or refuses.
        """
        try:
            write_json(self._file, self._written() | {str(epoch): dict(metrics)})
        except OSError as error:
            raise CheckpointFailed(
                f"{self._file} could not be written ({error.strerror or error}): make room, and "
                "give the same command again; it continues from the last checkpoint"
            ) from error
        try:
            self.log()
        except TrackingUnavailable as error:
            console.print(f"epoch {epoch} will be logged later: {error}", soft_wrap=True)

    def log(self) -> None:
        """Log the epochs that MLflow does not have; `TrackingUnavailable` if it is away."""
        written = {int(epoch): metrics for epoch, metrics in self._written().items()}
        for epoch in sorted(written.keys() - self._tracked.steps("loss")):
            self._tracked.log_metrics(written[epoch], step=epoch)

    def _written(self) -> dict[str, dict[str, float]]:
        files: dict[str, dict[str, float]] = (
            json.loads(self._file.read_text()) if self._file.is_file() else {}
        )
        return files


SHARED_FOLDER_DELAY = 60  # seconds after which a shared folder shows what another node wrote
PATTERN = re.compile(r"epoch-(\d+)")


@dataclass
class TrainState:
    """Numbers that training continues from.

    Attributes:
        epoch: number of epochs done.
        best_epoch: the one with the smallest certified sets of the validation images so far, or,
            where these are equal or nothing is certified, with the highest mean average precision;
            the last of several; 0 before the first.
        best_size: its certified size, infinite if nothing is certified.
        best_precision: its mean average precision.
        improved_epoch: the last whose mean average precision was better, by more than `min_delta`,
            than the best before it; patience counts from here.
        improved: its mean average precision.
        seed: of the run.
    """

    epoch: int = 0
    best_epoch: int = 0
    best_size: float = float("inf")
    best_precision: float = -1.0
    improved_epoch: int = 0
    improved: float = -1.0
    seed: int = 0

    def advance(self, metrics: Mapping[str, float], min_delta: float) -> None:
        """Note that another epoch is done, with these metrics of the validation images.

        Example:
            >>> state = TrainState()
            >>> for precision in (0.5, 0.9, 0.9):
            ...     state.advance({MEAN_AVERAGE_PRECISION: precision}, min_delta=0.0)
            >>> state.best_epoch, state.improved_epoch
            (3, 2)
        """
        self.epoch += 1
        size, precision = metrics.get(CERTIFIED_SIZE, float("inf")), metrics[MEAN_AVERAGE_PRECISION]
        if (-size, precision) >= (-self.best_size, self.best_precision):
            self.best_epoch, self.best_size, self.best_precision = self.epoch, size, precision
        if self.epoch == 1 or precision > self.improved + min_delta:
            self.improved_epoch, self.improved = self.epoch, precision


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
    """Write the checkpoint of `state.epoch`, then drop all but it and the best.

    Raises:
        CheckpointFailed: the disk is full, or refuses; earlier checkpoints are kept.
    """
    kept = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value
        for index, values in kept["state"].items()
        for name, value in values.items()
    }
    numbers = {"train_state": vars(state), "param_groups": kept["param_groups"]}

    def fill(folder: Path) -> None:
        save_tensors(model.state_dict(), folder / "model.safetensors")
        save_tensors(tensors, folder / "optimizer.safetensors")
        (folder / "validation.safetensors").write_bytes(save_arrays(validation.arrays()))
        (folder / "state.json").write_text(json.dumps(numbers, indent=1))

    folder = checkpoint_folder(run, state.epoch)
    try:
        write_folder(folder, fill)
    except OSError as error:
        raise CheckpointFailed(
            f"{folder} could not be written ({error.strerror or error}): make room, and give the "
            "same command again; it continues from the checkpoint before"
        ) from error
    for epoch in _epochs(run):
        if epoch not in (state.epoch, state.best_epoch):
            shutil.rmtree(checkpoint_folder(run, epoch))
    # Of workers that were lost while they wrote, on other hosts as well: no other one writes here.
    for aside in folder.parent.glob(".epoch-*"):
        shutil.rmtree(aside, ignore_errors=True)


def restore(
    run: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> TrainState:
    """Load the checkpoint of an epoch into its parts; wait for what this node does not yet see."""
    folder = checkpoint_folder(run, epoch)
    until = time.monotonic() + SHARED_FOLDER_DELAY
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(1)
    numbers = json.loads((folder / "state.json").read_text())
    restore_weights(run, epoch, model)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments: dict[int, dict[str, Any]] = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        index, name = key.split(".", 1)
        weight = weights[int(index)].detach()
        # Laid out in memory as its weight, which fused optimizers count on.
        laid_out = torch.empty_like(weight).copy_(value) if value.shape == weight.shape else value
        moments.setdefault(int(index), {})[name] = laid_out
    optimizer.load_state_dict({"state": moments, "param_groups": numbers["param_groups"]})
    try:
        return TrainState(**numbers["train_state"])
    except TypeError as error:
        raise InvalidData(
            f"{folder} was written by another version of rcir ({error}): train anew, under another "
            "name"
        ) from error


def last_epoch(run: Path) -> int:
    """The epoch of the last checkpoint; 0 if there is none."""
    return max(_epochs(run), default=0)


def best_epoch(run: Path) -> int:
    """The epoch whose weights were best on the validation images."""
    folder = checkpoint_folder(run, last_epoch(run))
    return int(json.loads((folder / "state.json").read_text())["train_state"]["best_epoch"])


def restore_validation(run: Path, epoch: int) -> Validation:
    """Read the validation results of an epoch."""
    path = checkpoint_folder(run, epoch) / "validation.safetensors"
    return Validation.from_arrays(load_arrays(path))


def restore_weights(run: Path, epoch: int, model: nn.Module) -> None:
    """Load the weights of one epoch."""
    model.load_state_dict(load_file(checkpoint_folder(run, epoch) / "model.safetensors"))


def _epochs(run: Path) -> list[int]:
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := PATTERN.fullmatch(name)))
