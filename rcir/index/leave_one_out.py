"""Searching a set among itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.index.table import build_index

if TYPE_CHECKING:
    from torch import Tensor

DISTANCES_AT_ONCE = 1 << 24  # distances held at a time: 64 MiB of float32


def nearest_others(
    vectors: Tensor | NDArray[np.floating[Any]], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The nearest other vectors of each vector, which is left out of its own search by its place,
    not by its distance: a twin is found.

    Args:
        vectors: (n, d), an array, or a tensor on any device.
        k: number of neighbours, 1 to n - 1.

    Returns:
        L2 distances and positions, each (n, k), nearest first.

    Example:
        >>> import torch
        >>> distances, positions = nearest_others(torch.tensor([[0.0], [1.0], [1.0]]), 1)
        >>> distances.tolist(), positions.tolist()
        ([[1.0], [0.0], [0.0]], [[1], [2], [1]])
    """
    n = len(vectors)
    if not 1 <= k < n:
        raise InvalidData(f"{k} other vectors of {n}: from 1 to {n - 1} can be found")
    if isinstance(vectors, np.ndarray):
        return _of_array(vectors, k)
    import torch  # here only: the package is imported for its table as well

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


def _of_array(
    vectors: NDArray[np.floating[Any]], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    centred = (vectors - vectors.mean(axis=0)).astype(np.float32)
    distances, positions = build_index(centred).search(centred, k + 1)
    others = ~places_of(np.arange(len(vectors)), positions)
    shape = (len(vectors), k)
    return distances[others].reshape(shape), positions[others].reshape(shape)


def places_of(itself: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where the position of each query itself stands in its row (q, k), the last where it does not:
    behind k twins, or not found.
    """
    found: NDArray[np.bool_] = positions == itself[:, None]
    found[~found.any(axis=1), -1] = True
    return found
