"""Order candidates by an encoder's own distances."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from rcir.embedding import Embedding
from rcir.encoders.base import Encoder
from rcir.errors import InvalidConfig

BLOCK_NUMBERS = 1 << 24  # numbers in the vectors of candidates that are in memory together


def rerank(
    encoder: Encoder, queries: Embedding, items: Embedding, positions: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return distances and positions (n, k) of candidates, in the order of `Encoder.rerank`.

    Position -1, where there is none, stays last, infinitely far.
    """
    n, k = positions.shape
    distances = np.empty((n, k), np.float32)
    step = max(1, BLOCK_NUMBERS // max(1, k * items.vectors.shape[1]))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        block = positions[rows]
        near = items[torch.from_numpy(np.maximum(block, 0).reshape(-1))]
        with torch.inference_mode():
            values = encoder.rerank(queries[rows].map(torch.Tensor.cpu), near).numpy()
        if values.shape != block.shape or not (values >= 0).all():
            raise InvalidConfig(
                f"{type(encoder).__name__}.rerank returned shape {values.shape}, the least value "
                f"{values.min()}; it must return {block.shape}, all at least 0"
            )
        distances[rows] = np.where(block >= 0, values, np.inf)
    order = np.argsort(distances, axis=1, kind="stable")
    return np.take_along_axis(distances, order, 1), np.take_along_axis(positions, order, 1)


def nearest_of_draws(
    encoder: Encoder,
    queries: Embedding,
    positions: NDArray[np.int64],
    vectors: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    nearest: int,
) -> NDArray[np.int64]:
    """Return columns (n, t, nearest) of the nearest candidates of each of t draws of n queries.

    `vectors` returns those of gallery items at positions; -1, where there is none, comes last.
    """
    n, k = positions.shape
    if not n:
        return np.empty((0, 1, nearest), np.int64)
    step = max(1, BLOCK_NUMBERS // max(1, k * queries.vectors.shape[1]))
    columns = []
    for start in range(0, n, step):
        block = positions[start : start + step]
        near = torch.from_numpy(vectors(np.maximum(block, 0).reshape(-1)))
        part = queries[start : start + step].map(torch.Tensor.cpu)
        with torch.inference_mode():
            values = encoder.draw_distances(part, near.unflatten(0, block.shape)).numpy()
        if values.shape != (max(2, len(values)), *block.shape) or np.isnan(values).any():
            raise InvalidConfig(
                f"{type(encoder).__name__}.draw_distances returned shape {values.shape}; it must "
                f"return (draws, {block.shape[0]}, {block.shape[1]}) numbers of at least 2 draws"
            )
        distances = np.where(block >= 0, values, np.inf)
        columns.append(np.argsort(distances, axis=2, kind="stable")[:, :, :nearest].swapaxes(0, 1))
    return np.concatenate(columns)
