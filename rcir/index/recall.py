"""How much of an exact search an approximate one finds."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.index.base import check_vectors

BATCH_OF_VECTORS = 1 << 17  # searched at a time


def exact_positions(
    vectors: NDArray[np.floating[Any]], queries: NDArray[np.float32], k: int
) -> NDArray[np.int64]:
    """(q, k) positions of the nearest of vectors (n, d), n >= k, which are read once, in batches.

    Example:
        >>> exact_positions(np.eye(3), np.eye(3, dtype=np.float32)[:1], 1)
        array([[0]])
    """
    heap = faiss.ResultHeap(len(queries), k)
    for start in range(0, len(vectors), BATCH_OF_VECTORS):
        batch = check_vectors(vectors[start : start + BATCH_OF_VECTORS])
        distances, positions = faiss.knn(queries, batch, min(k, len(batch)))
        heap.add_result(distances, positions + start)
    heap.finalize()
    found: NDArray[np.int64] = heap.I
    return found


def recall_of(found: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Share of the exact candidates that are found at any rank, over all queries.

    Args:
        found, exact: (q, k) positions, each once in a row; -1 where there is none.

    Example:
        >>> recall_of(np.array([[3, 1], [2, -1]]), np.array([[1, 3], [2, 0]]))
        0.75
    """
    there = exact >= 0
    step = int(max(found.max(initial=0), exact.max(initial=0))) + 1
    rows = step * np.arange(len(exact))[:, None]
    shared = np.isin((exact + rows)[there], (found + rows)[found >= 0])
    return float(shared.mean()) if there.any() else 1.0
