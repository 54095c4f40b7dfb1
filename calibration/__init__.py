"""Calibration: a trained run in, a retriever with a guarantee out, measured on held-out queries."""

from calibration.config import CalibrationConfig, EvaluationConfig
from calibration.evaluation import Evaluation
from calibration.pipeline import Calibrated, calibrate, evaluate_retriever
from calibration.publishing import write_results
from calibration.risk_results import RiskResult
from calibration.table import NOTHING_CERTIFIED, print_table

__all__ = [
    "NOTHING_CERTIFIED",
    "Calibrated",
    "CalibrationConfig",
    "Evaluation",
    "EvaluationConfig",
    "RiskResult",
    "calibrate",
    "evaluate_retriever",
    "print_table",
    "write_results",
]
