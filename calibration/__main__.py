"""`rcir calibrate --run RUN`: give an encoder a guarantee."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rcir.errors import reporting_errors
from rcir.imports import naming_extras
from rcir.terminal import working


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, calibrate, show what was measured."""
    with reporting_errors(), naming_extras():
        with working("starting", logged=True):
            from calibration.config import CalibrationConfig
            from rcir.config import parse

        config = parse(CalibrationConfig, argv, "calibrate", reads_folders=True)
        with working("starting", logged=True):
            from calibration.pipeline import calibrate
            from calibration.screen import print_outcome

        outcome = calibrate(config)
        if "ray" in sys.modules:
            from rcir.cluster import leave_cluster

            leave_cluster()
        return print_outcome(outcome)


if __name__ == "__main__":
    sys.exit(main())
