"""Moments: items of one label that were photographed together, found by vectors or capture times.

If the items of a label are independent, the nearest of them, at distances d1 <= d2 <= ... of an
item, spread around it like a Poisson process. In a space of local dimension D, the gaps
k log(d[k + 1] / d[k]) are then independent and exponential with mean 1 / D. From such ratios Levina
and Bickel ("Maximum likelihood estimation of intrinsic dimension", NeurIPS 2004) estimate D. A
burst of k + 1 photographs leaves a k-th gap that is far larger.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

FALSE_RATE = 0.01  # largest share of independent items that a test takes for members of a burst
MAX_MATES = 5  # near-copies of an item that are tested for; larger bursts are found in chains
MOMENT_SECONDS = 60  # photographs of one label that follow each other within it are one moment
NEIGHBOURS = MAX_MATES + 1
ROUNDS = 10  # of the estimate of D without the bursts; it settles after two or three
BLOCK = 2**21  # numbers that are in memory at once, of each kind


def count_mates(
    distances: NDArray[np.floating[Any]], n_others: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of near-copies of each item among the others of its label.

    The gaps are exponential whatever the item. Their mean is estimated by the median over the items
    without near-copies: that of the first or of the second gap, whichever is smaller, since bursts
    of one size enlarge only one of both. The nearest k others are near-copies if the k-th gap is
    larger than in a share `FALSE_RATE` / 2^k of independent items, so that at most the share
    `FALSE_RATE` of these, about, is taken for members of a burst.

    Args:
        distances: (n, k) to the nearest others of the label, ascending, k >= 2; infinite where
            there are none. Exact copies do not count as others.
        n_others: (n,) number of others of the label. At most a third of them, or one, can be
            near-copies: a label does not consist of one burst.

    Returns:
        (n,) between 0 and `MAX_MATES`.

    Example:
        >>> others = np.linspace(1, 1.5, 5)
        >>> distances = np.stack([np.r_[nearest, others] for nearest in [0.9] * 19 + [0.01]])
        >>> count_mates(distances, np.full(20, 30)).tolist()[-3:]
        [0, 0, 1]
    """
    tested = min(MAX_MATES, distances.shape[1] - 1)
    mates = np.arange(1, tested + 1)
    nearest = np.maximum(distances[:, : tested + 1].astype(np.float64), np.finfo(np.float32).tiny)
    exists = np.isfinite(nearest[:, 1:])
    ratios = np.where(exists, nearest[:, 1:], 1) / np.where(exists, nearest[:, :-1], 1)
    gaps = mates * np.log(ratios)
    possible = exists & (mates <= np.maximum(1, n_others[:, None] // 3))
    limits = np.log(2.0**mates / FALSE_RATE)  # in units of the mean
    counts = np.zeros(len(distances), np.int64)
    for _ in range(ROUNDS):
        rows = counts == 0
        first_gaps = [gaps[rows & exists[:, k], k] for k in range(min(2, tested))]
        means = [np.median(each) / np.log(2) for each in first_gaps if len(each)]
        if not means or min(means) <= 0:
            break
        is_wide = possible & (gaps > limits * min(means))
        before, counts = counts, (is_wide * mates).max(axis=1, initial=0)
        if np.array_equal(before, counts):
            break
    return counts


def find_moments(
    vectors: NDArray[np.floating[Any]],
    labels: NDArray[np.int64],
    times: NDArray[np.floating[Any]] | None = None,
    known: NDArray[Any] | None = None,
) -> NDArray[np.int64]:
    """Return which items were photographed together, according to vectors and capture times.

    Two items of a label are of one moment if each is a near-copy of the other (`count_mates`), or
    if no more than `MOMENT_SECONDS` lie between their capture times; and so are chains of such
    items.

    Args:
        vectors: (n, d) as they are searched.
        labels: (n,) of the items.
        times: (n,) capture times in seconds, NaN where unknown.
        known: (n,) moments that were found before; items of one of them stay together.

    Returns:
        (n,) the number of each item's moment, from 0 on.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> vectors = rng.normal(size=(100, 16))
        >>> vectors[1] = vectors[0] + 0.01
        >>> moments = find_moments(vectors, np.arange(100) // 50)
        >>> len(np.unique(moments)), bool(moments[0] == moments[1])
        (99, True)
    """
    n = len(vectors)
    distances, positions, n_others = _nearest_of_label(vectors, labels)
    counts = count_mates(distances, n_others)
    rows = np.repeat(np.arange(n), counts)
    columns = positions[np.arange(NEIGHBOURS) < counts[:, None]]
    near = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(n, n)).tocsr()
    links = near.multiply(near.T)  # both have to be a near-copy of the other
    chains = []
    if times is not None:
        order = np.lexsort([times, labels])
        seconds, same = np.diff(times[order]), np.diff(labels[order]) == 0
        chains.append((order, same & (seconds <= MOMENT_SECONDS)))
    if known is not None:
        order = np.argsort(known, kind="stable")
        chains.append((order, known[order][1:] == known[order][:-1]))
    for order, together in chains:
        pairs = order[:-1][together], order[1:][together]
        links = links + coo_array((np.ones(len(pairs[0]), bool), pairs), shape=(n, n)).tocsr()
    moments: NDArray[np.int64] = connected_components(links, directed=False)[1].astype(np.int64)
    return moments


def _nearest_of_label(
    vectors: NDArray[np.floating[Any]], labels: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return distances and positions (n, `NEIGHBOURS`) of others of the label, and how many (n,).

    Exact copies are left out. Labels with equally many items are computed together.
    """
    n, dim = vectors.shape
    distances = np.full((n, NEIGHBOURS), np.inf)
    positions = np.full((n, NEIGHBOURS), -1)
    order = np.argsort(labels, kind="stable")
    _, first, number, counts = np.unique(
        labels[order], return_index=True, return_inverse=True, return_counts=True
    )
    for count in np.unique(counts[counts > 1]).tolist():
        members = order[first[counts == count][:, None] + np.arange(count)]  # (labels, count)
        n_labels = max(1, BLOCK // (count * max(count, dim)))
        n_rows = max(1, BLOCK // max(count, dim))
        for group in np.split(members, range(n_labels, len(members), n_labels)):
            points = vectors[group].astype(np.float64)
            for begin in range(0, count, n_rows):
                rows = slice(begin, begin + n_rows)
                apart, columns = _nearest_points(points, np.arange(count)[rows])
                width = apart.shape[2]
                items = np.take_along_axis(group[:, None], columns, axis=2)
                distances[group[:, rows], :width] = apart
                positions[group[:, rows], :width] = np.where(np.isfinite(apart), items, -1)
    n_others = np.empty(n, np.int64)
    n_others[order] = counts[number] - 1
    return distances, positions, n_others


def _nearest_points(
    points: NDArray[np.float64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return distances and numbers of the points nearest to some points of each label.

    Args:
        points: (labels, count, d).
        rows: (r,) numbers of the points.

    Returns:
        Both (labels, r, k), k <= `NEIGHBOURS`; copies of a point are infinitely far away.
    """
    count = points.shape[1]
    centred = points - points.mean(axis=1, keepdims=True)  # the next lines lose fewer digits
    squares = np.square(centred).sum(axis=2)
    apart = squares[:, rows, None] + squares[:, None]
    apart -= 2 * centred[:, rows] @ centred.transpose(0, 2, 1)
    apart[:, np.arange(len(rows)), rows] = np.inf
    n_nearest = min(2 * NEIGHBOURS, count - 1)  # more than needed, because some may be copies
    nearest = np.argpartition(apart, n_nearest - 1, axis=2)[:, :, :n_nearest]
    exact = np.empty(nearest.shape)
    for column in range(nearest.shape[2]):
        others = np.take_along_axis(points, nearest[:, :, column, None], axis=1)
        exact[:, :, column] = np.linalg.norm(others - points[:, rows], axis=2)
    exact[exact == 0] = np.inf
    columns = np.argsort(exact, axis=2, kind="stable")[:, :, :NEIGHBOURS]
    return np.take_along_axis(exact, columns, axis=2), np.take_along_axis(nearest, columns, axis=2)
