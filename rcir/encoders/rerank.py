"""Candidates in the order of an encoder's own distances."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rcir.embedding import Embedding
from rcir.encoders.base import Encoder
from rcir.errors import InvalidConfig

ELEMENTS = 1 << 24  # numbers of candidates' vectors held at a time


def reranked(
    encoder: Encoder, queries: Embedding, items: Embedding, positions: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Distances and positions of candidates, the nearest first as `Encoder.rerank` has them.

    Args:
        encoder: whose `reranks` is true.
        queries: n of them.
        items: the gallery.
        positions: (n, k) of candidates in it; -1 where there is none, which stays last, infinitely
            far.

    Raises:
        InvalidConfig: the encoder's distances are of another shape, negative, or not numbers.
    """
    n, k = positions.shape
    distances = np.empty((n, k), np.float32)
    step = max(1, ELEMENTS // max(1, k * items.vectors.shape[1]))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        some = positions[rows]
        near = items[torch.from_numpy(np.maximum(some, 0).reshape(-1))]
        with torch.inference_mode():
            found = encoder.rerank(queries[rows].map(torch.Tensor.cpu), near).numpy()
        if found.shape != some.shape or not (found >= 0).all():
            raise InvalidConfig(
                f"{type(encoder).__name__}.rerank gave distances of shape {found.shape}, the least "
                f"{found.min()}; it must give {some.shape}, all of them at least 0"
            )
        distances[rows] = np.where(some >= 0, found, np.inf)
    order = np.argsort(distances, axis=1, kind="stable")
    return np.take_along_axis(distances, order, 1), np.take_along_axis(positions, order, 1)
