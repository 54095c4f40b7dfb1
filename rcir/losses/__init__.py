"""Losses as pure functions of tensors, and the options of each."""

from rcir.losses.bayesian_triplet import (
    BayesianTripletOptions,
    bayesian_tuple_loss,
    expected_squared_distance,
    kl_to_prior,
    order_nll,
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
from rcir.losses.heteroscedastic import (
    HeteroscedasticOptions,
    bounded_log_variance,
    heteroscedastic_triplet_loss,
    heteroscedastic_tuple_loss,
)
from rcir.losses.mutual_likelihood import (
    fuse_gaussians,
    mutual_likelihood_loss,
    mutual_likelihood_score,
)
from rcir.losses.norm_softmax import NormSoftmaxOptions, norm_softmax_loss
from rcir.losses.pair_hessians import (
    HessianGeometry,
    pair_hessian_blocks,
    pair_hessian_diagonal,
)
from rcir.losses.tuples import (
    PointLossOptions,
    TupleRows,
    contrastive_loss,
    mean_of_valid,
    point_tuple_loss,
    triplet_loss,
)
from rcir.losses.von_mises_fisher import (
    VonMisesFisherOptions,
    bessel_ratio,
    kl_to_uniform,
    log_bessel,
    vmf_expected_squared_distance,
    vmf_triplet_moments,
    vmf_triplet_nll,
    vmf_tuple_loss,
)

__all__ = [
    "BayesianTripletOptions",
    "HedgedOptions",
    "HessianGeometry",
    "HeteroscedasticOptions",
    "NormSoftmaxOptions",
    "PointLossOptions",
    "TupleRows",
    "VonMisesFisherOptions",
    "bayesian_tuple_loss",
    "bessel_ratio",
    "bounded_log_variance",
    "contrastive_loss",
    "expected_squared_distance",
    "fuse_gaussians",
    "heteroscedastic_triplet_loss",
    "heteroscedastic_tuple_loss",
    "kl_to_prior",
    "kl_to_uniform",
    "log_bessel",
    "match_logits",
    "match_nll",
    "mean_of_valid",
    "mismatch_probability",
    "mixture_kl_to_normal",
    "mixture_samples",
    "mutual_likelihood_loss",
    "mutual_likelihood_score",
    "norm_softmax_loss",
    "order_nll",
    "pair_hessian_blocks",
    "pair_hessian_diagonal",
    "point_tuple_loss",
    "soft_contrastive_loss",
    "triplet_loss",
    "triplet_moments",
    "triplet_nll",
    "vmf_expected_squared_distance",
    "vmf_triplet_moments",
    "vmf_triplet_nll",
    "vmf_tuple_loss",
]
