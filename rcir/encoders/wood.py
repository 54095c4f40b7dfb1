"""Draws from von Mises-Fisher distributions by rejection (Wood, 1994)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST_CONCENTRATION = 1e10


def draw_von_mises_fisher(
    mean: Tensor, concentration: Tensor, draws: int, generator: torch.Generator
) -> Tensor:
    """Points of the unit sphere, drawn independently.

    Wood, "Simulation of the von Mises Fisher distribution", Communications in Statistics:
    Simulation and Computation 23 (1), 1994.

    Args:
        mean: (n, d) of unit length, d at least 2.
        concentration: (n, 1), above 0.
        draws: how many of each.
        generator: on the CPU, where all is computed.

    Returns:
        (draws, n, d) of the kind and on the device of `mean`.

    Example:
        >>> mean = torch.eye(3)[:1]
        >>> some = draw_von_mises_fisher(mean, torch.tensor([[1e6]]), 2, torch.Generator())
        >>> (some @ mean.T).flatten()
        tensor([1.0000, 1.0000])
    """
    direction = mean.detach().cpu().double()
    # Beyond that, float64 does not tell a draw from its mean.
    kappa = (
        concentration.detach()
        .cpu()
        .double()
        .squeeze(1)
        .clamp(max=LARGEST_CONCENTRATION)
        .expand(draws, -1)
    )
    cosine = _cosines(kappa, mean.shape[1], generator)[..., None]
    noise = torch.randn(draws, *direction.shape, generator=generator, dtype=torch.float64)
    across = noise - (noise * direction).sum(-1, keepdim=True) * direction
    points = cosine * direction + (1 - cosine.square()).clamp(min=0).sqrt() * F.normalize(
        across, dim=-1
    )
    return points.to(mean)


def _cosines(kappa: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """Cosines of draws to their means, of concentrations of any shape."""
    free = dim - 1
    b = free / (2 * kappa + (4 * kappa.square() + free**2).sqrt())
    x = (1 - b) / (1 + b)
    c = kappa * x + free * (1 - x.square()).log()
    cosines = torch.empty_like(kappa)
    waiting = torch.ones_like(kappa, dtype=torch.bool)
    while waiting.any():
        own_b, own_x, own_c, own_kappa = (each[waiting] for each in (b, x, c, kappa))
        # Beta(free / 2, free / 2) as torch draws it with a generator: a coordinate of the sphere.
        noise = torch.randn(len(own_b), dim, generator=generator, dtype=torch.float64)
        beta = (1 + F.normalize(noise)[:, 0]) / 2
        proposed = (1 - (1 + own_b) * beta) / (1 - (1 - own_b) * beta)
        uniform = torch.rand(len(own_b), generator=generator, dtype=torch.float64)
        surplus = own_kappa * proposed + free * (1 - own_x * proposed).log() - own_c
        taken = surplus >= uniform.log()
        places = waiting.nonzero()[taken].unbind(1)
        cosines[places] = proposed[taken]
        waiting[places] = False
    return cosines
