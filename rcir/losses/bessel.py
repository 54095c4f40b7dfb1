"""Modified Bessel functions of the first kind, as von Mises-Fisher distributions need them.

In d dimensions the order is ``v = d / 2 - 1``. At ``v + 32`` the uniform asymptotic expansion of
large order (Abramowitz and Stegun, 9.7.7) is exact to double precision at every concentration; the
recurrence of ratios (9.6.26), stable downwards, leads from there to v.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ABOVE = 32  # orders between that of the expansion and v
SMALL = 0.03  # of the root of d: below it a series is used, where the rest would cancel
# Numerators of u_1 to u_4 by ascending powers of p, which begin at p^i and go by squares.
EXPANSION = (
    ((3, -5), 24),
    ((81, -462, 385), 1152),
    ((30375, -369603, 765765, -425425), 414720),
    ((4465125, -94121676, 349922430, -446185740, 185910725), 39813120),
)


def log_bessel(concentration: Tensor, dim: int) -> Tensor:
    """``log I_v(kappa)`` of order ``v = dim / 2 - 1``, differentiable.

    Args:
        concentration: kappa, (...), above 0; to 1e-8 absolute from 1e-3 to 1e6.
        dim: at least 2; tested to 2,048.

    Returns:
        (...) float64.

    Example:
        >>> import torch
        >>> round(log_bessel(torch.tensor(5.0), 3).item(), 6)  # log(sqrt(2 / 5 pi) sinh 5)
        3.276297
    """
    order = dim / 2 - 1
    growth, _ = growth_and_ratio(concentration, dim)
    return growth + order * (concentration.double() / 2).log() - math.lgamma(dim / 2)


def bessel_ratio(concentration: Tensor, dim: int) -> Tensor:
    """``A_d(kappa) = I_{v+1}(kappa) / I_v(kappa)``, the mean resultant length, differentiable.

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
    """``log(Gamma(d/2) (2 / kappa)^v I_v(kappa))``, which is 0 at 0, and its derivative `A_d`.

    Args:
        concentration: kappa, (...), at least 0.
        dim: at least 2.

    Returns:
        two tensors (...), float64.
    """
    kappa = concentration.double()
    least = SMALL * math.sqrt(dim)
    small = kappa < least
    # Each branch is given what it can take, or its gradients would be NaN in the other's place.
    near = torch.where(small, kappa, 0.0)
    far = torch.where(small, least, kappa)
    log_bessel_far, ratio_far = _by_recurrence(far, dim / 2 - 1)
    growth_far = log_bessel_far - (dim / 2 - 1) * (far / 2).log() + math.lgamma(dim / 2)
    growth_near, ratio_near = _by_series(near, dim)
    return torch.where(small, growth_near, growth_far), torch.where(small, ratio_near, ratio_far)


def _by_series(kappa: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Growth and ratio, relative errors below 1e-10 for kappa^2 below `SMALL`^2 times dim."""
    square = kappa.square()
    second, third = 1 / (dim * (dim + 2)), 2 / (dim**2 * (dim + 2) * (dim + 4))
    growth = square / (2 * dim) * (1 - second / 2 * square + third / 3 * square.square())
    return growth, kappa / dim * (1 - second * square + third * square.square())


def _by_recurrence(kappa: Tensor, order: float) -> tuple[Tensor, Tensor]:
    """``log I_v`` and ``I_{v+1} / I_v``."""
    w = order + ABOVE
    s = (w**2 + kappa.square()).sqrt()
    p = w / s
    series, slope = torch.ones_like(p), torch.zeros_like(p)
    for i, (numerators, denominator) in enumerate(EXPANSION, 1):
        for j, numerator in enumerate(numerators):
            power, factor = i + 2 * j, numerator / (denominator * w**i)
            series = series + factor * p**power
            slope = slope + factor * power * p ** (power - 1)
    log_value = s + w * (kappa / (w + s)).log() - 0.5 * (2 * math.pi * s).log() + series.log()
    slope = slope * (-(p**3) * kappa / w**2)
    ratio = kappa / (w + s) - kappa / (2 * s.square()) + slope / series
    for above in range(ABOVE, 0, -1):
        ratio = 1 / (2 * (order + above) / kappa + ratio)
        log_value = log_value - ratio.log()
    return log_value, ratio
