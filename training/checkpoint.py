"""Checkpoints: folders that are written aside and without a pickle; which of them are kept.

epoch-0003             after an epoch
epoch-0003-step-000200 after 200 further steps, until epoch 4 is complete

Each folder has:
model.safetensors      weights
optimizer.safetensors  tensors of the optimizer's state
state.json             epoch, best epoch, numbers of the optimizer, seed, losses not yet logged
validation.*           results on the validation images, after an epoch
progress.safetensors   between epochs, see `training.trainer.Progress`
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import nn

from rcir.encoders.weights import save_tensors
from rcir.errors import CheckpointFailed, DataUnavailable, InvalidData
from rcir.files import write_folder, write_json
from rcir.runs.bucket import CHECKPOINTS, STATE_FILE, place_of, push
from rcir.storage import as_text, is_uri, list_objects
from rcir.store import codec
from rcir.terminal import console
from rcir.tracking import MetricQueue, TrackedRun
from training.trainer import Progress
from training.validation import Validation

METRICS_FILE, PROGRESS_FILE = "metrics.json", "progress.safetensors"
LOSS, STEP_LOSS = "loss", "train/loss_step"  # by epoch, and by optimizer step
UPLOAD_ATTEMPTS = 3  # each of `storage.RETRY_S`
UPLOAD_PAUSE = 4  # times as long as a failed attempt took
SIZE_TOLERANCE = 0.01  # relative difference of certified sizes that may be noise
SHARED_FOLDER_DELAY = 60  # seconds after which a shared folder shows what another node wrote
CHECKPOINT_PATTERN = re.compile(r"epoch-(\d+)(?:-step-(\d+))?")


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
        # Losses of the epoch being trained, by step, with times.
        self.losses: dict[str, tuple[float, float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.close()

    def step(self, step: int, loss: float) -> None:
        """Queue the loss of an optimizer step; `add` writes it to the file, with its epoch."""
        self.losses[str(step)] = loss, time.time()
        self._queue.put(STEP_LOSS, step, {STEP_LOSS: loss}, self.losses[str(step)][1])

    def add(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an epoch and the losses of its steps, and queue them."""
        steps = {"steps": self.losses} if self.losses else {}
        epochs = self._epochs | {str(epoch): {"time": time.time(), **metrics, **steps}}
        with _reporting_full_disk(self._file):
            write_json(self._file, epochs)
        self._epochs, self.losses = epochs, {}
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
            f"{path} could not be written ({error.strerror or error}): make room, or check its "
            "folder; the same command continues from the last checkpoint"
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


def checkpoint_folder(run: Path, epoch: int, step: int = 0) -> Path:
    """Return the folder of the checkpoint after an epoch and some further steps."""
    return run / CHECKPOINTS / (f"epoch-{epoch:04d}" + (f"-step-{step:06d}" if step else ""))


class CheckpointWriter:
    """Writes the checkpoints of a run, and uploads them, in a thread; use it as a context.

    Training goes on while a bucket does not answer, slowed down by a fifth at most. A later
    checkpoint uploads what is missing, and the end of the context waits for it.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._uploading: Future[None] | None = None
        self._upload_at = 0.0  # the monotonic time before which nothing is uploaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._thread.shutdown()
        if kind is None and self._writing is not None:
            upload(self._run)

    def save(
        self,
        state: TrainState,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        content: Validation | Progress,
        losses: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Write a checkpoint, then drop all but it, the last epoch and the best.

        With the validation of `state.epoch`, it is written when this returns; with progress in the
        next epoch, and its losses that are not yet logged, while training goes on.
        """
        for task in (self._uploading, self._writing):
            if task is not None and (task is self._writing or task.done()):
                task.result()  # or the error in which it ended
        optimizer_state = optimizer.state_dict()
        moments = {
            f"{index}.{name}": value
            for index, values in optimizer_state["state"].items()
            for name, value in values.items()
        }
        numbers = {"train_state": vars(state), "param_groups": optimizer_state["param_groups"]}
        text = json.dumps(numbers | {"losses": dict(losses or {})}, indent=1)
        tensors = [model.state_dict(), moments]
        if between := isinstance(content, dict):
            copied = partial(torch.Tensor.to, device="cpu", copy=True)
            tensors = [{name: copied(v) for name, v in group.items()} for group in tensors]

        def fill(folder: Path) -> None:
            for values, name in zip(tensors, ("model", "optimizer"), strict=True):
                save_tensors(values, folder / f"{name}.safetensors")
            if isinstance(content, dict):
                save_tensors(content, folder / PROGRESS_FILE)
            else:
                codec.write(content, folder, "validation")
            (folder / STATE_FILE).write_text(text)

        last = state.epoch, int(content["step"]) if isinstance(content, dict) else 0
        kept = {last, (state.epoch, 0), (state.best_epoch, 0)}
        self._writing = self._thread.submit(_write, self._run, last, fill, kept)
        self._uploading = self._thread.submit(self._upload)
        if not between:
            self._writing.result()

    def _upload(self) -> None:
        if (started := time.monotonic()) < self._upload_at:
            return
        try:
            push(self._run)
        except DataUnavailable as error:
            failed = time.monotonic()
            self._upload_at = failed + UPLOAD_PAUSE * (failed - started)
            console.print(f"not uploaded, until a later checkpoint: {error}", soft_wrap=True)


