"""Tuning: sweeps of trainings, compared by the set size that they would certify."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.imports import lazily

if TYPE_CHECKING:
    from tuning.config import TuningConfig
    from tuning.records import Records, Trial
    from tuning.run import sweep

_HOMES = {
    "tuning.config": ("TuningConfig",),
    "tuning.records": ("Records", "Trial"),
    "tuning.run": ("sweep",),
}

__all__ = ["Records", "Trial", "TuningConfig", "sweep"]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
