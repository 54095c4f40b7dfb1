"""Tuning: sweeps of trainings, compared by the set size that they would certify."""

from tuning.config import TuningConfig
from tuning.records import Records, Trial
from tuning.sweep import sweep

__all__ = ["Records", "Trial", "TuningConfig", "sweep"]
