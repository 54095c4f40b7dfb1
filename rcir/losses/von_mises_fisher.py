"""Triplet loss of von Mises-Fisher distributions, and the Bessel functions that it needs.

In d dimensions the order is ``v = d / 2 - 1``. At ``v + 32`` the uniform asymptotic expansion of
large order (Abramowitz and Stegun, 9.7.7) is exact to double precision at every concentration. The
recurrence (9.6.26), stable downwards, leads from there to v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rcir.losses.bayesian_triplet import order_nll
from rcir.losses.tuples import TupleRows, mean_of_valid
from rcir.options import require_at_least

RECURRENCES = 32  # orders between that of the expansion and v
SERIES_LIMIT = 0.03  # times the root of d: a series is used below, where other terms would cancel
SLOPE_TERMS = 6  # of the asymptotic series of the variance along the mean
# Numerators and denominator of u_1 to u_4. Powers of p ascend by two from p^i.
EXPANSION = (
    ((3, -5), 24),
    ((81, -462, 385), 1152),
    ((30375, -369603, 765765, -425425), 414720),
    ((4465125, -94121676, 349922430, -446185740, 185910725), 39813120),
)


def bessel_ratio(concentration: Tensor, dim: int) -> Tensor:
    """Return the mean resultant length ``A_d(kappa) = I_{v+1}(kappa) / I_v(kappa)``.

    Args:
        concentration: kappa, (...), at least 0.
        dim: at least 2.

    Returns:
        (...) float64 in [0, 1).

    Example:
        >>> import torch
        >>> round(bessel_ratio(torch.tensor(5.0), 3).item(), 6)  # coth 5 - 1 / 5
        0.800091
    """
    return growth_and_ratio(concentration, dim)[1]


def growth_and_ratio(concentration: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``log(Gamma(d/2) (2 / kappa)^v I_v(kappa))``, 0 at 0, and its derivative `A_d`.

    Args and types are those of `bessel_ratio`.
    """
    kappa = concentration.double()
    least = SERIES_LIMIT * math.sqrt(dim)
    small = kappa < least
    # Each branch gets arguments in its range, or its gradients would be NaN in the other's place.
    near = torch.where(small, kappa, 0.0)
    far = torch.where(small, least, kappa)
    log_bessel_far, ratio_far = _by_recurrence(far, dim / 2 - 1)
    growth_far = log_bessel_far - (dim / 2 - 1) * (far / 2).log() + math.lgamma(dim / 2)
    growth_near, ratio_near = _by_series(near, dim)
    return torch.where(small, growth_near, growth_far), torch.where(small, ratio_near, ratio_far)


