"""Our training loop beside bare PyTorch ones, on the same images, network and device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from common import sized
from numpy.typing import NDArray
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rcir.data import ImageSet
from rcir.embedding import Embedding
from rcir.encoders import EmbeddedTuples, Encoder, build_encoder
from rcir.losses import (
    BayesianTripletOptions,
    TupleRows,
    VonMisesFisherOptions,
    bayesian_tuple_loss,
    vmf_tuple_loss,
)
from rcir.mining import label_batches
from rcir.terminal import Work
from training import TrainingConfig
from training.trainer import Trainer
from training.workers import Workers

Loss = Callable[[Encoder, TrainingConfig, Embedding, Tensor], Tensor]
STEPS = sized(9, 2)  # of a bare loop; the first one warms up
FORWARD = 128  # images
PASSES = sized(20, 2)  # of MC dropout
LOSSES = sized(100, 1)  # of a loss, timed together


def compare_loops(
    config: TrainingConfig, images: ImageSet, device: torch.device, rounds: int
) -> dict[str, float]:
    """Images per second of an epoch of ours and of the bare loops, and ours over theirs.

    The bare loop takes t_step seconds per image for a step without mining, t_forward for a forward
    pass. An epoch of ours that trains on n images and embeds m for the cache may take
    n * t_step + m * t_forward; the ratio is that over what it takes.
    """
    per_tuple = 2 + config.mining.num_negatives
    size = per_tuple * config.batch
    kinds = ("bare", "synthetic", "peer", "forward", "ours", "steps")
    times: dict[str, list[float]] = {name: [] for name in kinds}
    trained = 0.0
    for number in range(rounds + 1):
        measured = {
            "bare": bare_loop(config, images, device, size, by_tuples),
            "synthetic": bare_loop(config, images, device, size, by_tuples, synthetic=True),
            "peer": bare_loop(config, images, device, size, by_peer),
            "forward": forward_only(config, images, device),
        }
        encoder, optimizer = fresh(config, device)
        trainer = Trainer(config, encoder, encoder, optimizer, images, Workers(0, 1, device))
        started = time.perf_counter()
        mined = Mined("epoch")
        trained = per_tuple * trainer.epoch(1, mined)["tuples"]
        ended = time.perf_counter()  # its loss was read: the GPU is done
        measured |= {"ours": ended - started, "steps": ended - mined.time}
        if number:  # the first round warms up
            for name, value in measured.items():
                times[name].append(value)

    def ratio(loop: str) -> float:
        """Round by round, so that a machine that slows down slows both."""
        rows = zip(times[loop], times["forward"], times["ours"], strict=True)
        return statistics.median((trained * t + len(images) * f) / ours for t, f, ours in rows)

    def over_bare(ours: str) -> float:
        rows = zip(times[ours], times["bare"], strict=True)
        return statistics.median(taken / (trained * bare) for taken, bare in rows)

    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "ours_over_bare": ratio("bare"),
        "step_over_bare": over_bare("steps"),
        "epoch_over_bare": over_bare("ours"),
        "ours_over_synthetic": ratio("synthetic"),
        "ours_over_peer": ratio("peer"),
        "bare_images_per_second": 1 / medians["bare"],
        "synthetic_images_per_second": 1 / medians["synthetic"],
        "peer_images_per_second": 1 / medians["peer"],
        "forward_images_per_second": 1 / medians["forward"],
        "ours_images_per_second": (trained + len(images)) / medians["ours"],
    }


class Mined(Work):
    """The time when mining was done."""

    time = 0.0

    def become(self, name: str, total: int | None = None, done: int = 0) -> None:
        self.time = time.perf_counter()


def bare_loop(
    config: TrainingConfig,
    images: ImageSet,
    device: torch.device,
    size: int,
    loss_of: Loss,
    synthetic: bool = False,
) -> float:
    """Seconds per image: pick, normalise, embed, loss, gradients, Adam.

    Args:
        synthetic: one batch is on the device already, and used in every step.
    """
    encoder, optimizer = fresh(config, device)
    labels = images.relevance.labels
    batches = label_batches(labels, size, 4, np.random.default_rng(0))
    encoder.train()
    seconds = []
    given = pixels(config, images, batches[0], device)
    for step in range(STEPS):
        started = time.perf_counter()
        rows = batches[0 if synthetic else step % len(batches)]
        if not synthetic:
            given = pixels(config, images, rows, device)
        embedding = forward(config, encoder, given)
        loss_of(encoder, config, embedding, torch.from_numpy(labels[rows]).to(device)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]) / size


def by_tuples(
    encoder: Encoder, config: TrainingConfig, embedding: Embedding, labels: Tensor
) -> Tensor:
    """Our loss of tuples as they come: nothing is mined."""
    count = config.mining.num_negatives
    valid = torch.ones(len(labels) // (2 + count), count, dtype=torch.bool, device=labels.device)
    return encoder.loss(EmbeddedTuples(embedding, valid), config.loss_options()).mean()


def by_peer(
    encoder: Encoder, config: TrainingConfig, embedding: Embedding, labels: Tensor
) -> Tensor:
    """pytorch-metric-learning: batch-hard mining, triplet margin loss."""
    hard = BatchHardMiner()(embedding.vectors, labels)
    loss: Tensor = TripletMarginLoss(margin=0.1)(embedding.vectors, labels, hard)
    return loss


def forward_only(config: TrainingConfig, images: ImageSet, device: torch.device) -> float:
    """Seconds per image of a forward pass without gradients."""
    encoder = fresh(config, device)[0].eval()
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        with torch.no_grad():
            forward(config, encoder, pixels(config, images, np.arange(FORWARD), device))
        synchronise(device)
        seconds.append((time.perf_counter() - started) / FORWARD)
    return statistics.median(seconds)


def pixels(
    config: TrainingConfig, images: ImageSet, rows: NDArray[np.int64], device: torch.device
) -> Tensor:
    """Some images as the encoder takes them."""
    resized = config.preprocessing.resized(images.pick(rows)).to(device)
    return config.preprocessing.normalise(resized).to(memory_format=torch.channels_last)


def forward(config: TrainingConfig, encoder: Encoder, given: Tensor) -> Embedding:
    """Embed as training does."""
    with torch.autocast(given.device.type, torch.bfloat16, config.precision == "bfloat16"):
        embedding: Embedding = encoder(given)
    return embedding


def fresh(config: TrainingConfig, device: torch.device) -> tuple[Encoder, torch.optim.Optimizer]:
    """An untrained encoder, the same each time, and its optimizer."""
    torch.manual_seed(0)
    preprocessing = config.preprocessing
    encoder = build_encoder(config.encoder, preprocessing.channels, preprocessing.size)
    encoder.to(device, memory_format=torch.channels_last)
    return encoder, torch.optim.Adam(encoder.parameters(), config.optimizer.lr, fused=True)


def dropout(config: TrainingConfig, n: int, device: torch.device) -> float:
    """Time of MC dropout over that of as many plain forward passes as it samples, for n images."""
    sampling = replace(config.encoder, method="mc-dropout", options={"passes": PASSES})
    channels, size = config.preprocessing.channels, config.preprocessing.size
    sampled = build_encoder(sampling, channels, size).to(device).eval()
    plain = build_encoder(replace(sampling, method="deterministic", options={}), channels, size)
    plain.to(device).eval()
    images = torch.rand(n, channels, *size, device=device)

    def seconds(encoder: Encoder, times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            encoder.embed(images)
        synchronise(device)
        return time.perf_counter() - started

    seconds(sampled, 1), seconds(plain, 1)  # the first draws masks, and chooses algorithms
    return statistics.median(seconds(sampled, 1) / seconds(plain, PASSES) for _ in range(3))


def vmf_over_btl(config: TrainingConfig, device: torch.device) -> dict[str, float]:
    """Time and operations of the von Mises-Fisher loss over those of the Bayesian triplet loss.

    Of a batch of tuples, forward and backward, without the network.
    """
    count = config.mining.num_negatives
    valid = torch.ones(config.batch, count, dtype=torch.bool, device=device)
    rows = config.batch * (2 + count)
    vectors = F.normalize(torch.randn(rows, config.encoder.dim, device=device)).requires_grad_()
    variance = torch.full((rows, 1), 1e-3, device=device, requires_grad=True)
    mean = TupleRows.split(vectors, valid)

    def btl() -> None:
        spread = TupleRows.split(variance, valid)
        bayesian_tuple_loss(mean, spread, valid, BayesianTripletOptions()).sum().backward()

    def vmf() -> None:
        spread = TupleRows.split(1 / variance, valid)
        vmf_tuple_loss(mean, spread, valid, VonMisesFisherOptions()).sum().backward()

    def operations(loss: Callable[[], None]) -> int:
        with Operations() as started:
            loss()
        return started.count

    # Of milliseconds on a CPU, what else runs there is left out.
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def seconds(loss: Callable[[], None]) -> float:
        started = clock()
        for _ in range(LOSSES):
            loss()
        synchronise(device)
        return clock() - started

    counted = operations(vmf) / operations(btl)  # also warms up
    timed = statistics.median(seconds(vmf) / seconds(btl) for _ in range(5))
    return {"vmf_loss_over_btl_loss": timed, "vmf_operations_over_btl": counted}


class Operations(TorchDispatchMode):
    """Counts what torch computes inside the block: on a GPU, about one kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def synchronise(device: torch.device) -> None:
    """Wait for the GPU, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()
