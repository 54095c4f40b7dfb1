"""`python -m tuning --config FILE`: sweep the options of a training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rcir.config import parse, reporting_errors
from tuning.config import TuningConfig
from tuning.sweep import sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, sweep, show the trials."""
    with reporting_errors():
        config = parse(TuningConfig, argv, "python -m tuning", "Sweep the options of a training.")
        trials = sweep(config)
        table = Table("certified size", "recall at 1", *config.space, "folder")
        table.columns[-1].overflow = "fold"
        for trial in trials:
            values = [
                f"{trial.values[name]:.3g}"
                if isinstance(trial.values[name], float)
                else str(trial.values[name])
                for name in config.space
            ]
            table.add_row(
                f"{trial.certified_size:.2f}",
                f"{trial.recall_at_1:.3f}",
                *values,
                trial.folder.name,
            )
        Console(highlight=False).print(table)
        if trials:
            print(f"next: python -m calibration --run {trials[0].folder}")
    return 0 if trials else 1


if __name__ == "__main__":
    sys.exit(main())
