"""The training loop, with early stopping: in this process, or on Ray workers that may be lost."""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer
from ray.util import get_current_placement_group

from rcir.cluster import cpus_per_gpu, join_cluster
from rcir.data import ImageSet, data_root, load_splits
from rcir.data.rejects import REJECTS_FILE, read_rejects
from rcir.embedding import Embedding
from rcir.encoders import build_encoder
from rcir.encoders.batches import BATCH, embed
from rcir.errors import RcirError, WorkersLost
from rcir.runs.folder import RunFolder
from rcir.terminal import console, forwarded, working
from rcir.torch_settings import keep_freed_memory
from rcir.tracking import TrackedRun
from training import checkpoint
from training.checkpoint import History, TrainState
from training.config import TrainingConfig
from training.images import on_features
from training.trainer import Trainer, freeze_affine
from training.validation import (
    CERTIFIED_SIZE,
    MEAN_AVERAGE_PRECISION,
    RECALL,
    TrainingWatch,
    constant_share,
    hidden_ranges,
    validate,
)
from training.workers import LOG_FILE, PROGRESS_FILE, Workers, add_line, follow

PLACEMENT_GROUP = "placement_group"  # where its id is reported
Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """The job of a worker: the configuration, absolute folder and MLflow run of a training."""

    config: TrainingConfig
    folder: Path
    tracked: TrackedRun


def training_loop(job: Job) -> None:
    """Train from the last checkpoint, or from the start, as one of Ray's workers."""
    # A process that stops this training has to free the resources of its workers.
    group = get_current_placement_group()
    placement = {PLACEMENT_GROUP: group.id.hex()} if group else {}

    # Without Ray's checkpoints: Ray refuses to continue a run whose older ones were removed.
    def report(metrics: dict[str, Any]) -> None:
        ray.train.report(metrics | placement)

    workers = Workers.join(job.config.use_gpu)
    with (job.folder / LOG_FILE).open("a", buffering=1) as log:
        if workers.rank == 0:
            # Shown by the process that waits for the workers.
            console.file = log
            forwarded.append(job.folder / PROGRESS_FILE)
        _train(job, workers, report)


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
    with _threads(job.config.threads), History(job.folder, job.tracked) as history:
        with working("reading the training images", logged=True):
            trainer, validation_images, state = _prepare(job, workers)
        config, watch = trainer.config, TrainingWatch()
        first = workers.rank == 0  # decides for all: other hardware might round differently
        while not is_done(state, config):
            epoch, started = state.epoch + 1, time.monotonic()
            title = f"epoch {epoch}/{config.epochs}"
            with working(f"{title} mining", logged=True) as work:
                with torch.random.fork_rng(_generators(workers)):
                    training_metrics = trainer.epoch(epoch, work, history.step if first else None)
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
                checkpoint.save_checkpoint(
                    job.folder, state, trainer.encoder, trainer.optimizer, validation
                )
                console.print(f"{title}  {_summarize(metrics)}", soft_wrap=True)
                watch.after(epoch, metrics, trainer.collapsed_loss())
            report(metrics | {"epoch": epoch})


def _summarize(metrics: Mapping[str, float]) -> str:
    """Return the line of an epoch."""
    parts = [f"loss {metrics['loss']:.4f}", f"validation recall@1 {metrics[RECALL]:.3f}"]
    if "validation/auroc_miss" in metrics:
        parts.append(f"AUROC of misses {metrics['validation/auroc_miss']:.3f}")
    return "  ".join([*parts, f"{metrics['seconds']:.1f} s"])


def _prepare(job: Job, workers: Workers) -> tuple[Trainer, ImageSet, TrainState]:
    """Return the trainer, the validation images, and the state of the last checkpoint."""
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
    last = workers.broadcast(checkpoint.last_epoch(folder))
    state = TrainState(seed=config.seed)
    if last:
        state = checkpoint.restore(folder, last, encoder, optimizer)
    # The loss calls the wrapped model, whose gradients are averaged over the workers; all else
    # uses the encoder itself.
    model: Any = torch.compile(encoder) if config.compile else encoder
    if workers.count > 1:
        buffers = {"forward_sync_buffers": False}  # the trainer averages them
        model = ray.train.torch.prepare_model(
            model, move_to_device=False, parallel_strategy_kwargs=buffers
        )
    trainer = Trainer(config, encoder, model, optimizer, splits.train, workers, steps=state.steps)
    return trainer, splits.validation, state


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


def launch(
    config: TrainingConfig, run: RunFolder, callback: ray.train.UserCallback | None = None
) -> None:
    """Train until the run's checkpoints hold all epochs, on Ray or in this process and thread.

    Lost workers are replaced; an `RcirError` of a worker is raised, and not tried again.
    """
    data = replace(config.data, root=str(data_root(config.data)))  # workers run elsewhere
    job = Job(replace(config, data=data), run.path, run.tracked)
    if not config.most_workers:
        train_here(job, callback)
        return
    log, failures = run.path / LOG_FILE, 0
    with follow({log: ""}, lambda: describe_start(config)):
        scaling = scaling_config(config)
        while True:
            before = checkpoint.last_epoch(run.path)
            try:
                _train_on_ray(job, scaling, callback)
                return
            except ray.train.TrainingFailedError as error:
                causes = list(getattr(error, "worker_failures", {}).values()) or [error]
                for cause in causes:
                    if isinstance(cause, RcirError):
                        raise cause from error
                reached = checkpoint.last_epoch(run.path)
                failures = 1 if reached > before else failures + 1
                kinds = ", ".join(sorted({type(cause).__name__ for cause in causes}))
                failure = f"workers failed after epoch {reached} ({kinds})"
                if failures > config.max_failures:
                    first = str(causes[0]).strip().partition("\n")[0]
                    raise WorkersLost(
                        f"{failure}, {failures} times in a row, the last time by: {first}: see "
                        f"Ray's log; the same command continues {run.path} from there"
                    ) from error
                add_line(log, f"{failure}: training continues from there")


def _train_on_ray(
    job: Job, scaling: ray.train.ScalingConfig, callback: ray.train.UserCallback | None
) -> None:
    content = pickle.dumps(job)

    def run() -> None:  # by value: processes that only pass it on need not import this module
        import pickle

        from training.loop import training_loop

        training_loop(pickle.loads(content))

    trainer = TorchTrainer(
        run,
        scaling_config=scaling,
        run_config=ray.train.RunConfig(
            name="ray",
            storage_path=str(job.folder),
            callbacks=[callback] if callback else None,  # type: ignore[list-item]
            # `launch` reports failures in a line.
            logging_config=ray.train.LoggingConfig("CRITICAL"),  # type: ignore[call-arg]
        ),
    )
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    trainer.fit()


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


def run_side_by_side(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run jobs, which only wait for workers of their own, all at once on Ray; return their results.

    When one fails, the others are finished first.
    """
    join_cluster()
    task: Any = ray.remote(num_cpus=0)(lambda job: job())
    running = [task.remote(job) for job in jobs]
    results, failures = [], []
    for job in running:
        try:
            results.append(ray.get(job))
        except RayError as error:
            failures.append(error)
    if failures:
        cause = getattr(failures[0], "cause", None)
        raise cause if isinstance(cause, RcirError) else failures[0]
    return results
