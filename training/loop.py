"""The training loop, with early stopping: in this process, or on Ray workers that may be lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util import get_current_placement_group

from rcir.cluster import cpus_per_gpu, join_cluster
from rcir.data import ImageSet, data_root, load_splits
from rcir.data.rejects import REJECTS_FILE, read_rejects
from rcir.embedding import Embedding
from rcir.encoders import build_encoder
from rcir.encoders.batches import BATCH, embed
from rcir.errors import RcirError, WorkersLost
from rcir.files import owner
from rcir.runs.bucket import fetch, hold, local_folder
from rcir.runs.folder import RunFolder
from rcir.storage import as_text, is_uri
from rcir.terminal import console, forwarded, working
from rcir.torch_settings import keep_freed_memory
from rcir.tracking import TrackedRun
from training import checkpoint
from training.checkpoint import CheckpointWriter, History, TrainState, last_checkpoint
from training.config import TrainingConfig
from training.images import on_features
from training.trainer import Progress, Trainer, freeze_affine
from training.validation import (
    CERTIFIED_SIZE,
    MEAN_AVERAGE_PRECISION,
    RECALL,
    TrainingWatch,
    constant_share,
    hidden_ranges,
    validate,
)
from training.workers import LOG_FILE, PROGRESS_FILE, Workers, follow

# What is reported beside metrics: an id, and what the first worker printed.
PLACEMENT_GROUP, LOG = "placement_group", "log"
# In the folder of a run: another process frees its workers' resources, which is no failure.
STOPPED_FILE = "stopped"


@dataclass(frozen=True)
class Job:
    """The job of a worker: the configuration, place and MLflow run of a training."""

    config: TrainingConfig
    place: Path  # an absolute folder, or a URI
    tracked: TrackedRun
    holder: str = field(default_factory=owner)  # of the lock of a run in a bucket

    @property
    def folder(self) -> Path:
        """The folder on this machine."""
        return local_folder(self.place, training=True)


def training_loop(job: Job) -> None:
    """Train from the last checkpoint, or from the start, as one of Ray's workers."""
    # A process that stops this training has to free the resources of its workers.
    group = get_current_placement_group()
    placement = {PLACEMENT_GROUP: group.id.hex()} if group else {}

    # Without Ray's checkpoints: Ray refuses to continue a run whose older ones were removed.
    def report(metrics: dict[str, Any]) -> None:
        if isinstance(log, StringIO):
            metrics = metrics | {LOG: log.getvalue()}
            log.truncate(log.seek(0))
        ray.train.report(metrics | placement)

    workers = Workers.join(job.config.use_gpu)
    hold(job.place, job.holder)
    folder = fetch(job.place, training=True)  # before any worker writes
    # The process that waits may be on another machine.
    file = StringIO() if is_uri(job.place) else (folder / LOG_FILE).open("a", buffering=1)
    with file as log:
        if workers.rank == 0:
            # Shown by the process that waits for the workers.
            console.file = log
            forwarded.append(folder / PROGRESS_FILE)
        _train(job, workers, report)
        (folder / PROGRESS_FILE).unlink(missing_ok=True)


