"""Training: configuration in, tracked run folder with a trained encoder out.

`train` is resolved on first use: a worker and `--help` need none of what runs a training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.config import Change, OptimizerConfig, TrainingConfig

if TYPE_CHECKING:
    from training.run import train

__all__ = ["Change", "OptimizerConfig", "TrainingConfig", "train"]


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module 'training' has no attribute {name!r}")
    from training.run import train

    globals()[name] = train
    return train