def upload(run: Path) -> None:
    """Upload what a bucket lacks of a run; `CheckpointFailed` if it is away for minutes."""
    for attempt in range(UPLOAD_ATTEMPTS):
        try:
            push(run)
            return
        except DataUnavailable as error:
            if attempt + 1 == UPLOAD_ATTEMPTS:
                raise CheckpointFailed(
                    f"{as_text(place_of(run))} lacks what was trained last ({error}); the same "
                    "command continues from the last checkpoint that was uploaded"
                ) from error


def _write(
    run: Path, last: tuple[int, int], fill: Callable[[Path], None], kept: set[tuple[int, int]]
) -> None:
    """Write a checkpoint, then drop all that are not kept."""
    folder = checkpoint_folder(run, *last)
    with _reporting_full_disk(folder):
        write_folder(folder, fill)
    for other in set(_checkpoints(run)) - kept:
        shutil.rmtree(checkpoint_folder(run, *other))
    # Left by workers that were lost while writing, also on other hosts.
    for aside in folder.parent.glob(".epoch-*"):
        shutil.rmtree(aside, ignore_errors=True)


def restore(
    run: Path, last: tuple[int, int], model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[TrainState, Progress | None, dict[str, tuple[float, float]]]:
    """Load a checkpoint, see `last_checkpoint`; wait until a shared folder shows it on this node.

    Return the state, and of an incomplete epoch its progress and the losses that are not logged.
    """
    folder = checkpoint_folder(run, *last)
    until = time.monotonic() + SHARED_FOLDER_DELAY
    while not folder.is_dir() and time.monotonic() < until:
        time.sleep(1)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments: dict[int, dict[str, Any]] = {}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        index, name = key.split(".", 1)
        weight = weights[int(index)].detach()
        # Fused optimizers need the memory layout of the weight.
        laid_out = torch.empty_like(weight).copy_(value) if value.shape == weight.shape else value
        moments.setdefault(int(index), {})[name] = laid_out
    state, numbers = _read_state(folder)
    optimizer.load_state_dict({"state": moments, "param_groups": numbers["param_groups"]})
    progress = load_file(folder / PROGRESS_FILE) if last[1] else None
    return state, progress, numbers.get("losses", {})


def _read_state(folder: Path) -> tuple[TrainState, dict[str, Any]]:
    numbers = json.loads((folder / STATE_FILE).read_text())
    try:
        return TrainState(**numbers["train_state"]), numbers
    except TypeError as error:
        raise InvalidData(
            f"{folder} is of another version of rcir ({error}): train under another name"
        ) from error


def last_checkpoint(run: Path) -> tuple[int, int]:
    """Return the complete epochs of the last checkpoint, and its steps of the next one."""
    return max(_checkpoints(run), default=(0, 0))


def last_epoch(run: Path) -> int:
    """Return the last epoch that is complete; 0 if there is none."""
    return max((epoch for epoch, step in _checkpoints(run) if not step), default=0)


def read_state(run: Path) -> TrainState:
    """Read the state of the last epoch that is complete; there must be one."""
    return _read_state(checkpoint_folder(run, last_epoch(run)))[0]


def restore_validation(run: Path, epoch: int) -> Validation:
    """Read the validation results of an epoch."""
    return codec.read(Validation, checkpoint_folder(run, epoch), "validation")


def restore_weights(run: Path, epoch: int, model: nn.Module) -> None:
    """Load the weights of one epoch."""
    model.load_state_dict(load_file(checkpoint_folder(run, epoch) / "model.safetensors"))


def _checkpoints(run: Path) -> list[tuple[int, int]]:
    folder = run / CHECKPOINTS
    if is_uri(run):
        ends = f"/{STATE_FILE}"
        objects = [info.name for info in list_objects(folder)]
        names = [name.removesuffix(ends) for name in objects if name.endswith(ends)]
    else:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = [match for name in names if (match := CHECKPOINT_PATTERN.fullmatch(name))]
    return [(int(match[1]), int(match[2] or 0)) for match in found]
