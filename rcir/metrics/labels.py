"""Candidates of a query that share a label: the same class, place or product."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# No image has this label: it is that of a query that matches no gallery item, and of no candidate.
UNMATCHED = NO_CANDIDATE = int(np.iinfo(np.int64).min)
VOTERS = 30  # candidates whose labels are counted as votes
MAX_TABLE_RATIO = 8  # range of labels, per column, up to which a table is used


def earlier_of_same_label(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the candidates (n, depth) before each candidate that share its label."""
    depth = labels.shape[1]
    bits = depth.bit_length()
    (labels,), lowest, span = _spanned(labels)
    if span.bit_length() + bits > 63:
        labels, lowest = np.unique(labels, return_inverse=True)[1].reshape(labels.shape), 0
    # Label and column in one number, since sorting numbers is much faster than an argsort.
    places = np.arange(depth)
    ordered = np.sort((labels - lowest) << bits | places, axis=1)
    columns = ordered & (1 << bits) - 1
    ordered >>= bits
    starts = np.ones(labels.shape, bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    counts = np.empty(labels.size, np.int64)
    counts[cells(columns, depth)] = places - first
    return counts.reshape(labels.shape)


def first_of_each_label(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return columns (n, depth) of the nearest candidate of each label, ascending, then -1."""
    first = _is_first(labels) & (labels != NO_CANDIDATE)
    rows, columns = np.nonzero(first)
    counts = np.count_nonzero(first, axis=1)
    nearest = np.full(labels.shape, -1)
    nearest[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = columns
    return nearest


def _is_first(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return (n, depth) True where no earlier candidate has the same label."""
    n, depth = labels.shape
    (labels,), lowest, span = _spanned(labels)
    if span > MAX_TABLE_RATIO * depth:
        return np.asarray(earlier_of_same_label(labels) == 0)
    # The column of each label, written from the last candidate to the first. One-dimensional and
    # contiguous, because NumPy may otherwise write in another order.
    numbers = cells(labels - lowest, span).ravel()
    columns = np.tile(np.arange(depth, dtype=np.min_scalar_type(depth)), n)
    table = np.empty(span * n, columns.dtype)
    table[np.ascontiguousarray(numbers[::-1])] = np.ascontiguousarray(columns[::-1])
    return np.asarray((table[numbers] == columns).reshape(labels.shape))


def count_votes(
    labels: NDArray[np.int64], counted: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Count how many of the first 30 candidates have each label of `counted`, (n, k).

    By default, these are the labels of all candidates.
    """
    voting, counted = labels[:, :VOTERS], labels if counted is None else counted
    (voting, counted), lowest, span = _spanned(voting, counted)
    voting, counted = voting - lowest, counted - lowest
    if span <= MAX_TABLE_RATIO * max(1, counted.shape[1]):
        counts = np.bincount(cells(voting, span).ravel(), minlength=span * len(labels))
        return counts.take(cells(counted, span))
    small = counted.astype(np.min_scalar_type(span - 1))  # compared several times as fast
    votes = np.zeros(counted.shape, np.uint8)
    for voter in voting.T:
        votes += small == voter.astype(small.dtype)[:, None]
    return votes.astype(np.int64)


def take_columns(
    values: NDArray[Any], columns: NDArray[np.int64], filler: float | bool
) -> NDArray[Any]:
    """Return values (n, k) of an array (n, depth) at columns of each row; `filler` at -1."""
    selected = values.take(cells(columns, values.shape[1]))
    selected[columns < 0] = filler
    return selected


def cells(columns: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return positions in a flattened array (n, width) of columns (n, k) of its rows."""
    return columns + width * np.arange(len(columns))[:, None]


def _spanned(*arrays: NDArray[np.int64]) -> tuple[list[NDArray[np.int64]], int, int]:
    """Return labels, the lowest of them, and the number of integers from it to the highest.

    No candidate gets the integer below the lowest label, so that the range remains small.
    """
    filled = [labels for labels in arrays if labels.size]
    if not filled:
        return list(arrays), 0, 1
    lowest = min(int(labels.min()) for labels in filled)
    highest = max(int(labels.max()) for labels in filled)
    if lowest == NO_CANDIDATE < highest:
        lowest = -1 + min(
            int(labels.min(where=labels != NO_CANDIDATE, initial=highest)) for labels in filled
        )
        arrays = tuple(np.where(labels == NO_CANDIDATE, lowest, labels) for labels in arrays)
    return list(arrays), lowest, highest - lowest + 1
