"""Heads on a backbone: pooling, the embedding, the variance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GeM(nn.Module):
    """Generalised-mean pooling, (n, C, h, w) to (n, C).

    ``f_c = mean_hw(max(x, eps) ** p) ** (1 / p)`` with one learnable p, shared by all channels
    (Radenovic et al., "Fine-tuning CNN image retrieval with no human annotation", TPAMI 2019).
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))
        self.eps = eps

    def forward(self, feature_map: Tensor) -> Tensor:
        powered = feature_map.clamp(min=self.eps).pow(self.p)
        return powered.mean(dim=(-2, -1)).pow(1 / self.p)


def pooling(name: str, shape: torch.Size) -> tuple[nn.Module, int]:
    """A pooling module for feature maps of `shape` (C, h, w), and the length of its output.

    "gem" and "avg" forget where a feature was; "flatten" keeps it, for small images in which
    position is meaning (a two-digit number). "gem" takes negative features for 0, "avg" is the mean
    of any.
    """
    if name == "gem":
        return GeM(), shape[0]
    if name == "avg":
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), shape[0]
    return nn.Flatten(), math.prod(shape)


class MeanHead(nn.Sequential):
    """Pooling and a linear layer: feature map to embedding (n, dim), not yet normalised."""

    def __init__(self, pool: str, shape: torch.Size, dim: int) -> None:
        module, length = pooling(pool, shape)
        super().__init__(module, nn.Linear(length, dim))


class ScalarHead(nn.Module):
    """Pooling and two linear layers: feature map to one number for each image (n, 1).

    The last layer starts at weight 0, so that every image starts with the number `initial`.
    """

    def __init__(self, pool: str, shape: torch.Size, hidden: int, initial: float = 0.0) -> None:
        super().__init__()
        module, length = pooling(pool, shape)
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, initial)
        self.layers = nn.Sequential(module, nn.Linear(length, hidden), nn.ReLU(), last)

    def forward(self, feature_map: Tensor) -> Tensor:
        numbers: Tensor = self.layers(feature_map)
        return numbers


class VarianceHead(ScalarHead):
    """A `ScalarHead` and a softplus: feature map to isotropic variance (n, 1), first `initial`."""

    def __init__(self, pool: str, shape: torch.Size, hidden: int, initial: float = 1e-3) -> None:
        super().__init__(pool, shape, hidden, math.log(math.expm1(initial)))

    def forward(self, feature_map: Tensor) -> Tensor:
        return F.softplus(super().forward(feature_map))
