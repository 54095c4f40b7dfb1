"""Search results: queries, what is known of them, and their ranked candidates."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.checks import Floats

VOTERS = 30
DENSE = 8  # numbers that keys may span for each column, to be looked up in a table


@dataclass(frozen=True)
class SearchResults:
    """n queries with their candidates, nearest first; what is not known is None.

    Attributes:
        uncertainty: (n,) of the queries, larger is less certain. For an encoder without one, one
            minus the cosine to the first candidate will do.
        depth: number of candidates that were searched; no set is larger.
        distances: (n, depth) ascending, infinite where there were no more candidates.
        keys: (n, depth) integers; candidates with the same key show the same class, place or
            product; -1 where there were no more.
        candidate_uncertainty: (n, depth) of the candidates.
        votes: (n, depth) how many of the first 30 candidates match a candidate, itself among them;
            where there are keys, they are counted from these unless given.
        probability: (n, depth) of a candidate to be a true match, as learned by a score function
            that put the candidates into its own order.
        positions: (n, depth) positions in the gallery; -1 where there were no more.
        vectors: (n, d) embeddings of the queries.
        queries: the n queries as they were searched; some of them are taken by rows.
        fingerprints: of the retriever that searched.

    Raises:
        InvalidData: shapes differ, an uncertainty is NaN or infinite, or a query has no candidate.

    Example:
        >>> results = SearchResults(np.array([0.1, 0.7]), depth=50)
        >>> len(results), len(results[:1])
        (2, 1)
    """

    uncertainty: NDArray[np.float64]
    depth: int
    distances: Floats | None = None
    keys: NDArray[np.int64] | None = None
    candidate_uncertainty: Floats | None = None
    votes: NDArray[np.int64] | None = None
    probability: NDArray[np.float64] | None = None
    positions: NDArray[np.int64] | None = None
    vectors: NDArray[np.float32] | None = None
    queries: Any = None
    fingerprints: Mapping[str, str] | None = None

    # What stands where there is no candidate, for each array (n, depth).
    FILLERS: ClassVar[Mapping[str, float]] = {
        "distances": np.inf,
        "keys": -1,
        "candidate_uncertainty": 0.0,
        "votes": 0,
        "probability": 0.0,
        "positions": -1,
    }

    def __post_init__(self) -> None:
        self._require_arrays("uncertainty", *self.FILLERS, "vectors")
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
        for name, values, _ in self._per_candidate():
            if values.shape != shape:
                raise InvalidData(f"{name} has shape {values.shape}; needed is (n, depth) {shape}")
        for name in ("vectors", "queries"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self):
                raise InvalidData(f"{len(self)} queries, {name} of {len(values)}: give each one")
        if self.distances is not None and np.isposinf(self.distances[:, 0]).any():
            raise InvalidData("some queries have no candidate: search a gallery that holds one")

    def __len__(self) -> int:
        return len(self.uncertainty)

    def __getitem__(self, rows: slice | NDArray[Any]) -> Self:
        """The results of some queries."""
        some: dict[str, Any] = {
            each.name: getattr(self, each.name)[rows]
            for each in fields(self)
            if isinstance(getattr(self, each.name), np.ndarray)
        }
        if self.queries is not None:
            some["queries"] = self.queries[rows]
        return replace(self, **some)

    def known(self, name: str) -> Any:
        """An attribute, such as "positions", of which `InvalidData` says if it is not known."""
        value = getattr(self, name)
        if value is None:
            raise InvalidData(f"{name} of the search results is not known: search, or score, them")
        return value

    @property
    def there(self) -> NDArray[np.bool_]:
        """(n, depth) where there is a candidate."""
        if self.distances is not None:
            return ~np.isposinf(self.distances)
        if self.keys is not None:
            return np.asarray(self.keys >= 0)
        return np.ones((len(self), self.depth), bool)

    def distinct(self, columns: NDArray[np.int64] | None = None) -> Self:
        """The results of keys: each key stands where its nearest candidate does.

        Args:
            columns: see `key_columns`, whose result it is unless given.

        Raises:
            InvalidData: the candidates have no keys.
        """
        columns = self.key_columns() if columns is None else columns
        taken = self._taken(columns, set(self.FILLERS))
        if self.distances is None:
            taken["distances"] = np.where(columns < 0, np.inf, 0.0)
        if self.votes is None and self.keys is not None:
            taken["votes"] = count_votes(self.keys, of=taken["keys"])
            taken["votes"][columns < 0] = 0
        return replace(self, depth=columns.shape[1], **taken)

    def vote_uncertainty(self) -> NDArray[np.float64]:
        """(n,) one minus the share of the first 30 candidates that match the first one.

        Raises:
            InvalidData: it is not known which candidates match each other.
        """
        voters = min(VOTERS, self.depth)
        if self.keys is not None:
            votes = count_votes(self.keys, columns=1)[:, 0]
        else:
            votes = self.known("votes")[:, 0]
        share: NDArray[np.float64] = votes / voters
        return 1 - share

    def key_columns(self, least: int | None = None) -> NDArray[np.int64]:
        """(n, k) the columns of the nearest candidate of each key, in order, then -1.

        Args:
            least: leave out ranks beyond this one that no query has a key at; none unless given.

        Raises:
            InvalidData: the candidates have no keys.
        """
        if self.keys is None:
            raise InvalidData("the candidates have no keys: label the gallery to rank its labels")
        return first_of_each_key(self.keys, least)

    def reordered(self, columns: NDArray[np.int64], probability: NDArray[np.float64]) -> Self:
        """The same candidates in another order, without what a probability is learned from.

        Args:
            columns: (n, k) those that they stood in, k up to the depth, which then is k.
            probability: (n, k) of the candidates in the new order.
        """
        new: dict[str, Any] = {
            "candidate_uncertainty": None,
            "votes": None,
            "probability": probability,
            "depth": columns.shape[1],
        }
        return replace(self, **self._taken(columns, set(self.FILLERS) - set(new)), **new)

    def _taken(self, columns: NDArray[np.int64], names: Set[str]) -> dict[str, Any]:
        """The arrays of the candidates at (n, depth) columns, -1 for none."""
        return {
            name: take_columns(values, columns, filler)
            for name, values, filler in self._per_candidate()
            if name in names
        }

    def _require_arrays(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not isinstance(value, np.ndarray):
                raise InvalidData(f"{name} is a {type(value).__name__}: give an array")

    def _per_candidate(self) -> list[tuple[str, NDArray[Any], float]]:
        """Name, values and filler of each (n, depth) array there is."""
        return [
            (name, getattr(self, name), filler)
            for name, filler in self.FILLERS.items()
            if getattr(self, name) is not None
        ]


def take_columns(
    values: NDArray[Any], columns: NDArray[np.int64], filler: float | bool
) -> NDArray[Any]:
    """(n, depth) `values` at `columns` of each row, `filler` where the column is -1."""
    missing = columns < 0
    if not missing.any():
        return np.take_along_axis(values, columns, axis=1)
    taken = np.take_along_axis(values, np.where(missing, 0, columns), axis=1)
    taken[missing] = filler
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


def first_of_each_key(keys: NDArray[np.int64], least: int | None = None) -> NDArray[np.int64]:
    """(n, depth) the columns of the nearest candidate of each key, in order, then -1.

    Args:
        least: see `SearchResults.key_columns`.

    Example:
        >>> first_of_each_key(np.array([[7, 4, 7, 2]])).tolist()
        [[0, 1, 3, -1]]
    """
    first = _is_first(keys)
    if keys.size and keys.min() < 0:
        first &= keys >= 0
    counts = np.count_nonzero(first, axis=1)
    width = keys.shape[1]
    if least is not None:
        width = min(width, max(least, int(counts.max(initial=0))))
    rows, found = np.nonzero(first)
    columns = np.full((len(keys), width), -1, np.int64)
    columns[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = found
    return columns


def _is_first(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(n, depth) whether no candidate before it has a candidate's key."""
    lowest, span = _span(keys)
    if span > DENSE * keys.shape[1]:
        return np.asarray(earlier_of_same_key(keys) == 0)
    # Where each key stands, written from the last candidate to the first: the first one stays.
    # Of one dimension and contiguous, for else numpy may write in another order.
    cells = (keys - lowest + span * np.arange(len(keys))[:, None]).ravel()
    places = np.arange(cells.size)
    table = np.empty(span * len(keys), np.int64)
    table[np.ascontiguousarray(cells[::-1])] = np.ascontiguousarray(places[::-1])
    return np.asarray((table[cells] == places).reshape(keys.shape))


def _span(*keys: NDArray[np.int64]) -> tuple[int, int]:
    """The lowest of all keys, and how many numbers there are from it to the highest."""
    lowest = min((int(each.min()) for each in keys if each.size), default=0)
    return lowest, max((int(each.max()) for each in keys if each.size), default=0) - lowest + 1


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
    voting = keys[:, :VOTERS]
    lowest, span = _span(shown, voting)
    if span <= DENSE * max(1, shown.shape[1]):
        cells = voting - lowest + span * np.arange(len(keys))[:, None]
        counts = np.bincount(cells.ravel(), minlength=span * len(keys))
        return np.take_along_axis(counts.reshape(-1, span), shown - lowest, axis=1)
    votes = np.zeros(shown.shape, np.int64)
    for voter in range(min(VOTERS, keys.shape[1])):
        votes += shown == keys[:, voter, None]
    return votes
