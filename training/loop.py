"""The training loop that every Ray worker runs, and that runs in this process without workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rcir.data import ImageSet, Splits, load_splits
from rcir.embedding import Embedding
from rcir.encoders import Encoder, build_encoder
from rcir.errors import InvalidConfig, InvalidData, TrainingDiverged
from rcir.losses import tuple_losses
from rcir.mining import Tuples, mine
from rcir.tracking import TrackedRun
from training import checkpoint
from training.checkpoint import Progress
from training.config import TrainingConfig
from training.progress import EpochBar
from training.validation import validate

CACHE_BATCH = 512


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


def training_loop(arguments: dict[str, Job]) -> None:
    """Train from the last checkpoint on, or from the start."""
    job = arguments["job"]
    config, folder = job.config, Path(job.folder)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    tracked = TrackedRun(*job.run)

    splits = load_splits(config.data)
    _check_matches(splits.train)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        encoder = build_encoder(
            config.encoder, config.preprocessing.channels, config.preprocessing.size
        )
    encoder.to(_device(config))
    optimizer = torch.optim.Adam(
        encoder.parameters(), config.optimizer.lr, weight_decay=config.optimizer.weight_decay
    )
    scheduler = _scheduler(optimizer, config)
    progress = checkpoint.restore(folder, encoder, optimizer, scheduler) or Progress(
        seed=config.seed
    )
    # The loss calls the wrapped model, whose gradients are averaged over the workers; all else
    # uses the encoder itself.
    model = ray.train.torch.prepare_model(encoder, move_to_device=False)

    for epoch in range(progress.epoch + 1, config.epochs + 1):
        started = time.monotonic()
        with torch.random.fork_rng(), EpochBar(epoch, config.epochs, shown=world == 1) as bar:
            torch.manual_seed(_seed(config, epoch, rank))
            trained = _epoch(config, model, encoder, splits, optimizer, epoch, bar)
        metrics = trained | validate(encoder, config.preprocessing, splits.validation).metrics()
        metrics |= {"lr": scheduler.get_last_lr()[0], "seconds": time.monotonic() - started}
        scheduler.step()
        progress.epoch = epoch
        if metrics["validation/recall_at_1"] > progress.best_recall:
            progress.best_epoch, progress.best_recall = epoch, metrics["validation/recall_at_1"]
        if rank == 0:
            # Metrics first: an epoch that is not repeated has left them.
            tracked.log_metrics(metrics, step=epoch)
            checkpoint.save(folder, progress, encoder, optimizer, scheduler)
            bar.summary(metrics)
        ray.train.report(metrics)


def _epoch(
    config: TrainingConfig,
    model: nn.Module,
    encoder: Encoder,
    splits: Splits,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    bar: EpochBar,
) -> dict[str, float]:
    """Mine tuples, and take one step per batch of them."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    device = next(encoder.parameters()).device
    rng = np.random.default_rng([config.seed, epoch, rank])
    look = _cached if config.mining.scope == "epoch" else _online
    losses, n_tuples = [], 0
    for loss, mined in look(config, model, encoder, splits.train, epoch, rng, bar):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        n_tuples += mined
        bar.advance()
    if not losses:  # no tuples, or fewer than workers
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()  # without gradients: nothing but a note to the schedule
        losses.append(torch.zeros((), device=device))
    mean = torch.stack(losses).mean()
    if world > 1:
        torch.distributed.all_reduce(mean)
        mean /= world
    if not torch.isfinite(mean):
        raise TrainingDiverged(
            f"the loss of epoch {epoch} is {mean.item()}: train anew, under another name, with a "
            "lower optimizer.lr; checkpoints of earlier epochs are kept"
        )
    return {"loss": mean.item(), "tuples": float(n_tuples)}