def train_here(job: Job, callback: ray.train.UserCallback | None) -> None:
    """Train in this process, without Ray, whose local mode a trial of Ray Tune may not use."""

    def report(metrics: dict[str, float]) -> None:
        if callback is not None:
            callback.after_report(None, [metrics], None)  # type: ignore[arg-type]

    _train(job, Workers.alone(job.config.use_gpu), report)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Let torch use a number of threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(job: Job, workers: Workers, report: Callable[[dict[str, float]], None]) -> None:
    """Train; `report` gets the metrics of every epoch, once its checkpoint is written."""
    with (
        _threads(job.config.threads),
        History(job.folder, job.tracked) as history,
        CheckpointWriter(job.folder) as writer,
    ):
        with working("reading the training images", logged=True):
            trainer, validation_images, state, progress = _prepare(job, workers, history)
        config, watch = trainer.config, TrainingWatch()
        if workers.rank == 0 and (state.epoch or progress):
            within = f", step {int(progress['step'])} of the next" if progress else ""
            console.print(f"training continues after epoch {state.epoch}{within}")
        first = workers.rank == 0  # decides for all: other hardware might round differently

        def save(progress: Progress) -> None:
            if first:
                state.steps = trainer.steps
                writer.save(state, trainer.encoder, trainer.optimizer, progress, history.losses)

        while not is_done(state, config):
            epoch, started = state.epoch + 1, time.monotonic()
            title = f"epoch {epoch}/{config.epochs}"
            with working(f"{title} mining", logged=True) as work:
                with torch.random.fork_rng(_generators(workers)):
                    log = history.step if first else None
                    training_metrics = trainer.epoch(epoch, work, log, save, progress)
                progress = None
                work.become(f"{title} validation")
                with hidden_ranges(trainer.encoder) as ranges:
                    embedding = _embed_together(trainer, validation_images)
                validation = validate(embedding, validation_images, workers)
            metrics = workers.broadcast(validation.metrics() if first else None) | training_metrics
            metrics |= constant_share(ranges, workers)
            metrics |= {"seconds": time.monotonic() - started, "workers": workers.count}
            metrics["images_per_second"] = metrics.pop("images") / metrics["seconds"]
            if config.selection == "recall":
                state.advance(math.inf, metrics[RECALL], config.min_delta)
            else:
                size = metrics.get(CERTIFIED_SIZE, math.inf)
                state.advance(size, metrics[MEAN_AVERAGE_PRECISION], config.min_delta)
            state.steps = trainer.steps
            if first:
                # Metrics first: with its checkpoint, an epoch is not repeated.
                history.add(epoch, metrics)
                writer.save(state, trainer.encoder, trainer.optimizer, validation)
                console.print(f"{title}  {_summarize(metrics)}", soft_wrap=True)
                watch.after(epoch, metrics, trainer.collapsed_loss())
            report(metrics | {"epoch": epoch})


def _summarize(metrics: Mapping[str, float]) -> str:
    """Return the line of an epoch."""
    parts = [f"loss {metrics['loss']:.4f}", f"validation recall@1 {metrics[RECALL]:.3f}"]
    if "validation/auroc_miss" in metrics:
        parts.append(f"AUROC of misses {metrics['validation/auroc_miss']:.3f}")
    return "  ".join([*parts, f"{metrics['seconds']:.1f} s"])


