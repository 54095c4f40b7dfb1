"""Answers: from queries and a request to the sets that they get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from rcir.embedding import Embedding, as_vectors
from rcir.errors import InvalidConfig, StaleCalibration, printable
from rcir.imports import naming_extras
from rcir.notebook import MAX_TILES, as_html
from rcir.retrieval.calibration import Calibration
from rcir.retrieval.label_ranking import nearest_of_labels
from rcir.retrieval.pictures import thumbnails
from rcir.retrieval.queries import Queries, require_alike
from rcir.retrieval.query_uncertainty import Results, with_uncertainty
from rcir.retrieval.search import Searcher
from rcir.risk import Guarantee, Request, SearchResults
from rcir.risk.probability import cells_of, sizes_of
from rcir.risk.score_functions import Ranking
from rcir.terminal import working

if TYPE_CHECKING:
    from pandas import DataFrame

UNLIKE = 0.05  # p-values up to it are stated in words

# Larger batches need more memory, smaller ones more time per query.
QUERY_BATCH_SIZE = 512  # queries that are ranked together
MAX_SEARCH_BATCH_SIZE = 8192  # queries that are searched together
# FAISS multiplies matrices, which is several times as fast, for 128,000 numbers in queries or more.
SEARCH_BATCH_NUMBERS = 1 << 17


@dataclass(frozen=True, eq=False, slots=True)
class Retrieval:
    """The answer to one query: gallery items, the likeliest first, as many as the guarantee needs.

    Attributes:
        ids: names of the items.
        distances: (size,) L2 distances in embedding space; ascending, unless the score function
            reorders candidates ("label-model", "label-lists", "learned", "match-probability").
        probabilities: (size,) estimated probability of each item to be a true match, on average
            over queries like those that calibrated; nothing is guaranteed of it, see
            `rcir.risk.probability`.
        match_probability: the same of the set, to hold a true match; None if it is empty.
        uncertainty: of the query; larger is less certain; comparable within one retriever only.
        unlike: p-value, small for a query unlike those that calibrated and have a match: the odds
            of its match are as low, or its nearest item is as far, for this share of them. It
            sizes no set; leaving queries out by it voids the guarantee.
        nearness: to the gallery: the odds of a match if calibration queries without one let them be
            estimated, else minus the distance of the nearest item.
        guarantee: what is guaranteed of this set.
        labels: of the items, if the gallery has labels: names if its data set has them, else
            numbers.
        label_calibrated: True if the label of the likeliest item is that of some calibration query;
            None if items have no single label, or the set is empty. If it is False, the guarantee
            for queries of the calibrated labels may not cover this query. True does not mean that
            it does: a query of an unknown label has a likeliest item, too.
        outside: the candidates that a larger set would hold next, as plain values, if requested.
        origin: of the retriever that answered; notebooks find the pictures of the items by it.
    """

    ids: tuple[str, ...]
    distances: NDArray[np.float32]
    probabilities: NDArray[np.float64]
    match_probability: float | None
    uncertainty: float
    unlike: float
    nearness: float
    guarantee: Guarantee
    labels: tuple[int, ...] | tuple[str, ...] | None = None
    label_calibrated: bool | None = None
    outside: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        labels = self.ids if self.labels is None else self.labels
        others = {len(values) for values in (self.distances, self.probabilities, labels)}
        if others != {len(self.ids)}:
            raise ValueError(f"{len(self.ids)} ids, but other values of items number {others}")

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self.ids)

    @property
    def abstained(self) -> bool:
        """True if no answer was given: the query is too uncertain, or seems to have no match."""
        return self.size == 0

    def __str__(self) -> str:
        return f"{self.table()}\n{self.guarantee}"

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.ids[:3])) + ", ..." * (self.size > 3)
        return f"Retrieval({self._summary()}{': ' * (not self.abstained)}{names})"

    def _repr_html_(self) -> str:
        ids = self.ids[:MAX_TILES]
        labels, likely = self.labels or (None,) * self.size, self.probabilities
        columns = zip(ids, labels, likely, thumbnails(self.origin, ids), strict=False)
        tiles = [
            {"id": name, "label": label, "likely": _rounded(p), "share": p, "picture": picture}
            for name, label, p, picture in columns
        ]
        return as_html(self._summary(), tiles=tiles, n_items=self.size, notes=[str(self.guarantee)])

    def to_frame(self) -> DataFrame:
        """Return the items as a pandas frame, with their rank as index.

        One frame of several answers, in which the query is a level of the index:
        `pd.concat([answer.to_frame() for answer in answers], keys=range(len(answers)))`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        with naming_extras():
            from pandas import DataFrame, RangeIndex
        values = {"id": self.ids, "label": self.labels, "distance": self.distances}
        ranks = RangeIndex(1, self.size + 1, name="rank")
        return DataFrame(values | {"probability": self.probabilities}, index=ranks)

    def table(self) -> str:
        """Return the items as text, without the guarantee, which answers share."""
        head = self._summary()
        if self.abstained:
            return head
        names = ["id", *map(printable, self.ids)]
        labels = self.labels or ()
        if any(isinstance(label, str) for label in labels):  # numbers would tell a reader nothing
            width = max(map(len, names))
            columns = zip(names, ("label", *map(printable, labels)), strict=True)
            names = [f"{name:{width}}  {label}" for name, label in columns]
        items = zip(names[1:], self.distances, self.probabilities, strict=True)
        rows = (
            f"{rank:4d}  {distance:8.4f}  {_rounded(probability):>11}  {name}"
            for rank, (name, distance, probability) in enumerate(items, 1)
        )
        return "\n".join([head, f"rank  distance  probability  {names[0]}", *rows])

    def _summary(self) -> str:
        """State the size, or that there is no answer, and what is known of the query."""
        if self.abstained:
            unknown = self.guarantee.request.beta is not None
            reason = "the gallery seems to hold no match" if unknown else "too uncertain"
            found = f"no answer: {reason}"
        else:
            likely = _rounded(self.match_probability or 0.0)
            found = f"{self.size} image{'s' * (self.size > 1)}, holds a match with probability "
            found += likely + " if the gallery has one" * (self.unlike <= UNLIKE)
        found += f", uncertainty {self.uncertainty:.4g}"
        if self.unlike <= UNLIKE:
            found += f", unlike the calibration queries with a match (p = {self.unlike:.2g})"
        if self.label_calibrated is False:
            found += ", of a label that did not calibrate, which the guarantee may not cover"
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return self.own_values() | {"guarantee": self.guarantee.to_dict()}

    def own_values(self) -> dict[str, Any]:
        """Return plain values without the guarantee, which answers share."""
        likely = self.match_probability
        return {
            "ids": list(self.ids),
            "labels": None if self.labels is None else list(self.labels),
            "distances": [round(float(distance), 6) for distance in self.distances],
            "probabilities": self.probabilities.round(6).tolist(),
            "match_probability": likely if likely is None else round(likely, 6),
            "size": self.size,
            "abstained": self.abstained,
            "label_calibrated": self.label_calibrated,
            "uncertainty": self.uncertainty,
            "unlike": round(self.unlike, 6),
        } | ({} if self.outside is None else {"outside": dict(self.outside)})


