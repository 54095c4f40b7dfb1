"""Nearest neighbours within one set, and the share of neighbours that an index finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.index.base import Neighbours

if TYPE_CHECKING:
    from torch import Tensor

MAX_BATCH_DISTANCES = 1 << 24  # distances held at a time: 64 MiB of float32


def nearest_others(vectors: Tensor, k: int, queries: slice = slice(None)) -> Neighbours:
    """Find the nearest other vectors of each vector, including its duplicates.

    Args:
        vectors: (n, d), on any device.
        k: number of neighbours, 1 to n - 1.
        queries: the q vectors whose neighbours are searched; all n by default.

    Returns:
        L2 distances and positions, each (q, k), nearest first.

    Example:
        >>> import torch
        >>> distances, positions = nearest_others(torch.tensor([[0.0], [1.0], [1.0]]), 1)
        >>> distances.tolist(), positions.tolist()
        ([[1.0], [0.0], [0.0]], [[1], [2], [1]])
    """
    import torch  # indexes are built and searched without it

    from rcir.torch_settings import full_precision

    n = len(vectors)
    if not 1 <= k < n:
        raise InvalidData(f"{k} of the other vectors of {n}: from 1 to {n - 1} can be found")
    vectors = vectors - vectors.mean(0)  # the matrix product of `cdist` loses digits elsewhere
    distances, positions = [], []
    places = torch.arange(n, device=vectors.device)[queries]
    for rows in places.split(max(1, MAX_BATCH_DISTANCES // n)):
        with full_precision():
            block = torch.cdist(vectors[rows], vectors)
        block[torch.arange(len(rows), device=vectors.device), rows] = torch.inf
        nearest = block.topk(k, largest=False)
        distances.append(nearest.values.cpu())
        positions.append(nearest.indices.cpu())
    return torch.cat(distances).numpy(), torch.cat(positions).numpy()


def recall_of(positions: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Return the share of the exact candidates found at any rank, averaged over queries.

    Args:
        positions, exact: (q, k) positions, each once in a row; -1 where there is none.

    Example:
        >>> recall_of(np.array([[3, 1], [2, -1]]), np.array([[1, 3], [2, 0]]))
        0.75
    """
    is_candidate = exact >= 0
    step = int(max(positions.max(initial=0), exact.max(initial=0))) + 1
    rows = step * np.arange(len(exact))[:, None]
    shared = np.isin(exact + rows, (positions + rows)[positions >= 0]) & is_candidate
    return float((shared.sum(axis=1) / np.maximum(is_candidate.sum(axis=1), 1)).mean())