def _by_series(kappa: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return growth and ratio, with relative errors below 1e-10 up to `SERIES_LIMIT`."""
    square = kappa.square()
    second, third = 1 / (dim * (dim + 2)), 2 / (dim**2 * (dim + 2) * (dim + 4))
    growth = square / (2 * dim) * (1 - second / 2 * square + third / 3 * square.square())
    return growth, kappa / dim * (1 - second * square + third * square.square())


def _by_recurrence(kappa: Tensor, order: float) -> tuple[Tensor, Tensor]:
    """Return ``log I_v`` and ``I_{v+1} / I_v``."""
    w = order + RECURRENCES
    s = (w**2 + kappa.square()).sqrt()
    p = w / s
    series, slope = torch.zeros_like(p), torch.zeros_like(p)
    for coefficient in _expansion(w):  # Horner's rule, of the series and of its derivative by p
        slope = torch.addcmul(series, slope, p)
        series = series * p + coefficient
    log_value = s + w * (kappa / (w + s)).log() - 0.5 * (2 * math.pi * s).log() + series.log()
    slope = slope * (-(p**3) * kappa / w**2)
    ratio = kappa / (w + s) - kappa / (2 * s.square()) + slope / series
    # I of an order and of the next one, divided by that of order w. No number overflows, since
    # kappa is at least `SERIES_LIMIT` times the root of the dimension.
    value, following, step = torch.ones_like(ratio), ratio, 2 / kappa
    for above in range(RECURRENCES, 0, -1):
        value, following = torch.addcmul(following, step, value, value=order + above), value
    return log_value + value.log(), following / value


def _expansion(w: float) -> list[float]:
    """Return the coefficients of ``1 + sum u_i(p) / w^i``, the highest power of p first."""
    coefficients = [1.0] + [0.0] * 12
    for i, (numerators, denominator) in enumerate(EXPANSION, 1):
        for j, numerator in enumerate(numerators):
            coefficients[i + 2 * j] += numerator / (denominator * w**i)
    return coefficients[::-1]


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
        require_at_least(self, "loss.", margin=0, kl_scale=0)


def vmf_triplet_moments(
    means: tuple[Tensor, Tensor, Tensor], terms: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of tau, exact and in float64; `terms` are of `vmf_image_terms`.

    From ``E x = A mu`` and variances of ``A / kappa`` across mu and of ``1 - A^2 - (d - 1) A /
    kappa`` along it (Mardia and Jupp, "Directional Statistics", 9.3): tau is bilinear in
    independent vectors. No term of its variance is negative, so that none cancel.
    """
    a, p, n = (mean.double() for mean in means)
    dim = a.shape[-1]
    (la, ea, va, _), (lp, ep, vp, _), (ln, en, vn, _) = terms
    ap, an = (a * p).sum(-1), (a * n).sum(-1)
    # The parts of p and n across a, since 1 - cos^2 would lose the digits of small angles.
    across_p, across_n = p - ap[..., None] * a, n - an[..., None] * a
    along, across = ln * an - lp * ap, ln[..., None] * across_n - lp[..., None] * across_p
    variance = ea * across.square().sum(-1) + va * along.square()
    second_moment = la.square() + va
    for cosine, rest, e, v in ((ap, across_p, ep, vp), (an, across_n, en, vn)):
        square, sine = cosine.square(), rest.square().sum(-1)
        variance = variance + second_moment * (e * sine + v * square)
        variance = variance + ea * (v * sine + e * (dim - 2 + square))
    return 2 * la * along, 4 * variance


def vmf_image_terms(concentrations: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Return A, variances across and along the mean, and divergence, (4, ...) for each (..., 1).

    The KL divergence is that from the uniform distribution on the sphere, in nats: ``kappa A(kappa)
    + v log(kappa / 2) - log I_v(kappa) - log Gamma(d / 2)``.
    """
    # Together, since the recurrence takes about as long for one image as for a whole batch.
    kappa = torch.cat([values.flatten() for values in concentrations]).double()
    growth, length = growth_and_ratio(kappa, dim)
    across = length / kappa
    along = _variance_along(kappa, length, across, dim)
    terms = torch.stack([length, across, along, kappa * length - growth])
    parts = terms.split([values.numel() for values in concentrations], dim=1)
    return [
        part.view(4, *values.shape[:-1]) for part, values in zip(parts, concentrations, strict=True)
    ]


def _variance_along(kappa: Tensor, length: Tensor, across: Tensor, dim: int) -> Tensor:
    """Return the variance along the mean, ``1 - A^2 - (d - 1) A / kappa``, within 1e-9.

    It is ``dA / dkappa``, about ``(d - 1) / (2 kappa^2)`` at large kappa, where the difference
    would lose all digits.
    """
    far = kappa > 100 + 16 * dim
    inverse = torch.where(far, 1 / kappa, 0.0)
    series = torch.zeros_like(inverse)
    for coefficient in _slope_coefficients(dim):
        series = series * inverse + coefficient
    return torch.where(far, series * inverse.square(), 1 - length.square() - (dim - 1) * across)


def _slope_coefficients(dim: int) -> list[float]:
    """Return coefficients of ``kappa^2 dA / dkappa``, the highest power of 1 / kappa first.

    They follow from the differential equation ``dA / dkappa = 1 - A^2 - (d - 1) A / kappa``.
    """
    powers = [1.0]
    for k in range(1, SLOPE_TERMS + 1):
        products = sum(powers[i] * powers[k - i] for i in range(1, k))
        powers.append(((k - dim) * powers[-1] - products) / 2)
    return [-k * powers[k] for k in range(SLOPE_TERMS, 0, -1)]


def vmf_tuple_loss(
    mean: TupleRows, concentration: TupleRows, valid: Tensor, options: VonMisesFisherOptions
) -> Tensor:
    """Return the loss of each tuple, (b,): the mean over its triplets, plus weighted divergences.

    Means have unit length, concentrations (..., 1) are above 0; for `valid` see `point_tuple_loss`.
    """
    terms = vmf_image_terms(concentration, mean.anchor.shape[-1])
    nll = mean_of_valid(order_nll(*vmf_triplet_moments(mean, terms), options.margin), valid)
    anchor, positive, negatives = (values[3] for values in terms)
    divergence = (anchor + positive).squeeze(1) + mean_of_valid(negatives, valid)
    return (nll + options.kl_scale * divergence).to(mean.anchor.dtype)


def vmf_expected_squared_distance(
    mean: Tensor, concentration: Tensor, other_mean: Tensor, other_concentration: Tensor
) -> Tensor:
    """Return ``E |x - y|^2 = 2 - 2 A(kappa_x) A(kappa_y) cos`` of two independent vMFs.

    Args:
        mean, other_mean: (..., d), of unit length.
        concentration, other_concentration: (..., 1), at least 0.

    Returns:
        (...) squared distances, float64, in [0, 4].
    """
    dim = mean.shape[-1]
    lengths = bessel_ratio(concentration, dim) * bessel_ratio(other_concentration, dim)
    cosine = (mean.double() * other_mean.double()).sum(-1)
    # By rounding, the cosine may be a little above 1.
    return (2 - 2 * lengths.squeeze(-1) * cosine).clamp(min=0)
