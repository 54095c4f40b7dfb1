"""Calibrate a trained run or vectors, and measure the guarantee on test queries."""

from typing import TYPE_CHECKING

from rcir.import_paths import lazily

if TYPE_CHECKING:
    from calibration.config import CalibrationConfig, EvaluationConfig
    from calibration.evaluation import Evaluation
    from calibration.indexing import IndexChoice, reindex
    from calibration.pipeline import Calibrated, calibrate, evaluate_retriever
    from calibration.publishing import write_results
    from calibration.recalibration import recalibrate
    from calibration.risk_results import RiskResult
    from calibration.summary import cost, promise
    from calibration.table import NOTHING_CERTIFIED, print_evaluation, print_table
    from calibration.vectors import CertificationConfig, certify

_HOMES = {
    "calibration.vectors": ("CertificationConfig", "certify"),
    "calibration.config": ("CalibrationConfig", "EvaluationConfig"),
    "calibration.evaluation": ("Evaluation",),
    "calibration.indexing": ("IndexChoice", "reindex"),
    "calibration.pipeline": ("Calibrated", "calibrate", "evaluate_retriever"),
    "calibration.publishing": ("write_results",),
    "calibration.recalibration": ("recalibrate",),
    "calibration.risk_results": ("RiskResult",),
    "calibration.summary": ("cost", "promise"),
    "calibration.table": ("NOTHING_CERTIFIED", "print_evaluation", "print_table"),
}

__all__ = [
    "NOTHING_CERTIFIED",
    "Calibrated",
    "CalibrationConfig",
    "CertificationConfig",
    "Evaluation",
    "EvaluationConfig",
    "IndexChoice",
    "RiskResult",
    "calibrate",
    "certify",
    "cost",
    "evaluate_retriever",
    "print_evaluation",
    "print_table",
    "promise",
    "recalibrate",
    "reindex",
    "write_results",
]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
