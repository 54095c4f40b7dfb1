"""Moments: items of one label that were photographed together, found by vectors or capture times.

If the items of a label are independent, the nearest of them, at distances d1 <= d2 <= ... of an
item, spread around it like a Poisson process: in a space of local dimension D, the gaps
k log(d[k + 1] / d[k]) are independent and exponential with mean 1 / D (Levina and Bickel, "Maximum
likelihood estimation of intrinsic dimension", NeurIPS 2004). A burst of k + 1 photographs leaves a
k-th gap that is far larger.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from rcir.embedding import as_numpy
from rcir.errors import InvalidData, printable

FALSE_RATE = 0.01  # largest share of independent items that a test takes for members of a burst
MAX_MATES = 5  # near-copies of an item that are tested for; larger bursts are found in chains
MOMENT_SECONDS = 60  # photographs of one label that follow each other within it are one moment
N_NEIGHBOURS = 2 * (MAX_MATES + 1)  # that are known of each item: bursts of others count once
MAX_ROUNDS = 10  # of the estimate of the mean gap; it settles after two or three
BLOCK_NUMBERS = 2**21  # numbers that are in memory at once, of each kind


def count_mates(
    distances: NDArray[np.floating[Any]],
    n_others: NDArray[np.int64],
    mean_gap: float | None = None,
) -> NDArray[np.int64]:
    """Return the number of near-copies of each item among the others of its label, (n,).

    The nearest k others are near-copies if the k-th gap is larger than in a share
    `FALSE_RATE` / 2^k of independent items, so that about the share `FALSE_RATE` of these at most
    is taken for members of a burst. At most a third of the others (n,), or one, can be near-copies:
    a label does not consist of one burst. `distances` (n, k) to the nearest others are ascending,
    k >= 2, infinite where there are none; exact copies are not others. By default, the median first
    gap states the mean gap of independent items.
    """
    tested = min(MAX_MATES, distances.shape[1] - 1)
    mates = np.arange(1, tested + 1)
    nearest = np.maximum(distances[:, : tested + 1].astype(np.float64), np.finfo(np.float32).tiny)
    exists = np.isfinite(nearest[:, 1:])
    ratios = np.where(exists, nearest[:, 1:], 1) / np.where(exists, nearest[:, :-1], 1)
    gaps = mates * np.log(ratios)
    mean_gap = _mean(gaps[exists[:, 0], 0]) if mean_gap is None else mean_gap
    if not mean_gap > 0:
        return np.zeros(len(distances), np.int64)
    possible = exists & (mates <= np.maximum(1, n_others[:, None] // 3))
    is_wide = possible & (gaps > np.log(2.0**mates / FALSE_RATE) * mean_gap)
    counts: NDArray[np.int64] = (is_wide * mates).max(axis=1, initial=0)
    return counts


def _mean(gaps: NDArray[np.float64]) -> float:
    """Return the mean of exponential gaps by their median, which few large ones hardly change."""
    return float(np.median(gaps) / np.log(2)) if len(gaps) else 0.0


def find_moments(
    vectors: NDArray[np.floating[Any]],
    labels: NDArray[np.int64],
    times: NDArray[np.floating[Any]] | None = None,
    known: NDArray[Any] | None = None,
) -> NDArray[np.int64]:
    """Return the moment of each item, (n,) from 0 on, according to vectors and capture times.

    Two items of a label are of one moment if each is a near-copy of the other (`count_mates`), or
    if no more than `MOMENT_SECONDS` lie between their capture times; and so are chains of such
    items. `times` are seconds, NaN where unknown. Items of a moment in `known`, which was found
    before, stay together.
    """
    n = len(vectors)
    distances, positions, n_others = _nearest_of_label(vectors, labels)

    def link(counts: NDArray[np.int64]) -> Any:
        """Return the links of items that are near-copies of each other."""
        rows = np.repeat(np.arange(n), counts)
        columns = positions[np.arange(N_NEIGHBOURS) < counts[:, None]]
        near = coo_array((np.ones(len(rows), bool), (rows, columns)), shape=(n, n)).tocsr()
        return near.multiply(near.T)

    # The mean gap of independent items is needed to find bursts, and bursts have to be left out of
    # it. At first, every item may be in a burst with the one that is nearest to it.
    links = link(np.isfinite(distances[:, 0]).astype(np.int64))
    before = np.empty(0)
    for _ in range(MAX_ROUNDS):
        components = connected_components(links, directed=False)[1]
        if np.array_equal(components, before):
            break
        before = components
        mean_gap = _mean_gap(distances, positions, components)
        links = link(count_mates(distances, n_others, mean_gap))
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


def as_seconds(times: object, what: str, first: int = 0) -> NDArray[np.float64]:
    """Return capture times (n,) in seconds since 1970, NaN where unknown.

    Values are texts such as "2026-11-26 09:47:00", numbers of seconds, or times of Python, NumPy or
    pandas; None, NaN, NaT, blank texts and dates without a time of day are unknown. Times without a
    zone are taken as they are, since only differences count.
    """
    try:
        values = np.asarray(as_numpy(times))
    except ValueError:
        raise InvalidData(f"{what} has lists of different lengths; it must be (n,)") from None
    if values.ndim != 1:
        raise InvalidData(f"{what} has shape {values.shape}; it must be (n,)")
    if values.dtype.kind == "M":
        seconds = values.astype("datetime64[us]").astype(np.int64) / 1e6
        return np.where(np.isnat(values), np.nan, seconds)
    if values.dtype.kind in "fiu":
        return np.where(np.isfinite(values), values, np.nan).astype(np.float64)
    seconds = np.full(len(values), np.nan)
    for row, value in enumerate(values.tolist()):
        try:
            seconds[row] = _seconds(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidData(
                f"{what} has {printable(str(value))!r} in row {row + first}: use times such as "
                '"2026-11-26 09:47:00", seconds, or blanks; or pass clusters instead of times'
            ) from None
    return seconds


def _seconds(value: Any) -> float:
    if isinstance(value, str):
        text = value.strip()
        if not text or re.fullmatch(r"\d{4}-?\d\d-?\d\d", text):
            return np.nan
        value = float(text) if re.fullmatch(r"-?[\d.]+", text) else datetime.fromisoformat(text)
    if value is None or value != value or type(value) is date:  # NaT differs from itself
        return np.nan
    if isinstance(value, datetime):
        return value.replace(tzinfo=value.tzinfo or UTC).timestamp()
    return float(value)


def _mean_gap(
    distances: NDArray[np.float64], positions: NDArray[np.int64], moments: NDArray[Any]
) -> float:
    """Return the mean first gap of items, each moment, and no item's own one, counted once."""
    moment = np.where(positions < 0, -1, moments[positions])
    is_other = np.isfinite(distances) & (moment != moments[:, None])
    for column in range(1, moment.shape[1]):
        is_other[:, column] &= (moment[:, :column] != moment[:, [column]]).all(axis=1)
    first, second = np.sort(np.where(is_other, distances, np.inf), axis=1)[:, :2].T
    rows = np.isfinite(second)
    return _mean(np.log(second[rows] / first[rows]))


