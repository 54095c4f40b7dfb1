"""Calibrate a trained run or vectors, and measure the guarantee on test queries."""

from typing import TYPE_CHECKING

from rcir.imports import lazily

if TYPE_CHECKING:
    from calibration.config import CalibrationConfig, CertificationConfig, EvaluationConfig
    from calibration.evaluation import Evaluation, RiskResult
    from calibration.indexing import Reindexed, reindex
    from calibration.pipeline import Outcome, calibrate, certify, evaluate_retriever, write_results
    from calibration.recalibration import recalibrate
    from calibration.screen import NOTHING_CERTIFIED, print_outcome, print_table
    from calibration.sentences import cost, promise
    from calibration.verification import VerificationConfig, verify

_HOMES = {
    "calibration.config": ("CalibrationConfig", "CertificationConfig", "EvaluationConfig"),
    "calibration.evaluation": ("Evaluation", "RiskResult"),
    "calibration.pipeline": (
        "Outcome",
        "calibrate",
        "certify",
        "evaluate_retriever",
        "write_results",
    ),
    "calibration.indexing": ("Reindexed", "reindex"),
    "calibration.recalibration": ("recalibrate",),
    "calibration.screen": ("NOTHING_CERTIFIED", "print_outcome", "print_table"),
    "calibration.sentences": ("cost", "promise"),
    "calibration.verification": ("VerificationConfig", "verify"),
}

__all__ = [
    "NOTHING_CERTIFIED",
    "CalibrationConfig",
    "CertificationConfig",
    "Evaluation",
    "EvaluationConfig",
    "Outcome",
    "Reindexed",
    "RiskResult",
    "VerificationConfig",
    "calibrate",
    "certify",
    "cost",
    "evaluate_retriever",
    "print_outcome",
    "print_table",
    "promise",
    "recalibrate",
    "reindex",
    "verify",
    "write_results",
]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
