"""The cost of a tracking server that accepts connections and never answers, for a training.

`epoch_with_hanging_tracker_over_normal`: seconds from one epoch's end to the next, with what lies
between them, over those of a training that logs to a SQLite file. Trainings of both kinds take
turns, and the figure is the median over the pairs. The first epoch of each does not count. Takes
two minutes.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray.train
from common import DIGITS, parser, report, sized

from rcir import tracking
from rcir.data import DataConfig
from rcir.encoders import EncoderConfig
from rcir.tracking import runs as tracked_runs
from training import TrainingConfig
from training.loop import Job, train_here

CONFIG = TrainingConfig(
    name="tracking",
    epochs=sized(4, 2),
    batch=64,
    threads=1,
    data=DataConfig("digits", options={"train": 1500, "validation": 200} | DIGITS),
    encoder=EncoderConfig("deterministic", dim=32),
)
ROUNDS = sized(11, 1)
# So that a request fails in each training, short as these are.
os.environ |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
tracked_runs.DRAIN_S = 0.0  # what follows the last epoch does not count


class Clock(ray.train.UserCallback):
    """Notes when each epoch, and what follows it, is over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.ends.append(time.monotonic())

    @property
    def seconds(self) -> list[float]:
        """Seconds of every epoch but the first."""
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__).parse_args()
    seconds: dict[str, list[float]] = {"normal": [], "hanging": []}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as silent:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracking.start_run("first", {})  # imports MLflow and makes the store
        for number in range(ROUNDS):
            for name, epochs in seconds.items():
                place = Path(folder) / f"{name}-{number}"
                place.mkdir()
                run = tracking.start_run(place.name, {})
                clock = Clock()
                config = replace(CONFIG, name=place.name, storage=folder)
                uri = run.uri if name == "normal" else address
                train_here(Job(config, str(place), (run.id, uri)), clock)
                epochs.append(statistics.mean(clock.seconds))
    ratios = [hanging / normal for normal, hanging in zip(*seconds.values(), strict=True)]
    figures = {
        "normal_epoch_seconds": statistics.median(seconds["normal"]),
        "epoch_with_hanging_tracker_over_normal": statistics.median(ratios),
    }
    rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in figures.items()]
    report("Tracking", ["what", "value"], rows, figures, options.json)


if __name__ == "__main__":
    main()
