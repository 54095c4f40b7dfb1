"""Which candidates of a query share a key: show the same class, place or product."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

VOTERS = 30
DENSE = 8  # numbers that keys may span for each column, to be looked up in a table


def earlier_of_same_key(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n, depth) how many candidates before it share a candidate's key.

    Example:
        >>> earlier_of_same_key(np.array([[7, 4, 7, 7]])).tolist()
        [[0, 0, 1, 2]]
    """
    depth = keys.shape[1]
    bits = depth.bit_length()
    lowest, span = _span(keys)
    if span.bit_length() + bits > 63:
        keys, lowest = np.unique(keys, return_inverse=True)[1].reshape(keys.shape), 0
    # Each key with its column behind it, as one number: far faster to sort than their order is.
    places = np.arange(depth)
    ordered = np.sort((keys - lowest) << bits | places, axis=1)
    columns = ordered & (1 << bits) - 1
    ordered >>= bits
    starts = np.ones(keys.shape, bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    counts = np.empty(keys.size, np.int64)
    counts[cells(columns, depth)] = places - first
    return counts.reshape(keys.shape)


def first_of_each_key(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n, depth) the columns of the nearest candidate of each key, in order, then -1.

    Example:
        >>> first_of_each_key(np.array([[7, 4, 7, 2]])).tolist()
        [[0, 1, 3, -1]]
    """
    depth = keys.shape[1]
    small = np.min_scalar_type(depth)  # sorted several times as fast
    first = _is_first(keys) & (keys >= 0)
    columns = np.sort(np.where(first, np.arange(depth, dtype=small), small.type(depth)), axis=1)
    return np.where(columns < depth, columns.astype(np.int64), -1)


def _is_first(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(n, depth) whether no candidate before it has a candidate's key."""
    lowest, span = _span(keys)
    if span > DENSE * keys.shape[1]:
        return np.asarray(earlier_of_same_key(keys) == 0)
    # Where each key stands, written from the last candidate to the first: the first one stays.
    # Of one dimension and contiguous, for else numpy may write in another order.
    numbers = cells(keys - lowest, span).ravel()
    places = np.arange(numbers.size)
    table = np.empty(span * len(keys), np.int64)
    table[np.ascontiguousarray(numbers[::-1])] = np.ascontiguousarray(places[::-1])
    return np.asarray((table[numbers] == places).reshape(keys.shape))


def count_votes(keys: NDArray[np.int64], columns: int | None = None) -> NDArray[np.int64]:
    """(n, columns) how many of the first 30 candidates share a candidate's key.

    Example:
        >>> count_votes(np.array([[7, 4, 7, 2]]), columns=3).tolist()
        [[2, 1, 2]]
    """
    lowest, span = _span(keys)
    shifted = keys - lowest
    shown, voting = shifted[:, :columns], shifted[:, :VOTERS]
    if span <= DENSE * max(1, shown.shape[1]):
        counts = np.bincount(cells(voting, span).ravel(), minlength=span * len(keys))
        return counts.take(cells(shown, span))
    small = shown.astype(np.min_scalar_type(span - 1))  # compared several times as fast
    votes = np.zeros(shown.shape, np.uint8)
    for voter in voting.T:
        votes += small == voter.astype(small.dtype)[:, None]
    return votes.astype(np.int64)


def take_columns(
    values: NDArray[Any], columns: NDArray[np.int64], filler: float | bool
) -> NDArray[Any]:
    """(n, k) of `values` (n, depth) at `columns` (n, k) of each row, `filler` where that is -1."""
    taken = values.take(cells(columns, values.shape[1]))
    taken[columns < 0] = filler
    return taken


def cells(columns: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Positions in an array (n, width), laid out row by row, of (n, k) columns of its rows.

    Example:
        >>> cells(np.array([[2, 0], [1, 1]]), 3).tolist()
        [[2, 0], [4, 4]]
    """
    return columns + width * np.arange(len(columns))[:, None]


def _span(keys: NDArray[np.int64]) -> tuple[int, int]:
    """The lowest key, and how many numbers there are from it to the highest."""
    if not keys.size:
        return 0, 1
    lowest = int(keys.min())
    return lowest, int(keys.max()) - lowest + 1
