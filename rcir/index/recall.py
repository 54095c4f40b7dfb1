"""How much of an exact search an approximate one finds."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.index.base import check_vectors
from rcir.index.exact import nearest
from rcir.stored_vectors import batches


def exact_positions(
    vectors: NDArray[np.floating[Any]], queries: NDArray[np.float32], k: int
) -> NDArray[np.int64]:
    """(q, k) positions of the nearest of vectors (n, d), n >= k, which are read once, in batches.

    Example:
        >>> exact_positions(np.eye(3), np.eye(3, dtype=np.float32)[:1], 1)
        array([[0]])
    """
    heap = faiss.ResultHeap(len(queries), k)
    for rows in batches(*vectors.shape):
        batch = check_vectors(vectors[rows])
        distances, positions = nearest(queries, batch, min(k, len(batch)))
        heap.add_result(distances, positions + rows.start)
    heap.finalize()
    found: NDArray[np.int64] = heap.I
    return found


def recalls_of(found: NDArray[np.int64], exact: NDArray[np.int64]) -> NDArray[np.float64]:
    """(q,) shares of the exact candidates of each query that are found at any rank.

    Args:
        found, exact: (q, k) positions, each once in a row; -1 where there is none.

    Example:
        >>> recalls_of(np.array([[3, 1], [2, -1]]), np.array([[1, 3], [2, 0]]))
        array([1. , 0.5])
    """
    there = exact >= 0
    step = int(max(found.max(initial=0), exact.max(initial=0))) + 1
    rows = step * np.arange(len(exact))[:, None]
    shared = np.isin(exact + rows, (found + rows)[found >= 0]) & there
    shares: NDArray[np.float64] = shared.sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    return shares


def recall_of(found: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Their mean over all queries.

    Example:
        >>> recall_of(np.array([[3, 1], [2, -1]]), np.array([[1, 3], [2, 0]]))
        0.75
    """
    return float(recalls_of(found, exact).mean())