def _prepare(
    job: Job, workers: Workers, history: History
) -> tuple[Trainer, ImageSet, TrainState, Progress | None]:
    """Return the trainer, the validation images, and state and progress of the last checkpoint."""
    if workers.device.type == "cpu":
        keep_freed_memory()
    config, folder = job.config, job.folder
    splits = load_splits(config.data, rejects=read_rejects(folder / REJECTS_FILE))
    with torch.random.fork_rng(_generators(workers)):
        torch.manual_seed(config.seed)
        encoder = build_encoder(
            config.encoder, config.preprocessing.channels, config.preprocessing.size
        )
    config, splits = on_features(config, splits, encoder, folder.parent)
    if config.frozen_batch_norm == "affine":
        freeze_affine(encoder)
    encoder.to(workers.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = config.optimizer.build(encoder.parameters())
    # The first worker decides: another may see an earlier state of a shared folder.
    last = workers.broadcast(last_checkpoint(folder))
    state, progress = TrainState(seed=config.seed), None
    if any(last):
        state, progress, losses = checkpoint.restore(folder, last, encoder, optimizer)
        history.losses.update(losses)
    # The loss calls the wrapped model, whose gradients are averaged over the workers; all else
    # uses the encoder itself.
    model: Any = torch.compile(encoder) if config.compile else encoder
    if workers.count > 1:
        buffers = {"forward_sync_buffers": False}  # the trainer averages them
        model = ray.train.torch.prepare_model(
            model, move_to_device=False, parallel_strategy_kwargs=buffers
        )
    trainer = Trainer(config, encoder, model, optimizer, splits.train, workers, steps=state.steps)
    return trainer, splits.validation, state, progress


def is_done(state: TrainState, config: TrainingConfig) -> bool:
    """Return True if all epochs are trained, or patience has ended."""
    waited = state.epoch - state.improved_epoch
    return state.epoch >= config.epochs or 0 < config.patience <= waited


def _embed_together(trainer: Trainer, images: ImageSet) -> Embedding:
    """Return the embedding of images on every worker; each embeds a part."""
    blocks = trainer.workers.shard(-(-len(images) // BATCH))
    rows = np.arange(len(images))[blocks.start * BATCH : blocks.stop * BATCH]
    not_empty = rows if len(rows) else np.zeros(1, np.int64)  # an empty batch would have no shape
    pixels = images.pick(not_empty)
    part = embed(trainer.encoder, trainer.config.preprocessing, pixels)[: len(rows)]
    return part.map(trainer.workers.all_gather)


def _generators(workers: Workers) -> list[torch.device]:
    """Return the devices other than the CPU on which training draws random numbers."""
    return [workers.device] if workers.device.type == "cuda" else []


@dataclass
class Failures(ray.train.UserCallback):
    """Logs failures of workers, and ends a training that would fail again.

    Ray would count failures of the whole training, also those after which it went on.
    """

    place: Path  # of the run, perhaps a URI
    folder: Path  # of the run, on the machine of the process that waits and of Ray's controller
    most: int  # in a row, without a checkpoint between them
    count: int = 0
    reached: tuple[int, int] = (0, 0)  # the last checkpoint at the last failure

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: object
    ) -> None:
        """Add what the first worker printed to the log, which it may not have reached."""
        with (self.folder / LOG_FILE).open("a") as log:
            log.write(metrics[0].get(LOG, ""))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        if (self.folder / STOPPED_FILE).is_file():
            raise WorkersLost(f"the training of {as_text(self.place)} was stopped")
        errors, last = worker_exceptions.values(), checkpoint.last_checkpoint(self.place)
        for error in errors:
            if isinstance(error, RcirError):
                raise error
        self.count = 1 if last > self.reached else self.count + 1
        self.reached = last
        kinds = ", ".join(sorted({type(error).__name__ for error in errors}))
        failure = f"workers failed after epoch {last[0]} ({kinds})"
        if self.count > self.most:
            first = str(next(iter(errors), "")).strip().partition("\n")[0]
            raise WorkersLost(
                f"{failure}, {self.count} times in a row, the last time by: {first}: see Ray's "
                f"log; the same command continues {as_text(self.place)} from its last checkpoint"
            )
        (self.folder / PROGRESS_FILE).unlink(missing_ok=True)  # of those that failed
        with (self.folder / LOG_FILE).open("a") as log:
            log.write(f"{failure}\n")


def launch(
    config: TrainingConfig, run: RunFolder, callback: ray.train.UserCallback | None = None
) -> None:
    """Train until the run's checkpoints hold all epochs, on Ray or in this process and thread.

    Lost workers are replaced; an `RcirError` of a worker is raised, and not tried again.
    """
    data = replace(config.data, root=str(data_root(config.data)))  # workers run elsewhere
    job = Job(replace(config, data=data), run.place, run.tracked)
    if not config.most_workers:
        train_here(job, callback)
        return
    (run.path / STOPPED_FILE).unlink(missing_ok=True)
    reached = checkpoint.last_checkpoint(run.path)
    failures = Failures(run.place, run.path, config.max_failures, reached=reached)
    later = " (lines follow each epoch)" if is_uri(run.place) else ""
    with follow({run.path / LOG_FILE: ""}, lambda: describe_start(config) + later):
        trainer = TorchTrainer(
            lambda: training_loop(job),
            torch_config=TorchConfig(timeout_s=config.timeout_s),
            scaling_config=scaling_config(config),
            run_config=ray.train.RunConfig(
                name=config.name,
                storage_path=str(run.path / "ray"),
                failure_config=ray.train.FailureConfig(-1),  # `Failures` ends it
                callbacks=[failures, *([callback] if callback else [])],  # type: ignore[list-item]
                logging_config=ray.train.LoggingConfig("CRITICAL"),  # type: ignore[call-arg]
            ),
        )
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            cause = getattr(error, "controller_failure", error)
            if isinstance(cause, RcirError):
                raise cause from error
            first = str(cause).strip().partition("\n")[0]
            raise WorkersLost(
                f"Ray ended the training of {as_text(run.place)} ({first}): see its log; the same "
                "command continues from the last checkpoint"
            ) from error


def describe_start(config: TrainingConfig) -> str:
    """Describe what a training waits for until its workers train."""
    if not ray.is_initialized():
        return "starting Ray"
    kind = "GPU" if config.use_gpu else "CPU"
    least = config.num_workers if isinstance(config.num_workers, int) else config.num_workers[0]
    available = ray.cluster_resources().get(kind, 0)
    if available < least:
        return f"waiting for a node: {available:g} of {least} {kind}s"
    return f"starting {least} worker{'s' * (least > 1)}"


def scaling_config(config: TrainingConfig) -> ray.train.ScalingConfig:
    """Return the workers to start, in the cluster that this process joins.

    A worker with a GPU also gets its share of the CPUs.
    """
    join_cluster()
    resources = {"GPU": 1.0, "CPU": cpus_per_gpu() // 1} if config.use_gpu else None
    return ray.train.ScalingConfig(
        num_workers=config.num_workers,  # type: ignore[arg-type]
        use_gpu=config.use_gpu,
        resources_per_worker=resources,
    )
