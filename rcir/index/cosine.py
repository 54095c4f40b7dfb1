"""Angles from L2 distances, for vectors of any length."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.stored_vectors import batches

UNIT = 1e-5  # of a length: what rounding leaves of a vector that was divided by its own


def lengths(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """(n,) L2 norms of vectors (n, d); exactly 1 of those that are of unit length up to rounding.

    Example:
        >>> lengths(np.array([[3.0, 4.0], [0.6, 0.8]])).tolist()
        [5.0, 1.0]
    """
    norms = np.empty(len(vectors), np.float32)
    for rows in batches(*vectors.shape):
        norms[rows] = np.linalg.norm(vectors[rows], axis=1)
    norms[np.abs(norms - 1) <= UNIT] = 1
    return norms


def one_minus_cosine(
    distances: NDArray[np.floating[Any]], first: ArrayLike, second: ArrayLike
) -> NDArray[np.float64]:
    """One minus the cosine of the angle between vectors x and y, from 0 to 2.

    From |x - y|^2 = (|x| - |y|)^2 + 2 |x| |y| (1 - cos); of unit vectors it is |x - y|^2 / 2. Where
    one of them is zero there is no angle, and it is 1.

    Args:
        distances: |x - y|, of any shape.
        first, second: |x| and |y|, which broadcast to that shape.

    Example:
        >>> one_minus_cosine(np.array([np.sqrt(10), 1.0]), first=[1.0, 0.0], second=[3.0, 1.0])
        array([1., 1.])
    """
    squared = np.asarray(distances, np.float64) ** 2
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    product = 2 * x * y
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (squared - (x - y) ** 2) / product
    return np.clip(np.where(product > 0, found, 1.0), 0.0, 2.0)
