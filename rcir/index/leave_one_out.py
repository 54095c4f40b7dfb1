"""Searching a set among itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData

if TYPE_CHECKING:
    from torch import Tensor

DISTANCES_AT_ONCE = 1 << 24  # distances held at a time: 64 MiB of float32


def nearest_others(vectors: Tensor, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The nearest other vectors of each vector, which is left out of its own search by its place,
    not by its distance: a twin is found.

    Args:
        vectors: (n, d), on any device.
        k: number of neighbours, 1 to n - 1.

    Returns:
        L2 distances and positions, each (n, k), nearest first.

    Example:
        >>> import torch
        >>> distances, positions = nearest_others(torch.tensor([[0.0], [1.0], [1.0]]), 1)
        >>> distances.tolist(), positions.tolist()
        ([[1.0], [0.0], [0.0]], [[1], [2], [1]])
    """
    import torch  # here only: the package is imported for its table as well

    n = len(vectors)
    if not 1 <= k < n:
        raise InvalidData(f"{k} other vectors of {n}: from 1 to {n - 1} can be found")
    # The matrix product of `cdist` loses digits far from the origin; distances do not change.
    vectors = vectors - vectors.mean(0)
    distances, positions = [], []
    for rows in torch.arange(n, device=vectors.device).split(max(1, DISTANCES_AT_ONCE // n)):
        block = torch.cdist(vectors[rows], vectors)
        block[torch.arange(len(rows), device=vectors.device), rows] = torch.inf
        nearest = block.topk(k, largest=False)
        distances.append(nearest.values.cpu())
        positions.append(nearest.indices.cpu())
    return torch.cat(distances).numpy(), torch.cat(positions).numpy()
