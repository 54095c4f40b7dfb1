"""One epoch of training: mine tuples, take a step for each batch, and move batch statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rcir.data import ImageSet
from rcir.data.relevance import find_query_rows
from rcir.embedding import Embedding
from rcir.encoders import EmbeddedTuples, Encoder
from rcir.encoders.features import FrozenBackbone
from rcir.encoders.memory import TRAINING_GIB, batch_within, memory_budget
from rcir.errors import TrainingDiverged
from rcir.mining import Tuples, mine, sample_images
from rcir.terminal import Work
from training.config import TrainingConfig
from training.images import image_batches, load_batches, number_labels
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
from training.workers import CPU, Workers

LOSS_INTERVAL, MAX_LOSSES = 50, 1000  # steps for each loss that is logged, and losses of a run
IMAGE_BATCH_SIZE = 256  # images in a forward pass
ANCHOR_BLOCK = 4096  # for which random numbers are drawn together


def stack_members(tuples: Tuples) -> Tensor:
    """Return the (n, 2 + count) rows of tuples: anchor, positive, negatives."""
    return torch.cat([tuples.anchor[:, None], tuples.positive[:, None], tuples.negatives], 1)


def unstack_members(members: Tensor, valid: Tensor) -> Tuples:
    """Return the tuples whose rows `stack_members` returned."""
    return Tuples(members[:, 0], members[:, 1], members[:, 2:], valid)


# How far an epoch is trained, for a checkpoint within it: the "step" that comes next, the number
# "tuples" of tuples or images so far, the "losses" of each worker by step, and the mined tuples
# "members" and "valid", if they are those of the epoch.
Progress = dict[str, Tensor]


class Objective(NamedTuple):
    """The batches of an epoch, and their losses."""

    # Of each step, (n, m) rows of the training images: n tuples of m images, or n images.
    batches: Sequence[NDArray[np.int64]]
    # Returns the losses of a micro-batch, (b,), for the step, a slice of the batch, and its
    # embedding, ordered as in `EmbeddedTuples`. None if tuples are mined within each batch.
    losses: Callable[[int, slice, Embedding], Tensor] | None = None
    tuples: Tuples | None = None  # of the epoch


@dataclass
class Trainer:
    """The training of one worker: encoder, optimizer, cache and its share of the images.

    A batch is computed in micro-batches. Number p of P contains every P-th tuple (or image) from
    the p-th on, and belongs to worker p mod the number of workers. Its dropout is drawn for it, and
    its batch normalisation uses it alone, so the steps do not depend on the number of workers.

    `options` is the configuration of the epoch being trained, `model` the encoder, wrapped so that
    gradients are averaged over the workers, and `steps` the number of optimizer steps so far.
    """

    config: TrainingConfig
    encoder: Encoder
    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: ImageSet
    workers: Workers
    steps: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self._own_micro_batches = range(
            self.workers.rank, self.config.n_micro_batches, self.workers.count
        )
        self._statistics = GhostBatchStatistics(
            self.encoder, self.workers, self.config.frozen_batch_norm == "statistics"
        )
        self.options = self.config
        if self.encoder.by_label:
            self._labels = number_labels(self.images)

    def epoch(
        self,
        epoch: int,
        work: Work,
        log: Callable[[int, float], None] | None = None,
        save: Callable[[Progress], None] | None = None,
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """Train for an epoch, from 1 on, and return its metrics.

        `work` shows how many steps are done. `log` gets the number of a step and the mean loss of
        the steps since the last call, every `LOSS_INTERVAL` steps, or less often in a long run.
        `save` gets the progress every `checkpoint_steps`, on all workers; given to the next call,
        with the weights and the optimizer of that step, training continues from there.
        """
        self.options = self.config.at(epoch)
        objective = self._objective(epoch, progress)
        every, start = self.config.checkpoint_steps, int(progress["step"]) if progress else 0
        work.become(f"epoch {epoch}/{self.config.epochs}", len(objective.batches))
        all_steps = self.config.epochs * len(objective.batches)
        interval = max(LOSS_INTERVAL, -(-all_steps // MAX_LOSSES))
        work.advance(start, reused=True)
        losses, n_tuples, rate = [], 0, self._rate(epoch, start / max(1, len(objective.batches)))
        if progress:
            n_tuples = int(progress["tuples"])
            by_worker = progress["losses"].to(self.workers.device)
            same = len(by_worker) == self.workers.count
            losses = list(by_worker[self.workers.rank] if same else by_worker.mean(dim=0))
        for step, (loss, mined) in self._steps(epoch, objective, start):
            rate = self._rate(epoch, (step + 1) / len(objective.batches))
            if mined:
                self._update(rate)
                losses.append(loss)
                n_tuples += mined
                self.steps += 1
                if self.steps % interval == 0:
                    recent = self._mean(losses[-interval:], epoch)  # computed by all workers
                    if log is not None:
                        log(self.steps, recent)
            work.advance()
            is_last = step + 1 == len(objective.batches)  # the checkpoint of the epoch follows
            if save is not None and every and (step + 1) % every == 0 and not is_last:
                save(self._progress(step + 1, n_tuples, losses, objective))
        losses = losses or [torch.zeros((), device=self.workers.device)]
        n_images = sum(batch.size for batch in objective.batches[start:])
        return {
            "loss": self._mean(losses, epoch),
            "tuples": float(n_tuples),
            "images": float(n_images),
            "lr": rate,
        }

    def _progress(
        self, step: int, n_tuples: int, losses: list[Tensor], objective: Objective
    ) -> Progress:
        own = torch.stack(losses) if losses else torch.zeros(0, device=self.workers.device)
        values = {"step": torch.tensor(step), "tuples": torch.tensor(n_tuples)}
        values["losses"] = self.workers.all_gather(own[None]).cpu()
        if objective.tuples is not None:
            values |= {"members": stack_members(objective.tuples), "valid": objective.tuples.valid}
        return values

    def _mean(self, losses: list[Tensor], epoch: int) -> float:
        """Return the mean loss of steps, over all workers; wait for the device."""
        mean = self.workers.all_reduce(torch.stack(losses).mean()).item() / self.workers.count
        if not np.isfinite(mean):
            raise TrainingDiverged(
                f"the loss of epoch {epoch} is {mean}: train again under another name with a "
                "lower optimizer.lr; checkpoints of earlier epochs are kept"
            )
        return mean

    def _rate(self, epoch: int, done: float) -> float:
        """Return the learning rate of a step after which a share of the epoch is complete."""
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
        """Return the loss of an encoder that gives all images the same embedding."""
        if self.encoder.by_label:
            return float(np.log(int(self._labels.max()) + 1))
        pixels = next(
            load_batches(self.images, self.config.preprocessing, [np.zeros(1, np.int64)], CPU)
        )
        self.encoder.eval()
        with torch.no_grad():
            embedding = self._embed(self.encoder, pixels.to(self.workers.device))
            valid = torch.ones(1, self.options.mining.num_negatives, dtype=torch.bool)
            same = embedding[torch.zeros(2 + valid.numel(), dtype=torch.int64)]
            tuples = EmbeddedTuples(same, valid.to(self.workers.device))
            losses = self.encoder.loss(tuples, self.options.loss_options())
        return float(losses.item())

    def _objective(self, epoch: int, progress: Progress | None) -> Objective:
        """Return the batches of an epoch: mined tuples, images to mine in, or labelled images."""
        options, loss_options = self.options, self.options.loss_options()
        if self.encoder.by_label:
            labelled = image_batches(options, self.images, epoch)

            def label_losses(step: int, part: slice, embedding: Embedding) -> Tensor:
                labels = self._labels[labelled[step][part]]
                labels = labels.to(self.workers.device, non_blocking=True)
                return self.encoder.label_loss(embedding, labels, loss_options)

            return Objective([batch[:, None] for batch in labelled], label_losses)
        if options.mining.scope == "batch":
            batches = image_batches(options, self.images, epoch)
            return Objective([batch[:, None] for batch in batches])
        if progress:  # mined with the weights at the start of the epoch
            tuples = unstack_members(progress["members"], progress["valid"])
        else:
            tuples = self._mine(epoch)
        # A last batch of fewer tuples than micro-batches is left out.
        starts = range(0, len(tuples) - self.config.n_micro_batches + 1, options.batch)
        mined = [tuples[start : start + options.batch] for start in starts]

        def tuple_losses(step: int, part: slice, embedding: Embedding) -> Tensor:
            valid = mined[step].valid[part].to(self.workers.device, non_blocking=True)
            return self.encoder.loss(EmbeddedTuples(embedding, valid), loss_options)

        return Objective([stack_members(batch).numpy() for batch in mined], tuple_losses, tuples)

    @torch.no_grad()
    def _mine(self, epoch: int) -> Tuples:
        """Return the tuples of an epoch in training order, as rows of the images, on the CPU.

        Workers share blocks of images, then anchors; the tuples do not depend on their number.
        """
        config, workers = self.options, self.workers
        self.encoder.eval()
        chosen = np.arange(len(self.images))
        relevance, sampled = self.images.relevance, config.mining.cache == "sampled"
        if sampled:
            rng = numpy_generator(config.seed, epoch, SAMPLE)
            chosen = sample_images(relevance, config.mining.sample, rng)
            relevance = relevance.subset(chosen)
        starts = range(0, len(chosen), IMAGE_BATCH_SIZE)
        shard = workers.shard(len(starts))
        blocks = [chosen[starts[i] : starts[i] + IMAGE_BATCH_SIZE] for i in shard]
        n_embedded = sum(map(len, blocks))
        blocks = blocks or [chosen[:1]]  # an empty batch would have no shape
        pixels = load_batches(self.images, config.preprocessing, blocks, workers.device)
        vectors = torch.cat([self._vectors(batch) for batch in pixels])[:n_embedded]
        cache = workers.all_gather(vectors, shared=True)

        queries = torch.from_numpy(find_query_rows(relevance))
        n_anchors = config.mining.refresh * config.batch if sampled else len(queries)
        order = torch_generator(config.seed, epoch, ORDER)
        rounds = [
            queries[torch.randperm(len(queries), generator=order, device="cpu")]
            for _ in range(-(-n_anchors // len(queries)))
        ]
        anchors = torch.cat(rounds)[:n_anchors]
        shard, parts = workers.shard(n_anchors), []
        for number, start in enumerate(range(0, n_anchors, ANCHOR_BLOCK)):
            first, stop = max(shard.start, start), min(shard.stop, start + ANCHOR_BLOCK)
            if first < stop:
                generator = torch_generator(config.seed, epoch, MINING, number)
                block = anchors[start : start + ANCHOR_BLOCK]
                part = slice(first - start, stop - start)
                parts.append(mine(cache, relevance, block, config.mining, generator, part))
        parts = parts or [mine(cache, relevance, anchors[:0], config.mining, order)]
        columns = [torch.cat([stack_members(part), part.valid], 1) for part in parts]
        table = workers.all_gather(torch.cat(columns)).cpu()
        count = parts[0].negatives.shape[1]
        members = torch.from_numpy(chosen)[table[:, : 2 + count]]
        return unstack_members(members, table[:, 2 + count :].bool())

    def _steps(
        self, epoch: int, objective: Objective, start: int
    ) -> Iterator[tuple[int, tuple[Tensor, int]]]:
        """Compute the gradients of each batch from a step on, from 0.

        Yield the step, and the loss and the number of tuples or images of its batch.

        The losses have to be averaged over the workers. A batch without a tuple has no gradients.
        """
        n_micro_batches = self.config.n_micro_batches
        self._statistics.train()
        parts = [slice(part, None, n_micro_batches) for part in self._own_micro_batches]
        batches = list(enumerate(objective.batches))[start:]
        rows = (_group_by_role(batch[part]) for _, batch in batches for part in parts)
        pixels = load_batches(self.images, self.config.preprocessing, rows, self.workers.device)
        for step, batch in batches:
            # Every worker draws the transforms of all images of the step.
            rng = numpy_generator(self.config.seed, epoch, AUGMENTATION, step)
            transforms = self.options.augmentation.draw(
                batch.size, self.config.preprocessing.size, rng
            )
            places = np.arange(batch.size).reshape(batch.shape)
            total, n = torch.zeros((), device=self.workers.device), len(batch)
            embeddings = []
            for number, part in zip(self._own_micro_batches, parts, strict=True):
                with self._averaging_gradients(number):
                    transformed = transforms[_group_by_role(places[part])](next(pixels))
                    torch.manual_seed(seed(self.config.seed, epoch, DROPOUT, step, number))
                    self._statistics.start_part()
                    embedding = self._embed(self.model, transformed)
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
            yield step, (total, n)

    def _step_within(
        self, part: Embedding, batch: NDArray[np.int64], epoch: int, step: int
    ) -> tuple[Tensor, int]:
        """Mine within a batch (n, 1) of images; return the loss and the number of tuples."""
        device = self.workers.device
        embedding = self._gather(part, len(batch))
        mined = None
        if self.workers.rank == 0:  # for all: at a tie, other hardware might choose differently
            tuples = mine(
                embedding.vectors.detach(),
                self.images.relevance.subset(batch[:, 0]),
                torch.arange(len(batch)),
                self.options.mining,
                torch_generator(self.config.seed, epoch, MINING, step),
            )
            mined = _group_by_role(stack_members(tuples).cpu().numpy()), tuples.valid.cpu()
        rows, valid = self.workers.broadcast(mined)
        if len(valid) == 0:
            return torch.zeros((), device=device), 0
        members = EmbeddedTuples(embedding[torch.from_numpy(rows).to(device)], valid.to(device))
        # The loss draws the same numbers on every worker.
        torch.manual_seed(seed(self.config.seed, epoch, LOSS, step))
        loss = self.encoder.loss(members, self.options.loss_options()).mean()
        loss.backward()
        return loss.detach(), len(valid)

    def _vectors(self, pixels: Tensor) -> Tensor:
        """Embed images in batches that fit into memory."""
        first = self.config.preprocessing.normalise(pixels[:1])
        budget = memory_budget(self.config.memory_gib, TRAINING_GIB, self.config.use_gpu)
        batch = batch_within(self.encoder, first, IMAGE_BATCH_SIZE, budget)
        parts = [self._embed(self.encoder, part).vectors for part in pixels.split(batch)]
        return torch.cat(parts)

    def _embed(self, model: nn.Module, pixels: Tensor) -> Embedding:
        config = self.config
        images = config.preprocessing.normalise(pixels).to(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, config.precision == "bfloat16"):
            embedding: Embedding = model(images)
        return embedding

    def _gather(self, part: Embedding, n: int) -> Embedding:
        """Return the embeddings of a whole batch of n, those of other workers without gradients.

        Gradients are averaged over the workers. Each has those of its own embeddings only,
        which are multiplied by their number; those of the loss's parameters are not.
        """
        parts = [
            torch.arange(n)[number :: self.config.n_micro_batches]
            for number in self._own_micro_batches
        ]
        places = torch.cat(parts).to(self.workers.device)
        all_places = self.workers.all_gather(places)

        def gather(values: Tensor) -> Tensor:
            if values.requires_grad:
                values.register_hook(lambda gradient: gradient * self.workers.count)
            rows = self.workers.all_gather(values.detach())
            return (
                torch.empty_like(rows).index_copy(0, all_places, rows).index_copy(0, places, values)
            )

        return part.map(gather)

    def _averaging_gradients(self, part: int) -> contextlib.AbstractContextManager[None]:
        """Average gradients over the workers with the last of this worker's micro-batches only."""
        if isinstance(self.model, DistributedDataParallel) and part != self._own_micro_batches[-1]:
            waiting: contextlib.AbstractContextManager[None] = self.model.no_sync()
            return waiting
        return contextlib.nullcontext()


