"""Normalised softmax loss: cross entropy of the cosines to a learned vector per label.

Zhai and Wu, "Classification is a strong baseline for deep metric learning", BMVC 2019; the vectors
are the proxies of Movshovitz-Attias et al., ICCV 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from rcir.errors import InvalidConfig


@dataclass(frozen=True)
class NormSoftmaxOptions:
    """Options of the normalised softmax loss: `loss` in a training's configuration.

    Args:
        temperature: above 0; cosines are divided by it.
    """

    temperature: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InvalidConfig(f"loss.temperature is {self.temperature}; it must be above 0")


def norm_softmax_loss(
    vectors: Tensor, proxies: Tensor, labels: Tensor, temperature: float = 0.1
) -> Tensor:
    """``-log softmax(cos(x, w) / t)`` of the proxy of each vector's label.

    Args:
        vectors: (b, d), of any length above 0.
        proxies: (n, d), likewise; one for each label.
        labels: (b,) int64 in [0, n).
        temperature: above 0.

    Returns:
        (b,) losses, at least 0.

    Example:
        >>> import torch
        >>> vectors, proxies = torch.tensor([[3., 4.]]), torch.tensor([[1., 0.], [0., 2.]])
        >>> norm_softmax_loss(vectors, proxies, torch.tensor([1]), 0.5)  # log(1 + exp(-.2 / .5))
        tensor([0.5130])
    """
    cosines = F.normalize(vectors) @ F.normalize(proxies).T
    return F.cross_entropy(cosines / temperature, labels, reduction="none")
