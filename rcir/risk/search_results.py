"""Search results: queries, what is known of them, and their ranked candidates."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.checks import Floats
from rcir.risk.keys import VOTERS, count_votes, earlier_of_same_key, first_of_each_key, take_columns


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
        once: whether no two candidates of a query have the same key, see `distinct`.

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
    once: bool = False

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
            columns: the first of `key_columns`, all of them unless given.

        Raises:
            InvalidData: the candidates have no keys.
        """
        columns = self.key_columns if columns is None else columns
        taken = self._taken(columns, set(self.FILLERS))
        if self.distances is None:
            taken["distances"] = np.where(columns < 0, np.inf, 0.0)
        if self.votes is None:
            taken["votes"] = take_columns(self.key_votes, columns, 0)
        return replace(self, depth=columns.shape[1], once=True, **taken)

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

    @cached_property
    def key_columns(self) -> NDArray[np.int64]:
        """(n, depth) the columns of the nearest candidate of each key, in order, then -1.

        Raises:
            InvalidData: the candidates have no keys.
        """
        if self.once:
            return np.where(self._keys >= 0, np.arange(self.depth), -1)
        return first_of_each_key(self._keys)

    @cached_property
    def earlier(self) -> NDArray[np.int64]:
        """(n, depth) how many candidates before it share a candidate's key."""
        return earlier_of_same_key(self._keys)

    @cached_property
    def key_votes(self) -> NDArray[np.int64]:
        """(n, depth) how many of the first 30 candidates share a candidate's key."""
        return count_votes(self._keys)

    @property
    def _keys(self) -> NDArray[np.int64]:
        if self.keys is None:
            raise InvalidData("the candidates have no keys: label the gallery to rank its labels")
        return self.keys

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
