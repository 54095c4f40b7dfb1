"""One epoch of training: mine tuples, and take a step for each batch of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rcir.data import ImageSet
from rcir.data.relevance import asking
from rcir.embedding import Embedding
from rcir.encoders import EmbeddedTuples, Encoder
from rcir.encoders.features import FrozenBackbone
from rcir.encoders.memory import TRAINING_GIB, batch_within, memory_budget
from rcir.errors import TrainingDiverged
from rcir.mining import Tuples, mine, sample_images
from training.config import TrainingConfig
from training.images import image_batches, loaded, numbered_labels
from training.randomness import (
    AUGMENTATION,
    DROPOUT,
    LOSS,
    MINING,
    ORDER,
    SAMPLE,
    numpy_generator,
    seed,
    torch_generator,
)
from training.workers import CPU, EpochBar, Workers

LOSS_INTERVAL, MAX_LOSSES = 50, 1000  # steps for each loss that is logged, and losses of a run
IMAGES_AT_ONCE = 256  # images in a forward pass
ANCHORS = 4096  # for which random numbers are drawn together


class GhostBatchStatistics:
    """Moves running statistics once a step, towards the mean over the micro-batches of a step.

    Torch would move them with every micro-batch that a worker computes, without the other workers.
    Here each part writes its statistics to tensors of its own; `finish` averages them over all of
    them, on whichever worker. Of one part it does what torch does by itself.

    Args:
        encoder: whose layers of batch normalisation are meant, if it has any; not those of a frozen
            backbone, which keep their statistics.
        workers: among whom the micro-batches are dealt out.
        keep: all layers keep their statistics, as is best with pretrained weights: a few hundred
            steps of small batches would replace those of the millions of images that the weights
            belong to (Roth et al., ICML 2020, train so).
    """

    def __init__(self, encoder: nn.Module, workers: Workers, keep: bool = False) -> None:
        self._encoder = encoder
        self._workers = workers
        frozen = {
            layer
            for module in encoder.modules()
            if isinstance(module, FrozenBackbone)
            for layer in module.modules()
        }
        layers = [
            layer
            for layer in encoder.modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer not in frozen
        ]
        self._kept, self._layers = (layers, []) if keep else ([], layers)
        self._momentum = [float(layer.momentum or 0) for layer in self._layers]
        self._running = self._current()
        self._parts: list[list[Tensor]] = []

    def train(self) -> None:
        """Set the encoder to training mode, layers that keep their statistics left out."""
        self._encoder.train()
        for layer in self._kept:
            layer.eval()

    def start_part(self) -> None:
        """Before the forward pass of a micro-batch."""
        for layer in self._layers:
            layer.momentum = 1.0  # what is written is of this part alone
            layer.running_mean = torch.zeros_like(layer.running_mean)  # type: ignore[arg-type]
            layer.running_var = torch.zeros_like(layer.running_var)  # type: ignore[arg-type]
        self._parts.append(self._current())

    @torch.no_grad()
    def finish(self) -> None:
        """After the forward passes of all micro-batches; on every worker."""
        if self._layers:
            own = torch.stack([torch.cat(part) for part in self._parts]).sum(0)
            total = self._workers.all_reduce(torch.cat([own, own.new_full((1,), len(self._parts))]))
            mean = (total[:-1] / total[-1]).split([len(values) for values in self._running])
            for i, (layer, momentum) in enumerate(zip(self._layers, self._momentum, strict=True)):
                layer.running_mean, layer.running_var = self._running[2 * i : 2 * i + 2]
                layer.running_mean.lerp_(mean[2 * i], momentum)
                layer.running_var.lerp_(mean[2 * i + 1], momentum)
                layer.momentum = momentum
                if layer.num_batches_tracked is not None:
                    layer.num_batches_tracked -= len(self._parts) - 1
        self._parts = []

    def _current(self) -> list[Tensor]:
        """Means and variances, two for each layer."""
        statistics = [(layer.running_mean, layer.running_var) for layer in self._layers]
        return [values for pair in statistics for values in pair if values is not None]


def freeze_affine(encoder: nn.Module) -> None:
    """Keep scale and shift of all layers of batch normalisation out of training."""
    for layer in encoder.modules():
        if isinstance(layer, _BatchNorm):
            for weights in layer.parameters(recurse=False):
                weights.requires_grad_(False)


def mined_tuples(
    config: TrainingConfig,
    images: ImageSet,
    embed: Callable[[Tensor], Tensor],
    workers: Workers,
    epoch: int,
) -> Tuples:
    """The tuples of an epoch, in the order of training; rows are those of `images`, on the CPU.

    Blocks of images, and then anchors, are shared out among the workers; what comes of them does
    not depend on who computes it.

    Args:
        embed: uint8 images (n, C, H, W) to embeddings (n, d), both on the workers' device.
    """
    chosen = np.arange(len(images))
    relevance, sampled = images.relevance, config.mining.cache == "sampled"
    if sampled:
        rng = numpy_generator(config.seed, epoch, SAMPLE)
        chosen = sample_images(images.relevance, config.mining.sample, rng)
        relevance = relevance.subset(chosen)
    ask = torch.from_numpy(asking(relevance))
    n_anchors = config.mining.refresh * config.batch if sampled else len(ask)
    starts = range(0, len(chosen), IMAGES_AT_ONCE)
    blocks = [chosen[starts[i] : starts[i] + IMAGES_AT_ONCE] for i in workers.shard(len(starts))]
    n_embedded = sum(map(len, blocks))
    blocks = blocks or [chosen[:1]]  # of no image there would be no shape
    pixels = loaded(images, config.preprocessing, blocks, workers.device)
    embedded = torch.cat([embed(batch) for batch in pixels])[:n_embedded]
    cache = workers.all_gather(embedded, shared=True)
    order = torch_generator(config.seed, epoch, ORDER)
    rounds = -(-n_anchors // len(ask))
    anchors = torch.cat(
        [ask[torch.randperm(len(ask), generator=order, device="cpu")] for _ in range(rounds)]
    )
    anchors = anchors[:n_anchors]
    shard, own = workers.shard(n_anchors), []
    for number, start in enumerate(range(0, n_anchors, ANCHORS)):
        first, stop = max(shard.start, start), min(shard.stop, start + ANCHORS)
        if first < stop:
            generator = torch_generator(config.seed, epoch, MINING, number)
            block, part = anchors[start : start + ANCHORS], slice(first - start, stop - start)
            own.append(mine(cache, relevance, block, config.mining, generator, part))
    own = own or [mine(cache, relevance, anchors[:0], config.mining, order)]
    return _gathered(own, torch.from_numpy(chosen), workers)


def _gathered(own: list[Tuples], rows: Tensor, workers: Workers) -> Tuples:
    """The tuples of all workers, of rows of the training images."""
    columns = [torch.cat([members_of(part), part.valid], 1) for part in own]
    table = workers.all_gather(torch.cat(columns)).cpu()
    count = own[0].negatives.shape[1]
    members = rows[table[:, : 2 + count]]
    return Tuples(members[:, 0], members[:, 1], members[:, 2:], table[:, 2 + count :].bool())


def members_of(tuples: Tuples) -> Tensor:
    """(n, 2 + count) rows of tuples: anchor, positive, negatives."""
    return torch.cat([tuples.anchor[:, None], tuples.positive[:, None], tuples.negatives], 1)


class Objective(NamedTuple):
    """The batches of an epoch, and their losses.

    Attributes:
        batches: of each step, (n, m) rows of the training images: n tuples of m images (an anchor,
            its positive and its negatives), or n images, with m = 1.
        losses: returns the losses of a micro-batch, (b,); its arguments are the step, which rows of
            the batch, and their embedding, ordered as in `EmbeddedTuples`. None if tuples
            are mined within each batch of images, once all of it is embedded.
    """

    batches: Sequence[NDArray[np.int64]]
    losses: Callable[[int, slice, Embedding], Tensor] | None = None


@dataclass
class Trainer:
    """The training of one worker: encoder, optimizer, cache and its share of the images.

    A batch is computed in micro-batches. Number p of P holds every P-th tuple (or image) from the
    p-th on, and belongs to worker p mod the number of workers; its dropout is drawn for it, its
    batch normalisation is of it alone. So the steps are the same whatever the number of workers.

    Attributes:
        config: of the run; `options` is what of it is in force in the epoch being trained.
        encoder: what is trained.
        model: the encoder, wrapped so that gradients are averaged over the workers.
        optimizer: of the encoder's weights.
        images: to train on.
        workers: this process and the others.
        steps: that the optimizer has taken so far.
    """

    config: TrainingConfig
    encoder: Encoder
    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: ImageSet
    workers: Workers
    steps: int = 0

    def __post_init__(self) -> None:
        self._own_micro_batches = range(
            self.workers.rank, self.config.n_micro_batches, self.workers.count
        )
        self._statistics = GhostBatchStatistics(
            self.encoder, self.workers, self.config.frozen_batch_norm == "statistics"
        )
        self.options = self.config
        self._loss_options = self.config.loss_options()
        if self.encoder.by_label:
            self._labels = numbered_labels(self.images)

    def epoch(
        self, epoch: int, bar: EpochBar, log: Callable[[int, float], None] | None = None
    ) -> dict[str, float]:
        """Train for an epoch.

        Args:
            log: called every `LOSS_INTERVAL` steps, or less often in a long run, with the number of
                the step and the mean loss of the steps of this epoch since the last call.

        Returns:
            The mean "loss", the number of "tuples" (by label: of images), the number of "images"
            in all batches, and the last learning rate, "lr".

        Raises:
            TrainingDiverged: the loss became NaN or infinite.
        """
        self.options = self.config.at(epoch)
        self._loss_options = self.options.loss_options()
        objective = self._objective(epoch)
        bar.start(len(objective.batches))
        all_steps = self.config.epochs * len(objective.batches)
        interval = max(LOSS_INTERVAL, -(-all_steps // MAX_LOSSES))
        losses, n_tuples, rate = [], 0, self._rate(epoch, 0.0)
        for step, (loss, mined) in enumerate(self._steps(epoch, objective)):
            rate = self._rate(epoch, (step + 1) / len(objective.batches))
            if mined:
                self._update(rate)
                losses.append(loss)
                n_tuples += mined
                self.steps += 1
                if self.steps % interval == 0:
                    recent = self._mean(losses[-interval:], epoch)  # by all workers
                    if log is not None:
                        log(self.steps, recent)
            bar.advance()
        if not losses:
            losses.append(torch.zeros((), device=self.workers.device))
        mean = self._mean(losses, epoch)
        n_images = sum(batch.size for batch in objective.batches)
        return {
            "loss": mean,
            "tuples": float(n_tuples),
            "images": float(n_images),
            "lr": rate,
        }

    def _mean(self, losses: list[Tensor], epoch: int) -> float:
        """The mean of losses of steps, over all workers; waits for the device."""
        mean = self.workers.all_reduce(torch.stack(losses).mean()).item() / self.workers.count
        if not np.isfinite(mean):
            raise TrainingDiverged(
                f"the loss of epoch {epoch} is {mean}: train anew, under another name, with a "
                "lower optimizer.lr; checkpoints of earlier epochs are kept"
            )
        return mean

    def _rate(self, epoch: int, done: float) -> float:
        """The learning rate of a step after which a share of the epoch is done."""
        return self.options.optimizer.rate(epoch, self.config.epochs, self.config.batch, done)

    def _update(self, rate: float) -> None:
        """Take a step along the gradients."""
        options = self.options.optimizer
        for group in self.optimizer.param_groups:
            group.update(lr=rate, weight_decay=options.weight_decay)
        if options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.encoder.parameters(), options.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.encoder.after_step()

    def collapsed_loss(self) -> float:
        """The loss of a tuple whose images all have the same embedding; by label, the least."""
        if self.encoder.by_label:
            return float(np.log(int(self._labels.max()) + 1))
        pixels = next(loaded(self.images, self.config.preprocessing, [np.zeros(1, np.int64)], CPU))
        self.encoder.eval()
        with torch.no_grad():
            one = self._embedding(self.encoder, pixels.to(self.workers.device))
            valid = torch.ones(
                1, self.options.mining.num_negatives, dtype=torch.bool, device=pixels.device
            )
            alike = one[torch.zeros(2 + valid.numel(), dtype=torch.int64)]
            tuples = EmbeddedTuples(alike, valid.to(self.workers.device))
            losses = self.encoder.loss(tuples, self._loss_options)
        return float(losses.item())

    def _objective(self, epoch: int) -> Objective:
        """Return the batches of an epoch: mined beforehand, of images to mine in, or of labels."""
        options = self.options
        if self.encoder.by_label:
            labelled = image_batches(options, self.images, epoch)

            def label_losses(step: int, part: slice, embedding: Embedding) -> Tensor:
                labels = self._labels[labelled[step][part]]
                labels = labels.to(self.workers.device, non_blocking=True)
                return self.encoder.label_loss(embedding, labels, self._loss_options)

            return Objective([batch[:, None] for batch in labelled], label_losses)
        if options.mining.scope == "batch":
            batches = image_batches(options, self.images, epoch)
            return Objective([batch[:, None] for batch in batches])
        self.encoder.eval()
        with torch.no_grad():
            tuples = mined_tuples(
                options,
                self.images,
                self._vectors,
                self.workers,
                epoch,
            )
        # A last batch of fewer tuples than micro-batches is left out.
        starts = range(0, len(tuples) - self.config.n_micro_batches + 1, options.batch)
        mined = [tuples[start : start + options.batch] for start in starts]

        def tuple_losses(step: int, part: slice, embedding: Embedding) -> Tensor:
            valid = mined[step].valid[part].to(self.workers.device, non_blocking=True)
            return self.encoder.loss(EmbeddedTuples(embedding, valid), self._loss_options)

        return Objective([members_of(batch).numpy() for batch in mined], tuple_losses)

    def _steps(self, epoch: int, objective: Objective) -> Iterator[tuple[Tensor, int]]:
        """Compute the gradients of each batch; yield its loss and its number of tuples or images.

        The losses of the workers are to be averaged. A batch in which no tuple is mined has no
        gradients.
        """
        n_micro_batches = self.config.n_micro_batches
        self._statistics.train()
        parts = [slice(part, None, n_micro_batches) for part in self._own_micro_batches]
        rows = (_by_role(batch[part]) for batch in objective.batches for part in parts)
        pixels = loaded(self.images, self.config.preprocessing, rows, self.workers.device)
        for step, batch in enumerate(objective.batches):
            # Drawn alike on every worker, for all images of the step.
            rng = numpy_generator(self.config.seed, epoch, AUGMENTATION, step)
            transforms = self.options.augmentation.draw(
                batch.size, self.config.preprocessing.size, rng
            )
            places = np.arange(batch.size).reshape(batch.shape)
            total, n = torch.zeros((), device=self.workers.device), len(batch)
            embeddings = []
            for number, part in zip(self._own_micro_batches, parts, strict=True):
                with self._synchronised(number):
                    transformed = transforms[_by_role(places[part])](next(pixels))
                    torch.manual_seed(seed(self.config.seed, epoch, DROPOUT, step, number))
                    self._statistics.start_part()
                    embedding = self._embedding(self.model, transformed)
                    if objective.losses is None:
                        embeddings.append(embedding)
                        continue
                    # Averaged over the workers, these sums become the mean over the batch.
                    share = self.workers.count / n
                    loss = objective.losses(step, part, embedding).sum() * share
                    loss.backward()
                    total += loss.detach()
            self._statistics.finish()
            if objective.losses is None:
                total, n = self._step_within(Embedding.concatenate(embeddings), batch, epoch, step)
            yield total, n

    def _step_within(
        self, own: Embedding, batch: NDArray[np.int64], epoch: int, step: int
    ) -> tuple[Tensor, int]:
        """Mine within a batch (n, 1) of images and compute the gradients; its loss and tuples."""
        device = self.workers.device
        embedding = self._of_all(own, len(batch))
        mined = None
        if self.workers.rank == 0:  # for all: at a tie, different hardware might choose differently
            tuples = mine(
                embedding.vectors.detach(),
                self.images.relevance.subset(batch[:, 0]),
                torch.arange(len(batch)),
                self.options.mining,
                torch_generator(self.config.seed, epoch, MINING, step),
            )
            mined = _by_role(members_of(tuples).cpu().numpy()), tuples.valid.cpu()
        rows, valid = self.workers.broadcast(mined)
        if len(valid) == 0:
            return torch.zeros((), device=device), 0
        members = EmbeddedTuples(embedding[torch.from_numpy(rows).to(device)], valid.to(device))
        # What a loss draws is drawn alike by every worker, whatever it drew before.
        torch.manual_seed(seed(self.config.seed, epoch, LOSS, step))
        loss = self.encoder.loss(members, self._loss_options).mean()
        loss.backward()
        return loss.detach(), len(valid)

    def _vectors(self, pixels: Tensor) -> Tensor:
        """The vectors of images, without gradients, in batches that fit into memory."""
        first = self.config.preprocessing.normalise(pixels[:1])
        budget = memory_budget(self.config.memory_gib, TRAINING_GIB, self.config.use_gpu)
        batch = batch_within(self.encoder, first, IMAGES_AT_ONCE, budget)
        parts = [self._embedding(self.encoder, part).vectors for part in pixels.split(batch)]
        return torch.cat(parts)

    def _embedding(self, model: nn.Module, pixels: Tensor) -> Embedding:
        config = self.config
        images = config.preprocessing.normalise(pixels).to(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, config.precision == "bfloat16"):
            embedding: Embedding = model(images)
        return embedding

    def _of_all(self, own: Embedding, n: int) -> Embedding:
        """The embeddings of a whole batch of n, those of other workers without gradients.

        Gradients of the workers are averaged. A worker's own embeddings are the only ones with
        theirs, so that these count as often as there are workers; parameters of the loss, of which
        every worker has the whole gradient, count once.
        """
        parts = [
            torch.arange(n)[part :: self.config.n_micro_batches] for part in self._own_micro_batches
        ]
        places = torch.cat(parts).to(self.workers.device)
        all_places = self.workers.all_gather(places)

        def joined(values: Tensor) -> Tensor:
            if values.requires_grad:
                values.register_hook(lambda gradient: gradient * self.workers.count)
            rows = self.workers.all_gather(values.detach())
            return (
                torch.empty_like(rows).index_copy(0, all_places, rows).index_copy(0, places, values)
            )

        return own.map(joined)

    def _synchronised(self, part: int) -> contextlib.AbstractContextManager[None]:
        """Average gradients over the workers with the last of this worker's micro-batches only."""
        if isinstance(self.model, DistributedDataParallel) and part != self._own_micro_batches[-1]:
            waiting: contextlib.AbstractContextManager[None] = self.model.no_sync()
            return waiting
        return contextlib.nullcontext()


def _by_role(members: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the members (n, m) of tuples as losses take them: anchors, positives, negatives."""
    return np.concatenate([members[:, :2].T.ravel(), members[:, 2:].ravel()])
