"""`python -m training --config FILE`: train an encoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rcir.config import parse
from rcir.errors import reporting_errors
from training.config import TrainingConfig
from training.progress import console


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, train, say what comes next."""
    with reporting_errors():
        config = parse(TrainingConfig, argv, "python -m training", "Train an encoder.")
        from training.run import train  # slow to import; `--help` and a wrong option need none

        run = train(config)
        console.print(f"trained: {run.path}  (MLflow run {run.mlflow_run})", soft_wrap=True)
        console.print(f"next: python -m calibration --run {run.path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
