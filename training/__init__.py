"""Training: configuration in, tracked run folder with a trained encoder out."""

from training.config import OptimizerConfig, TrainingConfig
from training.run import train

__all__ = ["OptimizerConfig", "TrainingConfig", "train"]
