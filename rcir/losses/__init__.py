"""Losses as pure functions of tensors."""

from rcir.losses.bayesian_triplet import (
    expected_squared_distance,
    kl_to_prior,
    triplet_moments,
    triplet_nll,
)
from rcir.losses.triplet import triplet_loss
from rcir.losses.tuples import LossConfig, tuple_losses

__all__ = [
    "LossConfig",
    "expected_squared_distance",
    "kl_to_prior",
    "triplet_loss",
    "triplet_moments",
    "triplet_nll",
    "tuple_losses",
]
