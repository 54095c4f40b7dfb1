"""Votes: how many of the first candidates of a query match each of its candidates."""

from __future__ import annotations

from functools import singledispatch

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from rcir.data.relevance import SharedLabel
from rcir.data.relevance_protocol import Relevance, Rows

PAIRS_TOGETHER = 2**16  # of candidates that are looked at together, to bound the memory


@singledispatch
def count_matches(gallery: Relevance, positions: Rows, among: int) -> NDArray[np.int64]:
    """How many of the first candidates of a query match each of its candidates.

    Args:
        gallery: of the images that were searched.
        positions: (n, k) positions of the candidates in the gallery; -1 for none.
        among: number of first candidates that are counted, a candidate itself among them.

    Returns:
        (n, k), 0 for none.

    Example:
        >>> from rcir.data.within_radius import WithinRadius
        >>> gallery = WithinRadius(np.array([[0.0], [3.0], [4.0], [9.0]]), 2.0)
        >>> count_matches(gallery, np.array([[0, 2, 1, 3, -1]]), among=3).tolist()
        [[1, 2, 2, 0, 0]]
    """
    counts = np.zeros(positions.shape, np.int64)
    for some in _blocks(positions, among):
        part = positions[some]
        voters = np.repeat(part[:, :among], part.shape[1], axis=0)
        matches = gallery.subset(part.reshape(-1)).of(gallery, voters).sum(axis=1)
        counts[some] = np.where(part >= 0, matches.reshape(part.shape), 0)
    return counts


@count_matches.register
def _(gallery: SharedLabel, positions: Rows, among: int) -> NDArray[np.int64]:
    """By one sparse product a block, thirty times as fast as pair by pair."""
    counts = np.zeros(positions.shape, np.int64)
    for some in _blocks(positions, among):
        part = positions[some]
        shared = _labels_by_query(gallery, part) @ _labels_by_query(gallery, part[:, :among]).T
        counts[some] = np.diff(shared.tocsr().indptr).reshape(part.shape)
    return counts


def _labels_by_query(gallery: SharedLabel, positions: Rows) -> csr_array:
    """The labels of each candidate, in columns that no two queries share; none of position -1."""
    n, k = positions.shape
    labels = gallery.labels[positions.reshape(-1)]
    owners = np.repeat(np.arange(n * k), np.diff(labels.indptr))
    there = positions.reshape(-1)[owners] >= 0
    owners = owners[there]
    columns = labels.indices[there] + owners // k * labels.shape[1]
    entries = np.ones(len(owners), np.int32)
    return csr_array((entries, (owners, columns)), shape=(n * k, n * labels.shape[1]))


def _blocks(positions: Rows, among: int) -> list[slice]:
    """Slices of the queries that have about `PAIRS_TOGETHER` pairs each."""
    n, k = positions.shape
    rows = max(1, PAIRS_TOGETHER // max(1, k * min(among, k)))
    return [slice(start, start + rows) for start in range(0, n, rows)]
