"""The cost of training beside the bare minimum: mining, Ray, MLflow, a second worker.

`ours_over_bare`: the same steps in a bare PyTorch loop without mining take t_step seconds per
image, forward passes alone t_forward. An epoch of ours trains on n images and embeds m for the
cache; it may take n * t_step + m * t_forward, and the figure is that over what it takes.
`step_over_bare` is the time of our steps, and `epoch_over_bare` that of the epoch with cache and
mining, over n * t_step. `ours_over_synthetic` is like `ours_over_bare`, beside a bare loop on one
batch that is always there, `ours_over_peer` beside pytorch-metric-learning's triplet loss with its
batch-hard miner.
`overhead_per_epoch`: what lies between the epochs of a tracked Ray training (checkpoint, metrics,
report to Ray), over 60 s. `weak_scaling_2`: images per second and worker of two workers with twice
the images and the batch, over those of one. `dropout_1` and `dropout_64`: MC dropout with 20 passes
over 20 forward passes of the same network, for so many images. `vmf_loss_over_btl_loss` and
`vmf_operations_over_btl`: time and torch operations of the von Mises-Fisher loss of a batch, with
its gradients, over those of the Bayesian triplet loss. `epoch_with_hanging_tracker_over_normal`:
seconds from one epoch's end to the next, with what lies between them, of trainings whose tracking
server accepts connections and never answers, over those of trainings that log to a SQLite file.
Both kinds take turns, and the figure is the median over the pairs; the first epoch of each does not
count. Takes about ten minutes.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as Ray gives each worker one CPU

import ray.train
import torch
from common import DIGITS, parser, report, sized
from loops import compare_loops, dropout, vmf_over_btl
from mlflow import MlflowClient

from rcir import tracking
from rcir.cluster import join_cluster
from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import EncoderConfig
from rcir.mining import MiningConfig
from training import TrainingConfig, train
from training.loop import Job, train_here

HERE = Path(__file__).resolve().parent
CONFIG = TrainingConfig(
    name="benchmark",
    epochs=1,
    batch=16,
    data=DataConfig("digits", options={"train": 192}),
    preprocessing=Preprocessing(sized((64, 64), (16, 16)), channels=3),
    encoder=EncoderConfig("deterministic", sized("resnet50", "mnist-cnn"), "gem", dim=128),
    mining=MiningConfig("nearest", "hardest", num_negatives=2),
)
# Epochs longer than the 2 s after which Ray looks for reports: shorter ones would wait for it.
SMALL = replace(
    CONFIG,
    epochs=sized(5, 2),
    batch=64,
    data=DataConfig("digits", options={"train": sized(8000, 800), "validation": 200} | DIGITS),
    preprocessing=Preprocessing(),
    encoder=EncoderConfig("deterministic", dim=32),
)
TRACKED = TrainingConfig(
    name="tracking",
    epochs=sized(4, 2),
    batch=64,
    threads=1,
    data=DataConfig("digits", options={"train": sized(1500, 300), "validation": 200} | DIGITS),
    encoder=EncoderConfig("deterministic", dim=32),
)
PAIRS = sized(11, 1)  # of trainings whose tracking server answers, or does not
# So that a request fails in each training, short as these are.
IMPATIENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument(
        "--rounds", type=int, default=sized(5, 1), help="of the comparison of loops"
    )
    options = command.parse_args()
    images = load_splits(CONFIG.data).train
    figures = compare_loops(CONFIG, images, torch.device("cpu"), options.rounds)
    figures |= {f"dropout_{n}": dropout(CONFIG, n, torch.device("cpu")) for n in (1, 64)}
    figures |= vmf_over_btl(CONFIG, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        figures |= hanging_tracker(folder)
        # Workers look where this process does, and would take this file for the package.
        sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE]
        join_cluster()
        figures["overhead_per_epoch"] = between_epochs(folder) / 60
        if not sized(0, 1):  # tests train with two workers
            figures["weak_scaling_2"] = weak_scaling(folder)
        ray.shutdown()
    rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in figures.items()]
    report("Training", ["what", "value"], rows, figures, options.json)


class Clock(ray.train.UserCallback):
    """Notes when each epoch, and what follows it, is over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.ends.append(time.monotonic())


def hanging_tracker(folder: str) -> dict[str, float]:
    """Seconds of an epoch, and those with a tracking server that never answers over them."""
    seconds: dict[str, list[float]] = {"normal": [], "hanging": []}
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        patch.dict(os.environ, IMPATIENT),
        patch("rcir.tracking.runs.DRAIN_S", 0.0),  # what follows the last epoch does not count
    ):
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracking.start_run("first", {})  # imports MLflow and makes the store
        for number in range(PAIRS):
            for name, epochs in seconds.items():
                place = Path(folder) / f"{name}-{number}"
                place.mkdir()
                run, clock = tracking.start_run(place.name, {}), Clock()
                config = replace(TRACKED, name=place.name, storage=folder)
                uri = run.uri if name == "normal" else address
                train_here(Job(config, place, tracking.TrackedRun(run.id, uri)), clock)
                epochs.append((clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1))
    ratios = [hanging / normal for normal, hanging in zip(*seconds.values(), strict=True)]
    return {
        "normal_epoch_seconds": statistics.median(seconds["normal"]),
        "epoch_with_hanging_tracker_over_normal": statistics.median(ratios),
    }


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
