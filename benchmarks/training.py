"""What training costs beside the bare minimum: mining, Ray, MLflow, a second worker.

`ours_over_bare`: the same steps in a bare PyTorch loop without mining take t_step seconds per
image, forward passes alone t_forward. An epoch of ours trains on n images and embeds m for the
cache; it may take n * t_step + m * t_forward, and the figure is that over what it takes.
`ours_over_peer` is the same beside pytorch-metric-learning's triplet loss with its batch-hard miner
in the bare loop. `overhead_per_epoch`: what lies between the epochs of a tracked Ray training
(checkpoint, metrics, report to Ray), over 60 s. `weak_scaling_2`: images per second and worker of
two workers with twice the images and the batch, over those of one. Takes about five minutes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as Ray gives each worker one CPU

import numpy as np
import ray
import torch
from common import parser, report
from mlflow import MlflowClient
from numpy.typing import NDArray
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from torch import Tensor

from rcir.data import DataConfig, ImageSet, Preprocessing, load_splits
from rcir.encoders import Encoder, EncoderConfig, build_encoder
from rcir.losses import LossConfig, triplet_loss
from rcir.mining import MiningConfig, label_batches
from training import TrainingConfig, train
from training.progress import EpochBar
from training.trainer import Trainer
from training.workers import Workers

TUPLE = 4  # images: an anchor, a positive, two negatives
CONFIG = TrainingConfig(
    name="benchmark",
    epochs=1,
    batch=16,
    data=DataConfig("digits", options={"train": 512}),
    preprocessing=Preprocessing(size=(64, 64), channels=3),
    encoder=EncoderConfig("deterministic", "resnet50", "gem", dim=128),
    mining=MiningConfig("nearest", "hardest", count=2),
    loss=LossConfig(margin=0.1),
)
SMALL = replace(
    CONFIG,
    epochs=6,
    batch=64,
    data=DataConfig("digits", options={"train": 2000, "validation": 200}),
    preprocessing=Preprocessing(),
    encoder=EncoderConfig("deterministic", dim=32),
)


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=3, help="of the comparison of loops")
    options = command.parse_args()
    figures = compare_loops(options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        figures["overhead_per_epoch"] = between_epochs(folder) / 60
        figures["weak_scaling_2"] = weak_scaling(folder)
        ray.shutdown()
    rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in figures.items()]
    report("Training", ["what", "value"], rows, figures, options.json)


def compare_loops(rounds: int) -> dict[str, float]:
    """Seconds per image of the bare loop, of the peer's, of a forward pass; ours beside them."""
    images = load_splits(CONFIG.data).train
    size = TUPLE * CONFIG.batch
    times: dict[str, list[float]] = {name: [] for name in ("bare", "peer", "forward", "ours")}
    trained = 0.0
    for number in range(rounds + 1):
        measured = {
            "bare": per_image(bare_loop(images, by_tuples), size),
            "peer": per_image(bare_loop(images, by_peer), size),
            "forward": forward_only(images),
        }
        encoder = fresh()
        optimizer = torch.optim.Adam(encoder.parameters(), 1e-4, fused=True)
        workers = Workers(0, 1, torch.device("cpu"))
        trainer = Trainer(CONFIG, encoder, encoder, optimizer, images, workers)
        started = time.perf_counter()
        with EpochBar(1, 1, shown=False) as bar:
            trained = TUPLE * trainer.epoch(1, bar)["tuples"]
        measured["ours"] = time.perf_counter() - started
        if number:  # the first round warms up
            for name, value in measured.items():
                times[name].append(value)
    cached = len(images)

    def ratio(loop: str) -> float:
        """By rounds, so that a machine that slows down slows both."""
        rows = zip(times[loop], times["forward"], times["ours"], strict=True)
        return statistics.median((trained * t + cached * f) / ours for t, f, ours in rows)

    found = {name: statistics.median(values) for name, values in times.items()}
    return {
        "ours_over_bare": ratio("bare"),
        "ours_over_peer": ratio("peer"),
        "bare_images_per_second": 1 / found["bare"],
        "peer_images_per_second": 1 / found["peer"],
        "forward_images_per_second": 1 / found["forward"],
        "ours_images_per_second": (trained + cached) / found["ours"],
    }


