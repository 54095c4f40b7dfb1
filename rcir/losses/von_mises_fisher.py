"""Bayesian triplet loss of von Mises-Fisher distributions on the unit sphere.

Warburg, Jorgensen, Civera and Hauberg, "Bayesian Triplet Loss", ICCV 2021, supplement. ``a``, ``p``
and ``n`` are independent with mean directions (..., d) of unit length and concentrations (..., 1);
``tau = |a-p|^2 - |a-n|^2 = 2 a (n - p)``.

The listing of that supplement takes the moments of tau from Gaussians of variance 1 / kappa, which
do not lie on the sphere, and a divergence that is negative for small kappa. Both are exact here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rcir.losses.bayesian_triplet import order_nll
from rcir.losses.bessel import bessel_ratio, growth_and_ratio
from rcir.losses.tuples import mean_of_valid, require_not_negative, split_tuples


@dataclass(frozen=True)
class VonMisesFisherOptions:
    """Options of the von Mises-Fisher triplet loss: `loss` in a training's configuration.

    Args:
        margin: at least 0, in units of squared distance.
        kl_scale: at least 0; weight of the KL divergence from the uniform distribution.
    """

    margin: float = 0.0
    kl_scale: float = 1e-6

    def __post_init__(self) -> None:
        require_not_negative("margin", self.margin)
        require_not_negative("kl_scale", self.kl_scale)


def vmf_triplet_moments(
    means: tuple[Tensor, Tensor, Tensor], concentrations: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of tau, exact.

    From ``E x = A mu`` and ``Cov x = alpha I + beta mu mu^T`` with ``alpha = A / kappa`` and
    ``beta = 1 - A^2 - d alpha`` (Mardia and Jupp, "Directional Statistics", 9.3): tau is bilinear
    in independent vectors.

    Args:
        means: of anchor, positive, negative; (..., d), of unit length, broadcast against each
            other.
        concentrations: likewise (..., 1), above 0.

    Returns:
        E tau and Var tau, each (...), float64.
    """
    a, p, n = (mean.double() for mean in means)
    dim = a.shape[-1]
    (la, lp, ln), (ea, ep, en), (ba, bp, bn) = zip(
        *(_spread(concentration, dim) for concentration in concentrations), strict=True
    )
    ap, an = (a * p).sum(-1), (a * n).sum(-1)
    between = ln[..., None] * n - lp[..., None] * p
    variance = ea * between.square().sum(-1) + ba * (a * between).sum(-1).square()
    for cosine, e, b in ((ap, ep, bp), (an, en, bn)):
        along = b * cosine.square()
        variance = variance + la.square() * (e + along) + e * (dim * ea + ba) + ea * b + ba * along
    return 2 * la * (ln * an - lp * ap), 4 * variance


def _spread(concentration: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, alpha and beta of concentrations (..., 1), each (...)."""
    kappa = concentration.double().squeeze(-1)
    length = bessel_ratio(kappa, dim)
    alpha = length / kappa
    return length, alpha, 1 - length.square() - dim * alpha


def vmf_triplet_nll(
    means: tuple[Tensor, Tensor, Tensor],
    concentrations: tuple[Tensor, Tensor, Tensor],
    margin: float = 0.0,
) -> Tensor:
    """``-log P(tau < -margin)`` of each triplet under the normal approximation (eq. 8).

    Args:
        means, concentrations: as in `vmf_triplet_moments`.
        margin: larger than or equal to 0, in units of squared distance.

    Returns:
        (...) losses, float64.

    Example:
        >>> import torch
        >>> means = tuple(torch.tensor([[1., 0., 0.], [.8, .6, 0.], [0., .6, .8]]))
        >>> concentrations = tuple(torch.tensor([[10.], [20.], [5.]]))
        >>> round(vmf_triplet_nll(means, concentrations).item(), 4)
        0.0727
    """
    return order_nll(*vmf_triplet_moments(means, concentrations), margin)


def kl_to_uniform(concentration: Tensor, dim: int) -> Tensor:
    """KL divergence of a von Mises-Fisher from the uniform distribution on the sphere, in nats.

    ``kappa A(kappa) + v log(kappa / 2) - log I_v(kappa) - log Gamma(d / 2)``, at every direction.

    Args:
        concentration: kappa, (...), at least 0.
        dim: d, at least 2.

    Returns:
        (...) divergences, float64; about kappa^2 / 2d near 0, and (d - 1) / 2 log kappa far away.

    Example:
        >>> import torch
        >>> round(kl_to_uniform(torch.tensor(20.0), 16).item(), 6)
        4.988522
    """
    growth, ratio = growth_and_ratio(concentration, dim)
    return concentration.double() * ratio - growth


def vmf_tuple_loss(
    mean: Tensor, concentration: Tensor, valid: Tensor, options: VonMisesFisherOptions
) -> Tensor:
    """The loss of each tuple, (b,): the mean over its triplets, plus its weighted KL divergences.

    Args:
        mean: (b + b + b * j, d), as `split_tuples` takes it, of unit length.
        concentration: likewise, (..., 1).
        valid: (b, j) bool; negatives that count. Each anchor has at least one.
        options: margin and weight of the divergences.

    Returns:
        (b,) losses of the kind of `mean`.
    """
    means, concentrations = split_tuples(mean, valid), split_tuples(concentration, valid)
    nll = mean_of_valid(vmf_triplet_nll(means, concentrations, options.margin), valid)
    anchor, positive, negative = (
        kl_to_uniform(each.squeeze(-1), mean.shape[-1]) for each in concentrations
    )
    divergence = (anchor + positive).squeeze(1) + mean_of_valid(negative, valid)
    return (nll + options.kl_scale * divergence).to(mean.dtype)


def vmf_expected_squared_distance(
    mean: Tensor, concentration: Tensor, other_mean: Tensor, other_concentration: Tensor
) -> Tensor:
    """``E |x - y|^2 = 2 - 2 A(kappa_x) A(kappa_y) cos`` of two independent von Mises-Fishers.

    Args:
        mean, other_mean: (..., d), of unit length.
        concentration, other_concentration: (..., 1), at least 0.

    Returns:
        (...) squared distances, float64, in [0, 4].

    Example:
        >>> import torch
        >>> east, north = torch.eye(2)
        >>> vmf_expected_squared_distance(east, torch.ones(1), north, torch.ones(1)).item()
        2.0
    """
    dim = mean.shape[-1]
    lengths = bessel_ratio(concentration, dim) * bessel_ratio(other_concentration, dim)
    cosine = (mean.double() * other_mean.double()).sum(-1)
    # Means are of unit length up to rounding: the cosine may be a little above 1.
    return (2 - 2 * lengths.squeeze(-1) * cosine).clamp(min=0)
