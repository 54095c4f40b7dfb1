"""`rcir train`, `rcir tune` and `rcir calibrate`: jobs, whose options are a configuration."""

from __future__ import annotations

import sys
from shlex import quote
from typing import TYPE_CHECKING

from rcir.errors import printable
from rcir.options import ALPHAS
from rcir.storage import as_text
from rcir.terminal import console, print_next

if TYPE_CHECKING:
    from calibration import CalibrationConfig
    from training import TrainingConfig
    from tuning import Records, TuningConfig


def run_train(config: TrainingConfig) -> int:
    """Train, and print the next command."""
    from rcir.cluster import leave_cluster
    from training import train

    run = train(config)
    leave_cluster()
    place = as_text(run.place)
    console.print(f"trained: {place}  (MLflow run {run.mlflow_run})", soft_wrap=True)
    print_next(f"calibrate --run {quote(place)}")
    return 0


def run_calibrate(config: CalibrationConfig) -> int:
    """Calibrate, and show what was measured."""
    from calibration import calibrate, print_outcome

    outcome = calibrate(config)
    if "ray" in sys.modules:
        from rcir.cluster import leave_cluster

        leave_cluster()
    return print_outcome(outcome)


def run_tune(config: TuningConfig) -> int:
    """Sweep, and show the trials; calibrate the best if the configuration says so."""
    from rcir.cluster import leave_cluster
    from tuning import sweep

    records = sweep(config)
    leave_cluster()
    _print_sweep(records)
    run = records.best_run()
    print(f"best: {run.path}\nits configuration: {records.best_file}")
    if not config.calibrate:
        print_next(f"calibrate --run {quote(str(run.path))}")
        return 0
    from calibration import CalibrationConfig, calibrate, print_outcome

    levels = tuple(sorted({*CalibrationConfig.alphas, config.alpha}))
    outcome = calibrate(
        CalibrationConfig(
            str(run.path),
            alphas=levels,
            delta=config.delta,
            max_rejects=config.training.max_rejects,
        )
    )
    status, best = print_outcome(outcome), records.ranked()[0]
    rows = outcome.evaluation.rows
    size = next(row.mean_size for row in rows if row.alpha == config.alpha)
    if size is not None:
        records.tracked.log_metrics({"sweep/test_size": size})
    console.print(
        f"{best.name}, mean set size at alpha = {config.alpha:g}: {best.certified_size:.2f} on "
        "the validation queries that selected it, "
        f"{'not certified' if size is None else f'{size:.2f}'} on test queries",
        soft_wrap=True,
    )
    return status


def _print_sweep(records: Records) -> None:
    """Print the trials, best first, as `rcir compare` does, and their failures."""
    from rcir.runs.compare import compare_runs
    from rcir.runs.show import print_comparison

    alpha, delta = records.config["alpha"], records.config["delta"]
    if any(trial.state == "finished" for trial in records.trials.values()):
        levels = sorted({alpha, *ALPHAS})
        print_comparison(compare_runs([str(records.folder)], levels, delta))
    for trial in records.ranked():
        if trial.confirmed:
            deviation = trial.metrics.get("certified_size_deviation", float("nan"))
            console.print(
                f"{trial.name}: certified size {trial.certified_size:.2f}, the mean of "
                f"{len(records.names(trial))} seeds, with standard deviation {deviation:.2f}",
                soft_wrap=True,
            )
        if trial.reason:
            again = "" if trial.final else " (the same command tries it again)"
            console.print(f"{trial.name} failed: {printable(trial.reason)}{again}", soft_wrap=True)
