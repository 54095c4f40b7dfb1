"""`rcir train --config FILE`: train an encoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from shlex import quote

from rcir.errors import reporting_errors
from rcir.imports import naming_extras
from rcir.storage import as_text
from rcir.terminal import console, print_next, working


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, train, and print the next command."""
    with reporting_errors(), naming_extras():
        with working("starting", logged=True):
            from rcir.config import parse
            from training.config import TrainingConfig

        config = parse(TrainingConfig, argv, "train")
        with working("starting", logged=True):  # `--help` and a wrong option need none of these
            from rcir.cluster import leave_cluster
            from training.run import train

        run = train(config)
        leave_cluster()
        place = as_text(run.place)
        console.print(f"trained: {place}  (MLflow run {run.mlflow_run})", soft_wrap=True)
        print_next(f"calibrate --run {quote(place)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