def _group_by_role(members: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the members (n, m) of tuples in the order of losses: anchors, positives, negatives."""
    return np.concatenate([members[:, :2].T.ravel(), members[:, 2:].ravel()])


class GhostBatchStatistics:
    """Moves running statistics once a step, towards the mean over its micro-batches.

    Torch would move them with every micro-batch that a worker computes, without the other workers.
    Here each micro-batch writes its statistics to tensors of its own; `finish` averages them over
    all workers. A frozen backbone keeps its statistics. With `keep`, all layers do, as is best with
    pretrained weights (Roth et al., ICML 2020).
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
        """Set the encoder to training mode, except layers that keep their statistics."""
        self._encoder.train()
        for layer in self._kept:
            layer.eval()

    def start_part(self) -> None:
        """Call this before the forward pass of a micro-batch."""
        for layer in self._layers:
            layer.momentum = 1.0  # the statistics of this part alone
            layer.running_mean = torch.zeros_like(layer.running_mean)  # type: ignore[arg-type]
            layer.running_var = torch.zeros_like(layer.running_var)  # type: ignore[arg-type]
        self._parts.append(self._current())

    @torch.no_grad()
    def finish(self) -> None:
        """Call this after the forward passes of all micro-batches, on every worker."""
        if self._layers:
            sums = torch.stack([torch.cat(part) for part in self._parts]).sum(0)
            total = self._workers.all_reduce(
                torch.cat([sums, sums.new_full((1,), len(self._parts))])
            )
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
        """Return means and variances, two for each layer."""
        statistics = [(layer.running_mean, layer.running_var) for layer in self._layers]
        return [values for pair in statistics for values in pair if values is not None]


def freeze_affine(encoder: nn.Module) -> None:
    """Exclude scale and shift of all layers of batch normalisation from training."""
    for layer in encoder.modules():
        if isinstance(layer, _BatchNorm):
            for weights in layer.parameters(recurse=False):
                weights.requires_grad_(False)
