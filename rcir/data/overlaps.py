"""Labels that images share, from sparse tables of labels.

Rare labels make few pairs of images, which a sparse product finds. A label of every third image
makes more pairs than can be listed: matches are then counted as bits, 64 images at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

BLOCK_ENTRIES = 2**22  # entries, or bytes, that are in memory at a time, about
WORD_BITS = 64


def row_pointers(counts: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the start of each row's entries, and the end of the last."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def count_overlaps(labels: csr_array, others: csr_array) -> NDArray[np.int64]:
    """Count the rows of `others` (m, labels) that share a label with each row of `labels`, (n,)."""
    first, which = combinations(labels)  # rows of the same labels have the same count
    labels = labels[first]
    words = labels.nnz * (
        others.shape[0] // WORD_BITS
    )  # a word of bits takes about as long as a pair
    n_pairs = _count_steps(labels, np.bincount(others.indices, minlength=others.shape[1])).sum()
    if n_pairs > words:
        return _count_bits(labels, others)[which]
    counts = [np.diff(product.indptr) for product in products(labels, others.T.tocsr())]
    return np.concatenate([*counts, np.empty(0, np.int64)])[which]


def products(labels: csr_array, by_label: csr_array) -> Iterator[csr_array]:
    """Yield the product with the transposed labels of other rows, some rows at a time."""
    block = np.cumsum(_count_steps(labels, np.diff(by_label.indptr))) // BLOCK_ENTRIES
    edges = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), labels.shape[0]]
    for start, stop in pairwise(edges):
        yield labels[start:stop] @ by_label


def _count_steps(labels: csr_array, frequency: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count the steps that a sparse product takes for each row, (n,), by the labels' frequency."""
    total = row_pointers(frequency[labels.indices])
    steps: NDArray[np.int64] = np.diff(total[labels.indptr])
    return steps


def _count_bits(labels: csr_array, others: csr_array) -> NDArray[np.int64]:
    """Return what `count_overlaps` does: the union of the rows that have each label, as bits."""
    counts, n_labels = np.zeros(labels.shape[0], np.int64), np.diff(labels.indptr)
    # Rows of many labels first: rows that have another label are then at the start of a block.
    rows = np.argsort(-n_labels, kind="stable")[: np.count_nonzero(n_labels)]
    width = max(WORD_BITS, BLOCK_ENTRIES // labels.shape[1] // WORD_BITS * WORD_BITS)
    width = min(width, -(-others.shape[0] // WORD_BITS) * WORD_BITS)
    step = max(1, BLOCK_ENTRIES // (width // 8))
    for start in range(0, others.shape[0], width):
        other_rows, other_labels = others[start : start + width].nonzero()
        is_labelled = np.zeros((others.shape[1], width), np.bool_)
        is_labelled[other_labels, other_rows] = True
        bits = np.packbits(is_labelled, axis=1).view(np.uint64)  # (number of labels, width / 64)
        for first in range(0, len(rows), step):
            block = rows[first : first + step]
            starts = labels.indptr[block]
            union = bits[labels.indices[starts]]
            for number in range(1, n_labels[block[0]]):
                n = np.count_nonzero(n_labels[block] > number)
                union[:n] |= bits[labels.indices[starts[:n] + number]]
            counts[block] += np.bitwise_count(union).sum(1, dtype=np.int64)
    return counts


def combinations(labels: csr_array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each combination of labels, and the combination of each row."""
    ordered = labels.sorted_indices()
    counts = np.diff(ordered.indptr).astype(np.int64)
    which = np.zeros(len(counts), np.int64)
    # Label by label: rows that agreed so far and have the same next label still agree.
    for number in range(counts.max(initial=0)):
        rows = np.flatnonzero(counts > number)
        following = ordered.indices[ordered.indptr[rows] + number]
        which[rows] = np.unique(which[rows] * labels.shape[1] + following, return_inverse=True)[1]
    _, first, which = np.unique(
        which * (counts.max(initial=0) + 1) + counts, return_index=True, return_inverse=True
    )
    return first, which
