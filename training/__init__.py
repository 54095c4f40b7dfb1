"""Training: configuration in, tracked run folder with a trained encoder out.

What runs a training is resolved on first use: a worker and `--help` need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.imports import lazily

if TYPE_CHECKING:
    from training.config import Change, OptimizerConfig, TrainingConfig
    from training.run import train

_HOMES = {
    "training.config": ("Change", "OptimizerConfig", "TrainingConfig"),
    "training.run": ("train",),
}

__all__ = ["Change", "OptimizerConfig", "TrainingConfig", "train"]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