def _rounded(probability: float) -> str:
    """Return a probability with two digits, never as 0 or 1."""
    if 0.005 <= probability <= 0.995:
        return f"{probability:.2f}"
    return "<0.01" if probability < 0.5 else ">0.99"


@dataclass(frozen=True, eq=False)
class AtLevels:
    """The sets of one query at several alphas: each contains those of all larger alphas.

    Attributes:
        alphas: the levels that are certified, ascending.
        sizes: (m,) size of the set at each; it holds the first items of `largest`, with their
            probabilities.
        match_probabilities: (m,) that the set at each holds a true match; each is estimated by
            itself, so that that of a larger set may be a little smaller.
        largest: the answer at the smallest alpha.
        guarantees: what is guaranteed of the set at each alpha.
    """

    alphas: tuple[float, ...]
    sizes: NDArray[np.int64]
    match_probabilities: NDArray[np.float64]
    largest: Retrieval
    guarantees: tuple[Guarantee, ...]


def search_batches(n: int, dim: int) -> list[slice]:
    """Divide n queries of a dimension into batches for the search, all nearly equal in size.

    The smaller the dimension, the larger the batches. The answers do not depend on them: the index
    re-computes distances by subtraction.

    Example:
        >>> [batch.stop - batch.start for batch in search_batches(2500, 128)]
        [1250, 1250]
    """
    # A batch holds fewer than twice the least number of queries.
    least = min(max(QUERY_BATCH_SIZE, -(-SEARCH_BATCH_NUMBERS // dim)), MAX_SEARCH_BATCH_SIZE // 2)
    edges = np.linspace(0, n, max(1, n // least) + 1).astype(int).tolist()
    return [slice(start, stop) for start, stop in pairwise(edges)]


def items_of(
    searcher: Searcher, results: SearchResults, ranking: Ranking, sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return positions and distances (m,) of the items in sets of sizes (n,), query by query."""
    row, rank = cells_of(sizes)
    column = rank if ranking.columns is None else ranking.columns[row, rank]
    positions = results.require("positions")[row, column]
    distances = results.require("distances")[row, column]
    unknown = np.flatnonzero(positions < 0)  # no candidate has the label
    if len(unknown):
        assert results.labels is not None
        positions[unknown], distances[unknown] = nearest_of_labels(
            searcher, results, row[unknown], results.labels[row, column][unknown]
        )
    return positions, distances


@dataclass(frozen=True, eq=False)
class State:
    """A search and its calibration, which answer each request; answers carry the origin."""

    searcher: Searcher
    calibration: Calibration | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)

    def require_calibration(self) -> Calibration:
        """Return the calibration, stale or not; `StaleCalibration` if there is none."""
        if self.calibration is None:
            raise StaleCalibration(
                "this retriever is not calibrated: call `calibrate` with labelled queries, or make "
                "one with `rcir calibrate`; `search` gives neighbours without a guarantee"
            )
        return self.calibration

    def warn_of_new_labels(self) -> None:
        """Warn if fewer of the gallery's labels have calibration queries than when calibrated."""
        if self.calibration is not None:
            self.calibration.warn_of_new_labels(self.searcher)

    def changes(self) -> list[str]:
        """Return the names of what differs from what it was calibrated on."""
        if self.calibration is None:
            return [*self.searcher.fingerprints()]
        return self.calibration.changes(self.searcher)

    def valid_calibration(self) -> Calibration:
        """Return the calibration, or raise `StaleCalibration` if anything has changed since."""
        calibration = self.require_calibration()
        if changed := self.changes():
            raise StaleCalibration(
                f"changed since calibration: {', '.join(changed)}. The guarantee does not cover "
                "that: call `recalibrate`, or `calibrate` with labelled queries, after attaching a "
                "collection again; `search` gives neighbours without a guarantee"
            )
        return calibration

    def with_uncertainty(self, results: Results, uncertainty: str | None = None) -> Results:
        """Return search results with an uncertainty, by default that of the calibration."""
        if uncertainty is None:
            uncertainty = "encoder" if self.calibration is None else self.calibration.uncertainty
        return with_uncertainty(self.searcher, results, uncertainty)

    def answer(
        self, query: Any, request: Request, outside: int = 0, **described: Any
    ) -> Retrieval | list[Retrieval]:
        """Answer queries with sets that satisfy a request, see `Retriever.retrieve`.

        `described` are uncertainty, model and probabilities, which only vectors can come with.
        """
        guarantee = self.valid_calibration().guarantee(request)
        many = isinstance(query, list | tuple | Embedding | Queries)
        queries: Any = query if many else [query]
        if self.searcher.are_vectors(query):
            vectors = as_vectors(query)
            many = vectors.ndim > 1 or not len(vectors)
            queries = vectors if many else vectors[None]
        if many and not len(queries):
            return []
        many = many and request.together is not True
        answers: list[Retrieval] = []
        for batch, ranking, sizes in self._sets(queries, guarantee, request, outside, **described):
            answers += self._retrievals(batch, ranking, sizes, guarantee, outside)
        return answers if many else answers[0]

    def answer_at_levels(
        self, queries: Any, requests: Sequence[Request], outside: int = 0, **described: Any
    ) -> list[AtLevels]:
        """Answer queries at several levels from one search, see `Retriever.at_levels`."""
        calibration = self.valid_calibration()
        if calibration.sequential:
            raise InvalidConfig(
                "at_levels is not available, because calibration queries were added one by one: "
                "no guarantee holds for several alphas at every moment. Request one alpha with "
                "`retrieve` and anytime=True, or calibrate again"
            )
        guarantees = calibration.attainable(requests)
        strictest = guarantees[0]
        alphas = tuple(cast("float", each.alpha) for each in guarantees)
        answers: list[AtLevels] = []
        batches = self._sets(queries, strictest, requests[0], outside, **described)
        for results, ranking, largest in batches:
            sizes = [sizes_of(ranking, each) for each in guarantees]
            probabilities = [
                calibration.match_probabilities(each).of_sets(ranking, by_query, each)[1]
                for by_query, each in zip(sizes, guarantees, strict=True)
            ]
            sets = self._retrievals(results, ranking, largest, strictest, outside)
            parts = (np.stack(sizes, axis=1), np.stack(probabilities, axis=1), sets)
            for by_level, likely, largest_set in zip(*parts, strict=True):
                answers.append(AtLevels(alphas, by_level, likely, largest_set, tuple(guarantees)))
        return answers

    def _sets(
        self, queries: Any, guarantee: Guarantee, request: Request, outside: int, **described: Any
    ) -> Iterator[tuple[SearchResults, Ranking, NDArray[np.int64]]]:
        """Yield search results, ranking and set sizes of queries, batch by batch.

        `request` is the request of the guarantee, with the keys and encounters of the queries.
        Without `outside`, candidates outside the sets may be missing.
        """
        calibration = self.require_calibration()
        prepared = self.searcher.prepare(queries, **described)
        prepared = self.searcher.as_requested(prepared, request)
        self.searcher.require_keys(prepared)
        calibration.require_known_parts(self.searcher, prepared, request.group)
        require_alike(prepared, calibration.calibration_queries)
        rule = calibration.rule_for(request)
        distinct, up_to = request.distinct, np.inf if outside else guarantee.threshold
        with working("retrieving", len(prepared)) as work:
            for rows in search_batches(*prepared.vectors.shape):
                candidates = self.searcher.candidates(prepared[rows])
                for start in range(0, len(candidates), QUERY_BATCH_SIZE):
                    batch = candidates[start : start + QUERY_BATCH_SIZE]
                    results = calibration.arrange(self.searcher, batch, rule, distinct, up_to)
                    yield results, *rule.sets(results, guarantee)
                    work.advance(len(batch))
        self.valid_calibration()  # an encoder, or an index on a server, may have changed meanwhile

    def _retrievals(
        self,
        results: SearchResults,
        ranking: Ranking,
        sizes: NDArray[np.int64],
        guarantee: Guarantee,
        outside: int,
    ) -> list[Retrieval]:
        """Return the answers of ranked search results, with up to `outside` further candidates."""
        listed = np.maximum(sizes, np.minimum(sizes + outside, np.isfinite(ranking.scores).sum(1)))
        # One look-up for all items; each answer is a slice of it.
        positions, distances = items_of(self.searcher, results, ranking, listed)
        ids = self.searcher.gallery.ids[positions].tolist()
        labels = self.searcher.named_labels(positions)
        retrievals, start = [], 0
        calibrated = self._label_calibrated(results, ranking)
        fitted = self.require_calibration().match_probabilities(guarantee)
        likely, set_likely = fitted.of_sets(ranking, sizes, guarantee)
        if outside:
            row, rank = cells_of(listed)
            inside, likely = likely, fitted.of_items(ranking, listed)[0]
            likely[rank < sizes[row]] = inside
        parts = (sizes.tolist(), listed.tolist(), set_likely.tolist(), results.uncertainty.tolist())
        features = (results.require("unlike").tolist(), results.require("nearness").tolist())
        columns = zip(*parts, *features, calibrated, strict=True)
        for size, stop, probability, uncertainty, unlike, nearness, label_calibrated in columns:
            part, rest = slice(start, start + size), slice(start + size, start := start + stop)
            others = {
                "ids": ids[rest],
                "labels": None if labels is None else labels[rest],
                "distances": distances[rest].tolist(),
                "probabilities": likely[rest].tolist(),
            }
            retrievals.append(
                Retrieval(
                    tuple(ids[part]),
                    distances[part],
                    likely[part],
                    probability if size else None,
                    uncertainty,
                    unlike,
                    nearness,
                    guarantee,
                    None if labels is None else labels[part],
                    label_calibrated if size else None,
                    others if outside else None,
                    self.origin,
                )
            )
        return retrievals

    def _label_calibrated(self, results: SearchResults, ranking: Ranking) -> Sequence[bool | None]:
        """Return True for each query whose first item has the label of a calibration query."""
        known = self.require_calibration().labels
        if results.labels is None or known is None:
            return [None] * len(results)
        first = 0 if ranking.columns is None else ranking.columns[:, 0]
        labels = results.labels[np.arange(len(results)), first]
        calibrated: list[bool] = np.isin(labels, known).tolist()
        return calibrated
