"""Tuning: sweeps of trainings, judged by the set size that they would certify."""

from tuning.config import TuningConfig
from tuning.sweep import Trial, sweep

__all__ = ["Trial", "TuningConfig", "sweep"]
