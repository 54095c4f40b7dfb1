"""Candidates in the order of an encoder's own distances."""

from __future__ import annotations

from collections.abc import Callable

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
            new_distances = encoder.rerank(queries[rows].map(torch.Tensor.cpu), near).numpy()
        if new_distances.shape != some.shape or not (new_distances >= 0).all():
            raise InvalidConfig(
                f"{type(encoder).__name__}.rerank gave distances of shape {new_distances.shape}, "
                f"the least {new_distances.min()}; it must give {some.shape}, all at least 0"
            )
        distances[rows] = np.where(some >= 0, new_distances, np.inf)
    order = np.argsort(distances, axis=1, kind="stable")
    return np.take_along_axis(distances, order, 1), np.take_along_axis(positions, order, 1)


def nearest_of_draws(
    encoder: Encoder,
    queries: Embedding,
    positions: NDArray[np.int64],
    vectors: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    nearest: int,
) -> NDArray[np.int64]:
    """(n, t, nearest) columns of the nearest candidates of each of t draws of n queries.

    Args:
        encoder: that has `draw_distances`.
        queries: n of them.
        positions: (n, k) of candidates in the gallery; -1 where there is none, which comes last.
        vectors: of gallery images at positions.
        nearest: at most k.

    Raises:
        InvalidConfig: the encoder has nothing to draw from, or its distances are of another shape,
            of fewer than two draws, or not numbers.
    """
    n, k = positions.shape
    if not n:
        return np.empty((0, 1, nearest), np.int64)
    step = max(1, ELEMENTS // max(1, k * queries.vectors.shape[1]))
    columns = []
    for start in range(0, n, step):
        some = positions[start : start + step]
        near = torch.from_numpy(vectors(np.maximum(some, 0).reshape(-1)))
        own = queries[start : start + step].map(torch.Tensor.cpu)
        with torch.inference_mode():
            distances = encoder.draw_distances(own, near.unflatten(0, some.shape)).numpy()
        if distances.shape != (max(2, len(distances)), *some.shape) or np.isnan(distances).any():
            raise InvalidConfig(
                f"{type(encoder).__name__}.draw_distances gave shape {distances.shape}; it must "
                f"give (draws, {some.shape[0]}, {some.shape[1]}) numbers of at least 2 draws"
            )
        far = np.where(some >= 0, distances, np.inf)
        columns.append(np.argsort(far, axis=2, kind="stable")[:, :, :nearest].swapaxes(0, 1))
    return np.concatenate(columns)
