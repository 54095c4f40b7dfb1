"""`rcir train --config FILE`: train an encoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rcir.errors import reporting_errors
from rcir.imports import naming_extras


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, train, and print the next command."""
    with reporting_errors(), naming_extras():
        from rcir.config import parse
        from training.config import TrainingConfig

        config = parse(TrainingConfig, argv, "rcir train", "Train an encoder.")
        # Slow to import; `--help` and a wrong option need none.
        from rcir.terminal import console
        from training.run import train

        run = train(config)
        console.print(f"trained: {run.path}  (MLflow run {run.mlflow_run})", soft_wrap=True)
        console.print(f"next: rcir calibrate --run {run.path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
