"""Bayesian triplet loss: the likelihood that a triplet of Gaussians is in order.

Warburg, Jorgensen, Civera and Hauberg, "Bayesian Triplet Loss", ICCV 2021, with its supplement.
``a``, ``p`` and ``n`` are independent Gaussians with means (..., d) and variances (..., 1) for an
isotropic or (..., d) for a diagonal covariance; ``tau = |a-p|^2 - |a-n|^2``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.special import erfcx, log_ndtr

from rcir.losses.tuples import TupleRows, mean_of_valid
from rcir.options import require_at_least


@dataclass(frozen=True)
class BayesianTripletOptions:
    """Options of the Bayesian triplet loss: `loss` in a training's configuration.

    Args:
        margin: at least 0, in units of squared distance; 0 as Cai et al. (AAAI 2025) train it.
        kl_scale: at least 0; weight of the KL divergence from the prior.
        epsilon: at least 0; added to the likelihood of a triplet. With the paper's 1e-8 the loss
            of a triplet is at most 18.4, and those that are wrong by six standard deviations or
            more hardly train.
    """

    margin: float = 0.0
    kl_scale: float = 1e-6
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(self, "loss.", margin=0, kl_scale=0, epsilon=0)


def _sum(values: Tensor, dim: int) -> Tensor:
    """Sum values, (..., 1) or (..., d), over d dimensions."""
    return values.sum(-1) * (dim if values.shape[-1] == 1 else 1)


def triplet_moments(
    means: tuple[Tensor, Tensor, Tensor], variances: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of tau.

    Equations 17 to 26 of the supplement, rearranged so that no term of the variance is negative:
    the printed form loses all digits in float32 below a variance of 1e-7. (Eq. 12 of the main text
    has a wrong sign.)

    Args:
        means: of anchor, positive, negative; (..., d), broadcast against each other.
        variances: likewise (..., 1) or (..., d), all three of one kind.

    Returns:
        E tau and Var tau, each (...).
    """
    (a, p, n), (va, vp, vn) = means, variances
    dim = a.shape[-1]
    ap, an, pn = (a - p).square(), (a - n).square(), (p - n).square()
    mean = (ap - an).sum(-1) + _sum(vp - vn, dim)
    variance = _sum(2 * (vp.square() + vn.square()) + 4 * va * (vp + vn), dim)
    variance = variance + 4 * (vp * ap + vn * an + va * pn).sum(-1)
    return mean, variance


def order_nll(mean: Tensor, variance: Tensor, margin: float = 0.0, epsilon: float = 0.0) -> Tensor:
    """Return ``-log(P(tau < -margin) + epsilon)``, with tau normal (eq. 8).

    Args:
        mean, variance: of tau, (...), see `triplet_moments`; smaller variances than about 1e-18 in
            float32 (1e-153 in float64) count as that.
        margin: at least 0, in units of squared distance.
        epsilon: at least 0; above 0, losses are at most ``-log(epsilon)``, and have no gradient
            where a triplet is wrong by six standard deviations or more.

    Returns:
        (...) losses with finite gradients.

    Example:
        >>> import torch
        >>> order_nll(torch.tensor(3.0), torch.tensor(1.0))  # -log Phi(-3)
        tensor(6.6077)
    """
    # The gradient divides by the square of the variance.
    least = 10 * torch.finfo(variance.dtype).tiny ** 0.5
    log_probability = _log_ndtr((-margin - mean) / variance.clamp(min=least).sqrt())
    if epsilon > 0:
        bound = log_probability.new_full((), math.log(epsilon))
        log_probability = torch.logaddexp(log_probability, bound)
    return -log_probability


def _log_ndtr(z: Tensor) -> Tensor:
    """Return log Phi(z); the gradient of torch's own overflows from z = -1,000 on in float32."""
    below, middle = z < -1, z.new_full((), -1.0)
    # Not by clamp, which halves or drops the gradient on its bound.
    low, high = torch.where(below, z, middle), torch.where(below, middle, z)
    tail = (erfcx(-low / math.sqrt(2)) / 2).log() - low.square() / 2
    return torch.where(below, tail, log_ndtr(high))


def bayesian_tuple_loss(
    mean: TupleRows, variance: TupleRows, valid: Tensor, options: BayesianTripletOptions
) -> Tensor:
    """Return the loss of each tuple, (b,): the mean over its triplets, plus weighted divergences.

    Variances are (..., 1) or (..., d); for `valid` see `point_tuple_loss`.
    """
    losses = order_nll(*triplet_moments(mean, variance), options.margin, options.epsilon)
    nll = mean_of_valid(losses, valid)
    anchor, positive, negatives = map(kl_to_prior, mean, variance)
    divergence = (anchor + positive).squeeze(1) + mean_of_valid(negatives, valid)
    return nll + options.kl_scale * divergence


def kl_to_prior(mean: Tensor, variance: Tensor, prior_variance: float | None = None) -> Tensor:
    """Return the KL divergence (...) of N(mean, variance) from N(0, prior_variance I), in nats.

    Args:
        mean: (..., d).
        variance: (..., 1) or (..., d), above 0.
        prior_variance: by default 1 / d, which concentrates near unit length.
    """
    dim = mean.shape[-1]
    prior = 1 / dim if prior_variance is None else prior_variance
    spread = _sum(variance / prior - 1 - (variance / prior).log(), dim)
    return 0.5 * (spread + mean.square().sum(-1) / prior)


def expected_squared_distance(
    mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor
) -> Tensor:
    """Return ``E |x - y|^2`` of two independent Gaussians: squared distance plus both traces.

    Args:
        mean, other_mean: (..., d).
        variance, other_variance: (..., 1) or (..., d).

    Returns:
        (...) squared distances. Isotropic variances count d times, unlike in the code of Cai et al.
        (AAAI 2025).
    """
    dim = mean.shape[-1]
    squared = (mean - other_mean).square().sum(-1)
    return squared + _sum(variance, dim) + _sum(other_variance, dim)
