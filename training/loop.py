"""The training loop that every Ray worker runs, and that runs in this process without workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch

from rcir.cluster import quiet
from rcir.data import ImageSet, load_splits
from rcir.embedding import Embedding
from rcir.encoders import Encoder, build_encoder
from rcir.encoders.batches import BATCH, embed
from rcir.tracking import TrackedRun
from training import checkpoint
from training.checkpoint import Progress
from training.config import TrainingConfig
from training.history import History
from training.progress import EpochBar
from training.trainer import Trainer
from training.validation import judge
from training.workers import Workers


@dataclass(frozen=True)
class Job:
    """What a worker is told.

    Attributes:
        config: of the run.
        folder: of the run, absolute.
        run: id and tracking store of the MLflow run.
    """

    config: TrainingConfig
    folder: str
    run: tuple[str, str]


def training_loop(job: Job) -> None:
    """Train from the last checkpoint on, or from the start."""
    with quiet("ray.train"):
        _train(job)


def _train(job: Job) -> None:
    config, folder = job.config, Path(job.folder)
    workers = Workers.joined(config.use_gpu)
    history = History(folder, TrackedRun(*job.run))

    splits = load_splits(config.data)
    with torch.random.fork_rng(_generators(workers)):
        torch.manual_seed(config.seed)
        encoder = build_encoder(
            config.encoder, config.preprocessing.channels, config.preprocessing.size
        )
    encoder.to(workers.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(
        encoder.parameters(),
        config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        fused=True,
    )
    scheduler = _scheduler(optimizer, config)
    # The first worker says from which: another one may see a shared folder as it was a while ago.
    last = workers.told_by_first(checkpoint.last_epoch(folder))
    progress = Progress(seed=config.seed)
    if last:
        progress = checkpoint.restore(folder, last, encoder, optimizer, scheduler)
    # The loss calls the wrapped model, whose gradients are averaged over the workers; all else
    # uses the encoder itself. Buffers are the trainer's business.
    compiled: Any = torch.compile(encoder) if config.compile else encoder
    model = ray.train.torch.prepare_model(
        compiled,
        move_to_device=False,
        parallel_strategy_kwargs={"forward_sync_buffers": False},
    )
    trainer = Trainer(config, encoder, model, optimizer, splits.train, workers)

    while not _done(progress, config):
        epoch, started = progress.epoch + 1, time.monotonic()
        bar = EpochBar(epoch, config.epochs, shown=workers.count == 1)
        with torch.random.fork_rng(_generators(workers)), bar:
            trained = trainer.epoch(epoch, bar)
        embedding = _embedded(config, encoder, splits.validation, workers)
        found = judge(embedding, splits.validation) if workers.rank == 0 else None
        metrics = workers.told_by_first(found.metrics() if found else None) | trained
        metrics |= {"lr": scheduler.get_last_lr()[0], "seconds": time.monotonic() - started}
        scheduler.step()
        _advance(progress, config, metrics)
        if found is not None:
            # Metrics first: an epoch that is not repeated has left them.
            history.add(epoch, metrics)
            checkpoint.save(folder, progress, encoder, optimizer, scheduler, found)
            bar.summary(metrics)
        ray.train.report(metrics)


def _done(progress: Progress, config: TrainingConfig) -> bool:
    """Whether all epochs are trained, or none was better for too long."""
    waited = progress.epoch - progress.best_epoch
    return progress.epoch >= config.epochs or 0 < config.patience <= waited


def _advance(progress: Progress, config: TrainingConfig, metrics: Mapping[str, float]) -> None:
    """Note that another epoch is done."""
    progress.epoch += 1
    recall = metrics["validation/recall_at_1"]
    if progress.epoch == 1 or recall > progress.best_recall + config.min_delta:
        progress.best_epoch, progress.best_recall = progress.epoch, recall


def _embedded(
    config: TrainingConfig, encoder: Encoder, images: ImageSet, workers: Workers
) -> Embedding:
    """Embeddings of the validation images, made by all workers, on every one of them."""
    own = workers.share(-(-len(images) // BATCH))
    rows = np.arange(len(images))[own.start * BATCH : own.stop * BATCH]
    some = rows if len(rows) else np.zeros(1, np.int64)  # of none there would be no shape
    part = embed(encoder, config.preprocessing, images.pick(some))[: len(rows)]
    stated = None if part.uncertainty is None else workers.gathered(part.uncertainty)
    return Embedding(workers.gathered(part.mean), uncertainty=stated)


def _generators(workers: Workers) -> list[torch.device]:
    """The devices whose random numbers training draws, beside the CPU."""
    return [workers.device] if workers.device.type == "cuda" else []


def _scheduler(optimizer: torch.optim.Optimizer, config: TrainingConfig) -> Any:
    schedules = torch.optim.lr_scheduler
    if config.optimizer.schedule == "cosine":
        return schedules.CosineAnnealingLR(optimizer, config.epochs)
    gamma = config.optimizer.gamma if config.optimizer.schedule == "exponential" else 1.0
    return schedules.ExponentialLR(optimizer, gamma)
