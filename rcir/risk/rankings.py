"""What is known of queries when their sets are sized: uncertainties and ranked candidates."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData

Floats = NDArray[np.floating[Any]]
VOTERS = 30


@dataclass(frozen=True)
class Rankings:
    """n queries with their candidates, nearest first; what is not known is None.

    Attributes:
        uncertainty: (n,) of the queries, larger is less certain. For an encoder without one, one
            minus the cosine to the first candidate will do.
        depth: number of candidates that were searched; no set is larger.
        distances: (n, depth) ascending, infinite where there were no more candidates.
        keys: (n, depth) integers; candidates with the same key show the same class, place or
            product; -1 where there were no more.
        candidate_uncertainty: (n, depth) of the candidates.
        votes: (n, depth) how many of the first 30 candidates share a candidate's key.
        probability: (n, depth) of a candidate to be a true match, as learned by a score function
            that put the candidates into its own order.

    Raises:
        InvalidData: shapes differ, an uncertainty is NaN or infinite, or a query has no candidate.

    Example:
        >>> rankings = Rankings(np.array([0.1, 0.7]), depth=50)
        >>> len(rankings), len(rankings[:1])
        (2, 1)
    """

    uncertainty: NDArray[np.float64]
    depth: int
    distances: Floats | None = None
    keys: NDArray[np.int64] | None = None
    candidate_uncertainty: Floats | None = None
    votes: NDArray[np.int64] | None = None
    probability: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.uncertainty, np.ndarray):
            raise InvalidData(f"uncertainty is a {type(self.uncertainty).__name__}: give an array")
        if self.uncertainty.ndim != 1 or self.depth < 1:
            raise InvalidData(
                f"uncertainty has shape {self.uncertainty.shape} and depth is {self.depth}; needed "
                "are (n,) and at least 1"
            )
        bad = ~np.isfinite(self.uncertainty)
        if bad.any():
            raise InvalidData(
                f"{int(bad.sum())} of {bad.size} uncertainties are NaN or infinite; an encoder "
                "that diverged in training does this"
            )
        for name in ("distances", "candidate_uncertainty"):
            values = getattr(self, name)
            if values is not None and np.isnan(values).any():
                raise InvalidData(f"some {name} are NaN")
        shape = (len(self.uncertainty), self.depth)
        for name in ("distances", "keys", "candidate_uncertainty", "votes", "probability"):
            values = getattr(self, name)
            if values is not None and values.shape != shape:
                raise InvalidData(f"{name} has shape {values.shape}; needed is (n, depth) {shape}")

        if self.distances is not None and np.isposinf(self.distances[:, 0]).any():
            raise InvalidData("some queries have no candidate: search a gallery that holds one")

    def __len__(self) -> int:
        return len(self.uncertainty)

    def __getitem__(self, rows: slice | NDArray[Any]) -> Rankings:
        """The rankings of some queries."""
        arrays = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        return replace(self, **arrays)

    @property
    def there(self) -> NDArray[np.bool_]:
        """(n, depth) where there is a candidate."""
        if self.distances is not None:
            return ~np.isposinf(self.distances)
        if self.keys is not None:
            return np.asarray(self.keys >= 0)
        return np.ones((len(self), self.depth), bool)

    def distinct(self, least: int | None = None) -> tuple[Rankings, NDArray[np.int64]]:
        """The rankings of keys: each key stands where its nearest candidate does.

        Args:
            least: leave out ranks beyond this one that no query has a key at; none unless given.

        Returns:
            The rankings, and the (n, depth) columns that they took, -1 where there were no more.

        Raises:
            InvalidData: the candidates have no keys.
        """
        if self.keys is None:
            raise InvalidData("the candidates have no keys: label the gallery to rank its labels")
        columns = first_of_each_key(self.keys)
        if least is not None:
            deepest = int((columns >= 0).sum(axis=1).max(initial=0))
            columns = columns[:, : max(least, deepest)]

        def take(values: NDArray[Any] | None, filler: float) -> NDArray[Any] | None:
            return None if values is None else take_columns(values, columns, filler)

        distances = np.zeros(self.keys.shape) if self.distances is None else self.distances
        keys = take_columns(self.keys, columns, -1)
        votes = take(self.votes, 0)
        if votes is None:
            votes = count_votes(self.keys, of=keys)
            votes[columns < 0] = 0
        rankings = Rankings(
            self.uncertainty,
            columns.shape[1],
            take(distances, np.inf),
            keys,
            take(self.candidate_uncertainty, 0.0),
            votes,
        )
        return rankings, columns

    def reordered(self, columns: NDArray[np.int64], probability: NDArray[np.float64]) -> Rankings:
        """The same candidates in another order, without what a probability is learned from.

        Args:
            columns: (n, depth) those that they stood in.
            probability: of the candidates in the new order.
        """

        def take(values: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if values is None else np.take_along_axis(values, columns, axis=1)

        distances, keys = take(self.distances), take(self.keys)
        return Rankings(self.uncertainty, self.depth, distances, keys, probability=probability)


def take_columns(
    values: NDArray[Any], columns: NDArray[np.int64], filler: float | bool
) -> NDArray[Any]:
    """(n, depth) `values` at `columns` of each row, `filler` where the column is -1."""
    taken = np.take_along_axis(values, np.maximum(columns, 0), axis=1)
    taken[columns < 0] = filler
    return taken


def earlier_of_same_key(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n, depth) how many candidates before it share a candidate's key.

    Example:
        >>> earlier_of_same_key(np.array([[7, 4, 7, 7]])).tolist()
        [[0, 0, 1, 2]]
    """
    # Small integers are sorted by their digits, four times as fast.
    small = keys.size > 0 and keys.min() >= -(2**15) and keys.max() < 2**15
    order = np.argsort(keys.astype(np.int16) if small else keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=1)
    starts = np.ones(keys.shape, bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    places = np.arange(keys.shape[1])
    first = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    counts = np.empty_like(keys)
    np.put_along_axis(counts, order, places - first, axis=1)
    return counts


def first_of_each_key(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n, depth) the columns of the nearest candidate of each key, in order, then -1.

    Example:
        >>> first_of_each_key(np.array([[7, 4, 7, 2]])).tolist()
        [[0, 1, 3, -1]]
    """
    first = (earlier_of_same_key(keys) == 0) & (keys >= 0)
    columns = np.argsort(~first, axis=1, kind="stable")
    columns[np.arange(keys.shape[1]) >= first.sum(axis=1, keepdims=True)] = -1
    return columns


def count_votes(
    keys: NDArray[np.int64], columns: int | None = None, of: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """(n, columns) how many of the first 30 candidates share a candidate's key, or those `of` keys.

    Example:
        >>> count_votes(np.array([[7, 4, 7, 2]]), columns=3).tolist()
        [[2, 1, 2]]
        >>> count_votes(np.array([[7, 4, 7, 2]]), of=np.array([[2, 7]])).tolist()
        [[1, 2]]
    """
    shown = keys[:, :columns] if of is None else of
    votes = np.zeros(shown.shape, np.int64)
    for voter in range(min(VOTERS, keys.shape[1])):
        votes += shown == keys[:, voter, None]
    return votes
