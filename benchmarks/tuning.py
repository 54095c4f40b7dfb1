"""Gain of a sweep, and its cost beyond its trainings.

Sweeps `--config`, calibrates the best trial and the configuration that was varied, and compares
their certified sets on test queries that neither sweep nor calibration saw (alpha and delta of the
sweep). Then sweeps ten trials of about a minute, for what Ray Tune and MLflow add to trainings.
About a quarter of an hour on two cores. A sweep that `--storage` holds is not trained again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import DIGITS, parser, report, sized

from calibration import CalibrationConfig, calibrate
from rcir.config import parse
from rcir.risk.bootstrap import Estimate, compare_sizes
from rcir.runs.results import TEST, RunResults
from training import train
from tuning import Records, TuningConfig, sweep

MINUTE = sized({"training.epochs": 10, "trials": 10}, {"training.epochs": 1, "trials": 2})
CONFIG = Path(__file__).parents[1] / "configs" / "tune-digits-btl.yaml"
SHORTER = sized(
    (),
    (
        *("--trials", "2", "--training.epochs", "2", "--interval", "1"),
        *("--training.data.options", json.dumps(DIGITS | {"validation": 400})),
    ),
)


def main() -> None:
    """Sweep, compare, measure the overhead."""
    command = parser(__doc__)
    command.add_argument("--config", default=str(CONFIG), help="of the sweep")
    command.add_argument(
        "--storage", default=sized("runs", "runs/short"), help="folder of the runs"
    )
    command.add_argument("--gain-only", action="store_true", help="leave the overhead out")
    options = command.parse_args()
    given = ["--config", options.config, "--training.storage", options.storage, *SHORTER]
    config = parse(TuningConfig, given, "tuning")
    there = Path(config.training.storage, config.training.name).exists()
    started = time.monotonic()
    swept(given)
    seconds = time.monotonic() - started
    records = sweep(config)  # it is finished: no more than read
    best, default, difference = gain(config, records)
    rows = [
        ("best of the sweep, mean certified size of test queries", spelled(best)),
        ("configuration that was varied", spelled(default)),
        ("difference", spelled(difference) + (", beyond noise" if difference.beyond_noise else "")),
    ]
    figures = {"best_over_default_size": best.value / default.value}
    if not there:  # otherwise it took longer than just now
        figures["sweep_seconds"] = seconds
    if not options.gain_only:
        figures |= overhead(given)
    title = f"{Path(options.config).name}, alpha {config.alpha:g}, delta {config.delta:g}"
    report(title, ("what", "value"), rows, figures, options.json)


def gain(config: TuningConfig, records: Records) -> tuple[Estimate, Estimate, Estimate]:
    """Certified sizes of the best trial, of the default, and their difference, on test queries."""
    name = f"{config.training.name}-default"
    default = train(replace(config.training, name=name, threads=1))
    runs = (default, records.best_run())
    for run in runs:
        calibrate(CalibrationConfig(str(run.path), alphas=(config.alpha,), delta=config.delta))
    results = [RunResults.read(run.path / TEST) for run in runs]
    sizes, differences = compare_sizes([each.parts for each in results], config.alpha, config.delta)
    return sizes[1], sizes[0], differences[0]


def swept(options: list[str]) -> None:
    """Sweep as a user does; Ray's processes would take this file for the package of its name."""
    subprocess.run([sys.executable, "-m", "tuning", *options], check=True)


def overhead(given: list[str]) -> dict[str, float]:
    """The seconds of trials of about a minute beyond those of their epochs.

    `trial_overhead` is that of the trials, with the processes they are given and the gaps between
    them; `sweep_overhead` also has the start of Ray and what is made of the sweep at its end.
    """
    varied = json.dumps({"loss.kl_scale": {"loguniform": [1e-7, 1e-3]}})
    with tempfile.TemporaryDirectory() as folder:
        changes = {"training.name": "minute", "training.storage": folder, "scheduler": "none"}
        changes |= {name: str(value) for name, value in MINUTE.items()} | {"space": varied}
        started = time.monotonic()
        swept([*given, *(f"--{name}={value}" for name, value in changes.items())])
        wall = time.monotonic() - started
        runs = list(Path(folder, "minute").glob("trial-*"))
        trained = [epoch_seconds(run) for run in runs]
        # From when Ray Tune is asked for the first trial until the last is written.
        begun = Path(folder, "minute", "lock").stat().st_mtime
        trials = max((run / "run.json").stat().st_mtime for run in runs) - begun
    slots = min(len(trained), len(os.sched_getaffinity(0)))  # as Ray counts, a CPU for each
    print(f"{len(trained)} trials of {np.mean(trained):.0f} s, {slots} at a time: {wall:.0f} s")
    return {
        "trial_seconds": float(np.mean(trained)),
        "trial_overhead": float(trials * slots / np.sum(trained) - 1),
        "sweep_overhead": float(wall * slots / np.sum(trained) - 1),
    }


def epoch_seconds(run: Path) -> float:
    """The seconds of all epochs of a training."""
    epochs = json.loads((run / "metrics.json").read_text())
    return float(sum(metrics["seconds"] for metrics in epochs.values()))


def spelled(estimate: Estimate) -> str:
    """A value and its 95% interval, if there is one."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f} (no interval)"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


if __name__ == "__main__":
    main()