Loss = Callable[[Tensor, Tensor], Tensor]


def bare_loop(images: ImageSet, loss_of: Loss, steps: int = 8) -> list[float]:
    """Seconds of each step: pick, normalise, embed, loss, gradients, Adam."""
    encoder = fresh()
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-4, fused=True)
    rng = np.random.default_rng(0)
    batches = list(label_batches(images.relevance.labels, TUPLE * CONFIG.batch, 4, rng))
    encoder.train()
    seconds = []
    for step in range(steps):
        started = time.perf_counter()
        rows = batches[step % len(batches)]
        vectors = encoder(pixels(images, rows)).mean
        loss = loss_of(vectors, torch.from_numpy(images.relevance.labels[rows]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    return seconds


def by_tuples(vectors: Tensor, labels: Tensor) -> Tensor:
    """The triplet loss of whatever tuples: nothing is mined."""
    anchor, positive, *negatives = vectors.view(TUPLE, -1, vectors.shape[1])
    return torch.stack([triplet_loss(anchor, positive, n, 0.1) for n in negatives]).mean()


def by_peer(vectors: Tensor, labels: Tensor) -> Tensor:
    """pytorch-metric-learning: batch-hard mining, triplet margin loss."""
    loss: Tensor = TripletMarginLoss(margin=0.1)(vectors, labels, BatchHardMiner()(vectors, labels))
    return loss


def per_image(seconds: list[float], size: int) -> float:
    return statistics.median(seconds[1:]) / size


def forward_only(images: ImageSet, size: int = 256) -> float:
    """Seconds per image of a forward pass without gradients."""
    encoder = fresh().eval()
    seconds = []
    for start in (0, size) * 2:
        started = time.perf_counter()
        with torch.no_grad():
            encoder(pixels(images, np.arange(start, start + size)))
        seconds.append((time.perf_counter() - started) / size)
    return statistics.median(seconds)


def pixels(images: ImageSet, rows: NDArray[np.int64]) -> Tensor:
    """Images as the encoder takes them."""
    return CONFIG.preprocessing(images.pick(rows)).to(memory_format=torch.channels_last)


def fresh() -> Encoder:
    """An untrained encoder, the same each time."""
    torch.manual_seed(0)
    preprocessing = CONFIG.preprocessing
    encoder = build_encoder(CONFIG.encoder, preprocessing.channels, preprocessing.size)
    return encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def between_epochs(folder: str) -> float:
    """Seconds of a tracked training on a Ray worker that belong to no epoch, per epoch."""
    run = train(replace(SMALL, name="overhead", storage=folder, num_workers=1))
    metrics = MlflowClient(run.tracking_uri).get_metric_history(run.mlflow_run, "seconds")
    ends = [metric.timestamp / 1000 for metric in metrics]
    inside = sum(metric.value for metric in metrics[1:])
    return (ends[-1] - ends[0] - inside) / (len(metrics) - 1)


def weak_scaling(folder: str) -> float:
    """Images per second and worker of two workers over those of one."""

    def seconds(workers: int) -> float:
        config = replace(
            CONFIG,
            name=f"workers-{workers}",
            storage=folder,
            epochs=3,
            batch=workers * CONFIG.batch,
            num_workers=workers,
            data=DataConfig("digits", options={"train": 256 * workers, "validation": 100}),
        )
        run = train(config)
        client = MlflowClient(run.tracking_uri)
        epochs = client.get_metric_history(run.mlflow_run, "seconds")[1:]
        tuples = client.get_metric_history(run.mlflow_run, "tuples")[1:]
        pace = [e.value / t.value for e, t in zip(epochs, tuples, strict=True)]
        return statistics.median(pace) * workers

    return seconds(1) / seconds(2)


if __name__ == "__main__":
    main()
