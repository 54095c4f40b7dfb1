"""Losses as pure functions of tensors, and the options of each."""

from rcir.losses.bayesian_triplet import (
    BayesianTripletOptions,
    bayesian_tuple_loss,
    expected_squared_distance,
    kl_to_prior,
    triplet_moments,
    triplet_nll,
)
from rcir.losses.hedged import (
    HedgedOptions,
    match_logits,
    match_nll,
    mismatch_probability,
    mixture_kl_to_normal,
    mixture_samples,
    soft_contrastive_loss,
)
from rcir.losses.mutual_likelihood import (
    fuse_gaussians,
    mutual_likelihood_loss,
    mutual_likelihood_score,
)
from rcir.losses.norm_softmax import NormSoftmaxOptions, norm_softmax_loss
from rcir.losses.triplet import triplet_loss
from rcir.losses.tuples import TripletOptions, mean_of_valid, split_tuples, triplet_tuple_loss

__all__ = [
    "BayesianTripletOptions",
    "HedgedOptions",
    "NormSoftmaxOptions",
    "TripletOptions",
    "bayesian_tuple_loss",
    "expected_squared_distance",
    "fuse_gaussians",
    "kl_to_prior",
    "match_logits",
    "match_nll",
    "mean_of_valid",
    "mismatch_probability",
    "mixture_kl_to_normal",
    "mixture_samples",
    "mutual_likelihood_loss",
    "mutual_likelihood_score",
    "norm_softmax_loss",
    "soft_contrastive_loss",
    "split_tuples",
    "triplet_loss",
    "triplet_moments",
    "triplet_nll",
    "triplet_tuple_loss",
]
