"""`rcir tune --config FILE`: sweep the options of a training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

from rcir.errors import printable, reporting_errors
from rcir.imports import naming_extras
from rcir.options import ALPHAS
from rcir.terminal import console, print_next, working

if TYPE_CHECKING:
    from tuning import Records


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, sweep, show the trials; calibrate the best if asked to."""
    arguments = spell_out(sys.argv[1:] if argv is None else argv)
    with reporting_errors(), naming_extras():
        with working("starting", logged=True):
            from rcir.config import parse
            from tuning import TuningConfig

        config = parse(TuningConfig, arguments, "tune")
        with working("starting", logged=True):
            from rcir.cluster import leave_cluster
            from tuning import sweep

        records = sweep(config)
        leave_cluster()
        print_sweep(records)
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


def print_sweep(records: Records) -> None:
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


def spell_out(argv: Sequence[str]) -> list[str]:
    """`--calibrate` alone means yes."""
    following = [*argv[1:], "--"]
    return [
        "--calibrate=true" if option == "--calibrate" and after.startswith("--") else option
        for option, after in zip(argv, following, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
