"""Calibration: a trained run in, a retriever with a guarantee out, measured on held-out queries."""

from calibration.config import CalibrationConfig
from calibration.evaluation import Evaluation, Row
from calibration.pipeline import Calibrated, calibrate, write_results
from calibration.table import print_table

__all__ = [
    "Calibrated",
    "CalibrationConfig",
    "Evaluation",
    "Row",
    "calibrate",
    "print_table",
    "write_results",
]
