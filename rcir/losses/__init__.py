"""Losses as pure functions of tensors, and the options of each."""

from rcir.losses.bayesian_triplet import (
    BayesianTripletOptions,
    bayesian_tuple_loss,
    expected_squared_distance,
    kl_to_prior,
    triplet_moments,
    triplet_nll,
)
from rcir.losses.contrastive import contrastive_loss
from rcir.losses.norm_softmax import NormSoftmaxOptions, norm_softmax_loss
from rcir.losses.pair_hessians import (
    HessianGeometry,
    pair_hessian_blocks,
    pair_hessian_diagonal,
)
from rcir.losses.triplet import triplet_loss
from rcir.losses.tuples import PointLossOptions, mean_of_valid, point_tuple_loss, split_tuples

__all__ = [
    "BayesianTripletOptions",
    "HessianGeometry",
    "NormSoftmaxOptions",
    "PointLossOptions",
    "bayesian_tuple_loss",
    "contrastive_loss",
    "expected_squared_distance",
    "kl_to_prior",
    "mean_of_valid",
    "norm_softmax_loss",
    "pair_hessian_blocks",
    "pair_hessian_diagonal",
    "point_tuple_loss",
    "split_tuples",
    "triplet_loss",
    "triplet_moments",
    "triplet_nll",
]