def _nearest_of_label(
    vectors: NDArray[np.floating[Any]], labels: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return distances and positions (n, `N_NEIGHBOURS`) of others of the label, and how many (n,).

    Exact copies are left out. Labels with the same number of items are computed together.
    """
    n, dim = vectors.shape
    distances = np.full((n, N_NEIGHBOURS), np.inf)
    positions = np.full((n, N_NEIGHBOURS), -1)
    order = np.argsort(labels, kind="stable")
    _, first, number, counts = np.unique(
        labels[order], return_index=True, return_inverse=True, return_counts=True
    )
    for count in np.unique(counts[counts > 1]).tolist():
        members = order[first[counts == count][:, None] + np.arange(count)]  # (labels, count)
        n_labels = max(1, BLOCK_NUMBERS // (count * max(count, dim)))
        n_rows = max(1, BLOCK_NUMBERS // max(count, dim))
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
    """Return distances and numbers (labels, r, k) of the points nearest to the points `rows` (r,).

    `points` is (labels, count, d), k <= `N_NEIGHBOURS`; copies of a point are infinitely far away.
    """
    count = points.shape[1]
    centred = points - points.mean(axis=1, keepdims=True)  # the next lines lose fewer digits
    squares = np.square(centred).sum(axis=2)
    apart = squares[:, rows, None] + squares[:, None]
    apart -= 2 * centred[:, rows] @ centred.transpose(0, 2, 1)
    apart[:, np.arange(len(rows)), rows] = np.inf
    n_nearest = min(2 * N_NEIGHBOURS, count - 1)  # more than needed: some may be copies
    nearest = np.argpartition(apart, n_nearest - 1, axis=2)[:, :, :n_nearest]
    exact = np.empty(nearest.shape)
    for column in range(nearest.shape[2]):
        others = np.take_along_axis(points, nearest[:, :, column, None], axis=1)
        exact[:, :, column] = np.linalg.norm(others - points[:, rows], axis=2)
    exact[exact == 0] = np.inf
    columns = np.argsort(exact, axis=2, kind="stable")[:, :, :N_NEIGHBOURS]
    return np.take_along_axis(exact, columns, axis=2), np.take_along_axis(nearest, columns, axis=2)
