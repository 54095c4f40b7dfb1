"""Answers: from prepared queries and a guarantee to the sets that they get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.printable import printable
from rcir.retrieval.calibration import Calibration
from rcir.retrieval.queries import Queries
from rcir.retrieval.search import Searcher
from rcir.risk import Guarantee, SearchResults
from rcir.risk.request import Distinct
from rcir.risk.results import set_sizes
from rcir.risk.score_functions import Ranking

QUERY_BATCH_SIZE = 512  # larger batches need more memory, smaller ones more time per query


@dataclass(frozen=True, eq=False, slots=True)
class Retrieval:
    """The answer to one query: gallery items, the likeliest first, as many as the guarantee needs.

    Attributes:
        ids: names of the items.
        distances: (size,) L2 distances in embedding space; ascending, unless the score function
            reorders candidates ("reranked", "match-probability").
        uncertainty: of the query; larger is less certain; comparable within one retriever only.
        guarantee: what is guaranteed of this set.
        labels: of the items, if the gallery has labels: names if its data set has them, else
            numbers.
    """

    ids: tuple[str, ...]
    distances: NDArray[np.float32]
    uncertainty: float
    guarantee: Guarantee
    labels: tuple[int, ...] | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        others = (len(self.distances), len(self.ids if self.labels is None else self.labels))
        if others != (len(self.ids),) * 2:
            raise ValueError(f"{len(self.ids)} ids, but distances and labels number {others}")

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self.ids)

    @property
    def abstained(self) -> bool:
        """True if no answer was given because the query is too uncertain."""
        return self.size == 0

    def __str__(self) -> str:
        if self.abstained:
            head = f"no answer: too uncertain, uncertainty {self.uncertainty:.4g}"
            return f"{head}\n{self.guarantee}"
        head = f"{self.size} image{'s' * (self.size > 1)}, uncertainty {self.uncertainty:.4g}"
        names = ["id", *map(printable, self.ids)]
        labels = self.labels or ()
        if any(isinstance(label, str) for label in labels):  # numbers would tell a reader nothing
            width = max(map(len, names))
            columns = zip(names, ("label", *map(printable, labels)), strict=True)
            names = [f"{name:{width}}  {label}" for name, label in columns]
        rows = (
            f"{rank:4d}  {distance:8.4f}  {name}"
            for rank, (name, distance) in enumerate(zip(names[1:], self.distances, strict=True), 1)
        )
        return "\n".join([head, f"rank  distance  {names[0]}", *rows, str(self.guarantee)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return self.own_values() | {"guarantee": self.guarantee.to_dict()}

    def own_values(self) -> dict[str, Any]:
        """Return plain values without the guarantee, which answers share."""
        return {
            "ids": list(self.ids),
            "labels": None if self.labels is None else list(self.labels),
            "distances": [round(float(distance), 6) for distance in self.distances],
            "size": self.size,
            "abstained": self.abstained,
            "uncertainty": self.uncertainty,
        }


@dataclass(frozen=True, eq=False)
class AtLevels:
    """The sets of one query at several alphas: each contains those of all larger alphas.

    Attributes:
        alphas: the levels that are certified, ascending.
        sizes: (m,) size of the set at each; it holds the first items of `largest`.
        largest: the answer at the smallest alpha.
        guarantees: what is guaranteed of the set at each alpha.
    """

    alphas: tuple[float, ...]
    sizes: NDArray[np.int64]
    largest: Retrieval
    guarantees: tuple[Guarantee, ...]


def answer(
    searcher: Searcher, calibration: Calibration, queries: Queries, guarantee: Guarantee
) -> list[Retrieval]:
    """Answer queries with sets that satisfy a guarantee, in batches.

    Args:
        searcher: finds the candidates.
        calibration: of this searcher, which certified the guarantee.
        queries: n prepared queries.
        guarantee: what is guaranteed of the sets.
    """
    rule = calibration.rule_for(guarantee.request)
    answers: list[Retrieval] = []
    for results in _search(searcher, calibration, queries, guarantee.request.distinct):
        answers += _retrievals(searcher, results, *rule.sets(results, guarantee), guarantee)
    return answers


def answer_at_levels(
    searcher: Searcher, calibration: Calibration, queries: Queries, guarantees: list[Guarantee]
) -> list[AtLevels]:
    """Answer queries at several levels from one search, in batches.

    Args:
        searcher, calibration, queries: as for `answer`.
        guarantees: with ascending alphas, all for the same kind of sets.
    """
    strictest, alphas = guarantees[0], tuple(each.alpha for each in guarantees)
    rule = calibration.rule_for(strictest.request)
    answers: list[AtLevels] = []
    for results in _search(searcher, calibration, queries, strictest.request.distinct):
        ranking, largest = rule.sets(results, strictest)
        sizes = np.stack([set_sizes(ranking.scores, one.threshold) for one in guarantees], axis=1)
        sets = _retrievals(searcher, results, ranking, largest, strictest)
        for by_level, largest_set in zip(sizes, sets, strict=True):
            answers.append(AtLevels(alphas, by_level, largest_set, tuple(guarantees)))
    return answers


def _search(
    searcher: Searcher, calibration: Calibration, queries: Queries, distinct: Distinct
) -> Iterator[SearchResults]:
    """Yield the search results of queries, batch by batch."""
    for start in range(0, len(queries), QUERY_BATCH_SIZE):
        candidates = searcher.candidates(queries[start : start + QUERY_BATCH_SIZE])
        results = searcher.judged(candidates, calibration.uncertainty)
        yield results if distinct is None else results.first_of_each_label()


def _retrievals(
    searcher: Searcher,
    results: SearchResults,
    ranking: Ranking,
    sizes: NDArray[np.int64],
    guarantee: Guarantee,
) -> list[Retrieval]:
    # One look-up for all items; each answer is a slice of it.
    row = np.repeat(np.arange(len(sizes)), sizes)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    column = rank if ranking.columns is None else ranking.columns[row, rank]
    positions = results.require("positions")[row, column]
    distances = results.require("distances")[row, column]
    ids = searcher.ids[positions].tolist()
    labels = searcher.named_labels(positions)
    retrievals, start = [], 0
    for size, uncertainty in zip(sizes.tolist(), results.uncertainty.tolist(), strict=True):
        part = slice(start, start := start + size)
        retrievals.append(
            Retrieval(
                tuple(ids[part]),
                distances[part],
                uncertainty,
                guarantee,
                None if labels is None else labels[part],
            )
        )
    return retrievals
