"""Which rows of two sparse tables of labels have a label in common, in memory that is bounded.

Rare labels make few pairs of images, which a sparse product finds. A label that every third image
has makes more pairs than can be listed: those are counted as bits, 64 images at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

BLOCK = 2**22  # entries, or bytes, of what is held at a time, about
WORD = 64


def count_overlaps(own: csr_array, theirs: csr_array) -> NDArray[np.int64]:
    """How many rows of `theirs` share a label with each row of `own`.

    Args:
        own: (n, number of labels) bool.
        theirs: (m, number of labels) bool.

    Returns:
        (n,).

    Example:
        >>> labels = csr_array(np.array([[1, 0], [1, 1], [0, 0]], bool))
        >>> count_overlaps(labels, labels).tolist()
        [2, 2, 0]
    """
    # Rows of the same labels have the same count.
    first, which = combinations(own)
    own = own[first]
    # A word of bits takes about as long as a pair.
    words = own.nnz * (theirs.shape[0] // WORD)
    steps = _pairs(own, np.bincount(theirs.indices, minlength=theirs.shape[1])).sum()
    count = _count_pairs if steps <= words else _count_bits
    return count(own, theirs)[which]


def products(own: csr_array, by_label: csr_array) -> Iterator[tuple[slice, csr_array]]:
    """Runs of rows of `own`, and their product with `by_label`, the other rows transposed: what
    shares a label."""
    block = np.cumsum(_pairs(own, np.diff(by_label.indptr))) // BLOCK
    edges = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), own.shape[0]]
    for start, stop in pairwise(edges):
        yield slice(start, stop), own[start:stop] @ by_label


def _pairs(own: csr_array, frequency: NDArray[np.integer]) -> NDArray[np.int64]:
    """(n,) of each row of `own`: the steps of a sparse product with rows of such frequencies."""
    total = np.concatenate([[0], np.cumsum(frequency[own.indices])])
    steps: NDArray[np.int64] = np.diff(total[own.indptr])
    return steps


def _count_pairs(own: csr_array, theirs: csr_array) -> NDArray[np.int64]:
    found = np.zeros(own.shape[0], np.int64)
    for rows, product in products(own, theirs.T.tocsr()):
        found[rows] = np.diff(product.indptr)
    return found


def _count_bits(own: csr_array, theirs: csr_array) -> NDArray[np.int64]:
    found = np.zeros(own.shape[0], np.int64)
    counts = np.diff(own.indptr)
    # Those of many labels first: what has another label is then at the start of a block.
    rows = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    width = max(WORD, BLOCK // own.shape[1] // WORD * WORD)
    width = min(width, -(-theirs.shape[0] // WORD) * WORD)
    each = max(1, BLOCK // (width // 8))
    for start in range(0, theirs.shape[0], width):
        having = _words(theirs[start : start + width], width)
        for first in range(0, len(rows), each):
            block = rows[first : first + each]
            starts = own.indptr[block]
            shared = having[own.indices[starts]]
            for number in range(1, counts[block[0]]):
                n = np.count_nonzero(counts[block] > number)
                shared[:n] |= having[own.indices[starts[:n] + number]]
            found[block] += np.bitwise_count(shared).sum(1, dtype=np.int64)
    return found


def _words(labels: csr_array, width: int) -> NDArray[np.uint64]:
    """(number of labels, width / 64): bits that say which of at most `width` rows have a label."""
    having = np.zeros((labels.shape[1], width), np.bool_)
    having[labels.indices, np.repeat(np.arange(labels.shape[0]), np.diff(labels.indptr))] = True
    return np.packbits(having, axis=1).view(np.uint64)


def combinations(labels: csr_array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first row of each different combination of labels, and the combination of each row.

    Example:
        >>> first, which = combinations(csr_array(np.array([[1, 0], [1, 1], [1, 0]], bool)))
        >>> first[which].tolist()
        [0, 1, 0]
    """
    ordered = labels.sorted_indices()
    counts = np.diff(ordered.indptr).astype(np.int64)
    which = np.zeros(len(counts), np.int64)
    # One label after the other: rows that agreed so far and have the same next one still agree.
    for number in range(counts.max(initial=0)):
        rows = np.flatnonzero(counts > number)
        following = ordered.indices[ordered.indptr[rows] + number]
        same = which[rows] * labels.shape[1] + following
        which[rows] = np.unique(same, return_inverse=True)[1]
    _, first, which = np.unique(
        which * (counts.max(initial=0) + 1) + counts, return_index=True, return_inverse=True
    )
    return first, which