def _cached(
    config: TrainingConfig,
    model: nn.Module,
    encoder: Encoder,
    images: ImageSet,
    epoch: int,
    rng: np.random.Generator,
    bar: EpochBar,
) -> Iterator[tuple[Tensor, int]]:
    """The loss of each batch of tuples, mined among all images as they are, and their number."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    generator = torch.Generator().manual_seed(_seed(config, epoch, rank=-1))
    cache = _cache(config, encoder, images)
    anchors = torch.randperm(len(images), generator=generator)
    tuples = mine(cache, images.relevance, anchors, config.mining, generator)
    model.train()
    bar.start(steps=-(-len(tuples) // config.batch))
    for batch in _batches(tuples, config.batch, world):
        local = batch[rank::world]
        rows = torch.cat([local.anchor, local.positive, local.negatives.flatten()]).cpu().numpy()
        embedding = _forward(config, model, images, rows, rng)
        per_tuple = tuple_losses(embedding, local.valid, config.loss)
        # Gradients are averaged over workers: this makes them those of the mean over the batch.
        yield per_tuple.sum() * (world / len(batch)), len(batch)


def _online(
    config: TrainingConfig,
    model: nn.Module,
    encoder: Encoder,
    images: ImageSet,
    epoch: int,
    rng: np.random.Generator,
    bar: EpochBar,
) -> Iterator[tuple[Tensor, int]]:
    """The loss of the tuples within each batch of images (each worker's share of it), and their
    number."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    generator = torch.Generator().manual_seed(_seed(config, epoch, rank=-1))
    order = torch.randperm(len(images), generator=generator).numpy()
    steps = max(1, len(order) // config.batch)  # a smaller last batch has fewer tuples to offer
    model.train()
    bar.start(steps)
    for step in range(steps):
        rows = order[step * config.batch : (step + 1) * config.batch][rank::world]
        embedding = _forward(config, model, images, rows, rng)
        vectors = embedding.mean.detach()
        relevance = images.relevance.subset(rows)
        tuples = mine(vectors, relevance, torch.arange(len(rows)), config.mining, generator)
        mined = torch.tensor(len(tuples), device=vectors.device)
        if world > 1:
            torch.distributed.all_reduce(mined)
        if mined == 0:
            continue  # on every worker
        if len(tuples) == 0:  # here, not elsewhere: every weight takes part in the average
            variance = (
                embedding.mean.new_zeros(()) if embedding.variance is None else embedding.variance
            )
            yield 0 * (embedding.mean.sum() + variance.sum()), int(mined)
            continue
        members = torch.cat([tuples.anchor, tuples.positive, tuples.negatives.flatten()])
        per_tuple = tuple_losses(embedding[members], tuples.valid, config.loss)
        yield per_tuple.sum() * (world / mined), int(mined)


def _forward(
    config: TrainingConfig,
    model: nn.Module,
    images: ImageSet,
    rows: NDArray[np.int64],
    rng: np.random.Generator,
) -> Embedding:
    """Embed training images, augmented, with gradients."""
    device = next(model.parameters()).device
    pixels = config.preprocessing.resized(images.pick(rows))
    augmented = config.preprocessing.normalise(config.augmentation(pixels, rng).to(device))
    with torch.autocast(device.type, torch.bfloat16, config.precision == "bfloat16"):
        embedding: Embedding = model(augmented)
    return embedding


def _check_matches(images: ImageSet) -> None:
    """Whether there can be tuples at all; an epoch without one is none that training needs."""
    matches = images.relevance.totals(images.relevance)  # each image counts itself
    if not np.any((matches > 1) & (matches < len(images))):
        raise InvalidData(
            "no anchor has a positive and a negative: some training image must match another one "
            "and not match a third"
        )


def _cache(config: TrainingConfig, encoder: Encoder, images: ImageSet) -> Tensor:
    """Embeddings of the un-augmented training images in evaluation mode, made by all workers."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    device = next(encoder.parameters()).device
    share = -(-len(images) // world)
    rows = np.arange(rank * share, (rank + 1) * share) % len(images)  # equal shares, wrapping
    encoder.eval()
    with torch.no_grad():
        parts = [
            encoder(config.preprocessing(images.pick(block)).to(device)).mean
            for block in np.array_split(rows, -(-share // CACHE_BATCH))
        ]
    own = torch.cat(parts)
    if world == 1:
        return own
    everyone = [torch.empty_like(own) for _ in range(world)]
    torch.distributed.all_gather(everyone, own)
    return torch.cat(everyone)[: len(images)]


def _batches(tuples: Tuples, size: int, world: int) -> Iterator[Tuples]:
    """Batches of `size` tuples; a last one that would leave a worker without any is dropped."""
    for start in range(0, len(tuples), size):
        batch = tuples[start : start + size]
        if len(batch) >= world:
            yield batch


def _device(config: TrainingConfig) -> torch.device:
    if not config.use_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidConfig("use_gpu is true, but torch finds no CUDA device: set use_gpu=false")
    return ray.train.torch.get_device()


def _scheduler(optimizer: torch.optim.Optimizer, config: TrainingConfig) -> Any:
    schedules = torch.optim.lr_scheduler
    if config.optimizer.schedule == "cosine":
        return schedules.CosineAnnealingLR(optimizer, config.epochs)
    gamma = config.optimizer.gamma if config.optimizer.schedule == "exponential" else 1.0
    return schedules.ExponentialLR(optimizer, gamma)


def _seed(config: TrainingConfig, epoch: int, rank: int) -> int:
    """One independent seed per (run, epoch, worker)."""
    sequence = np.random.SeedSequence([config.seed, epoch, rank + 1])
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)
