"""Losses as pure functions of tensors, and the options of each."""

from rcir.losses.bayesian_triplet import (
    BayesianTripletOptions,
    bayesian_tuple_loss,
    expected_squared_distance,
    kl_to_prior,
    order_nll,
    triplet_moments,
)
from rcir.losses.tuples import (
    NormSoftmaxOptions,
    PointLossOptions,
    TupleRows,
    bounded_log_variance,
    contrastive_loss,
    heteroscedastic_tuple_loss,
    mean_of_valid,
    norm_softmax_loss,
    point_tuple_loss,
    triplet_loss,
)
from rcir.losses.von_mises_fisher import (
    VonMisesFisherOptions,
    bessel_ratio,
    vmf_expected_squared_distance,
    vmf_tuple_loss,
)

__all__ = [
    "BayesianTripletOptions",
    "NormSoftmaxOptions",
    "PointLossOptions",
    "TupleRows",
    "VonMisesFisherOptions",
    "bayesian_tuple_loss",
    "bessel_ratio",
    "bounded_log_variance",
    "contrastive_loss",
    "expected_squared_distance",
    "heteroscedastic_tuple_loss",
    "kl_to_prior",
    "mean_of_valid",
    "norm_softmax_loss",
    "order_nll",
    "point_tuple_loss",
    "triplet_loss",
    "triplet_moments",
    "vmf_expected_squared_distance",
    "vmf_tuple_loss",
]
