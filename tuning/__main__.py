"""`rcir tune --config FILE`: sweep the options of a training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rcir.errors import reporting_errors
from rcir.imports import naming_extras


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, sweep, show the trials; calibrate the best if asked to."""
    arguments = spell_out(sys.argv[1:] if argv is None else argv)
    with reporting_errors(), naming_extras():
        from rcir.config import parse
        from tuning.config import TuningConfig

        config = parse(TuningConfig, arguments, "rcir tune", "Sweep the options of a training.")
        # Slow to import; `--help` and a wrong option need none.
        from tuning.records import BEST_FILE
        from tuning.report import best_run, print_sweep
        from tuning.run import sweep

        records = sweep(config)
        print_sweep(records)
        run = best_run(records)
        print(f"best: {run.path}\nits configuration: {records.folder / BEST_FILE}")
        if not config.calibrate:
            print(f"next: rcir calibrate --run {run.path}")
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
        return print_outcome(outcome)


def spell_out(argv: Sequence[str]) -> list[str]:
    """`--calibrate` alone means yes."""
    following = [*argv[1:], "--"]
    return [
        "--calibrate=true" if option == "--calibrate" and after.startswith("--") else option
        for option, after in zip(argv, following, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
