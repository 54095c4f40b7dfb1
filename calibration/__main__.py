"""`rcir calibrate --run RUN`: give an encoder a guarantee."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rcir.errors import reporting_errors
from rcir.imports import naming_extras


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, calibrate, show what was measured."""
    with reporting_errors(), naming_extras():
        from calibration.config import CalibrationConfig
        from rcir.config import parse

        summary = "Give an encoder a guarantee."
        config = parse(CalibrationConfig, argv, "rcir calibrate", summary, reads_folders=True)
        from calibration.pipeline import calibrate
        from calibration.screen import print_outcome

        return print_outcome(calibrate(config))


if __name__ == "__main__":
    sys.exit(main())
