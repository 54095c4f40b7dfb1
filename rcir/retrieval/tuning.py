"""Tuning: the options of a calibration, and the queries that fit and choose its parts.

Whatever is fitted or chosen (score functions, the uncertainty) is fitted on tuning queries: some of
the labelled queries, or the items of the gallery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, cast, get_args

import numpy as np
from numpy.typing import NDArray

from rcir.data.division import draw_by_cluster
from rcir.errors import InvalidConfig, InvalidData, as_option
from rcir.imports import find_class, import_path
from rcir.options import ALPHAS, DELTA
from rcir.retrieval.label_ranking import draw_items
from rcir.retrieval.queries import LabelledKeywords, Queries, queries_of
from rcir.retrieval.query_uncertainty import (
    QUERY_UNCERTAINTIES,
    available_uncertainties,
    check_uncertainty,
    with_uncertainty,
)
from rcir.retrieval.search import Searcher
from rcir.risk import (
    Bound,
    LabelledResults,
    OwnRanking,
    Population,
    smallest_uncertainty,
)
from rcir.risk.bounds import check_bound, check_level, check_levels
from rcir.risk.selection import ComparedSizes, score_function_class, size_ratio
from rcir.store.codec import NOT_STORED

TUNING_SHARE = 0.3  # of labelled queries that are divided at random
FEW_TUNING_SHARE = 0.12  # of fewer than `FEW_QUERIES`: they are needed more to calibrate
FEW_QUERIES = 200  # fewer are not divided if the gallery's items can tune
ENCODER_ADDS = 0.97  # ratio of set sizes up to which the encoder's uncertainty is worth its noise

Tuning = Literal["auto", "queries", "labels", "gallery"]
OwnScoreFunction: TypeAlias = str | OwnRanking | type[OwnRanking]


class CalibrationKeywords(TypedDict, total=False):
    """The keywords of `CalibrationOptions` besides the score function."""

    bound: Bound
    alphas: Sequence[float]
    delta: float
    recurring: bool
    query_uncertainty: str
    seed: int | None
    unlabelled_misses: bool


class CalibrateKeywords(LabelledKeywords, CalibrationKeywords, total=False):
    """The keywords of `Retriever.calibrate` that describe its queries, and those of its options."""


def divide_keywords(keywords: CalibrateKeywords) -> tuple[LabelledKeywords, CalibrationKeywords]:
    """Return the keywords that describe the queries, and all others."""
    described = {n: v for n, v in keywords.items() if n in LabelledKeywords.__annotations__}
    options = {n: v for n, v in keywords.items() if n not in described}
    return cast("LabelledKeywords", described), cast("CalibrationKeywords", options)


def make_options(
    score_function: OwnScoreFunction, **options: Unpack[CalibrationKeywords]
) -> CalibrationOptions:
    """Return the options of a calibration, or raise `InvalidConfig` for an unknown keyword."""
    allowed = CalibrationKeywords.__annotations__
    if unknown := [name for name in options if name not in allowed]:
        raise InvalidConfig(
            f"calibrate: there is no option {', '.join(unknown)}; there are {', '.join(allowed)}"
        )
    if isinstance(score_function, str):
        return CalibrationOptions(score_function, **options)
    kind = score_function if isinstance(score_function, type) else type(score_function)
    return CalibrationOptions(import_path(kind), **options, own=score_function)


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of a calibration.

    Attributes:
        score_function: "constant", "minmax", "quantile", "learned", or "auto", which takes a model
            of the gallery's labels if it has labels, and else chooses on the tuning split, see
            `rcir.risk.fit_score_function`; or the import path of your own, see
            `rcir.risk.OwnRanking`.
        bound: confidence bound of the risk, see `rcir.risk.p_value`.
        alphas, delta: levels at which "auto" compares, and to report.
        recurring: allow calibration queries that are in the tuning split too, or come twice: for
            images that recur in use exactly as they do here, each query drawn independently of all
            others. Repeated copies of one list of images are not independent draws.
        query_uncertainty: the uncertainty of queries: one of `available_uncertainties`; or "auto",
            which chooses the one with the smallest sets on the tuning split, see
            `rcir.risk.smallest_uncertainty`.
        seed: of the division of the queries, which the guarantee then states, because the best of
            several seeds is a lucky one. By default the division depends on the queries alone.
        unlabelled_misses: True if queries whose matches are not known calibrate as misses: nothing
            can then be certified of queries with a match alone.
        own: your own score function, by default the class at the import path.

    Raises:
        InvalidConfig, InvalidRiskLevel: an option has no such value.
    """

    score_function: str = "auto"
    bound: Bound = "binomial"
    alphas: Sequence[float] = ALPHAS
    delta: float = DELTA
    recurring: bool = False
    query_uncertainty: str = "auto"
    seed: int | None = None
    unlabelled_misses: bool = False
    own: Any = field(default=None, compare=False, metadata=NOT_STORED)

    def __post_init__(self) -> None:
        check_bound(self.bound)
        seed = self.seed
        whole = isinstance(seed, Integral) and not isinstance(seed, bool)
        if seed is not None and not (whole and seed >= 0):
            raise InvalidConfig(f"seed is {seed!r}; it must be a whole number, at least 0, or None")
        check_uncertainty(self.query_uncertainty)
        object.__setattr__(self, "alphas", check_levels(self.alphas))
        object.__setattr__(self, "delta", check_level("delta", self.delta))
        for name in ("recurring", "unlabelled_misses"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        if isinstance(self.score_function, str) and ":" in self.score_function:
            own = self.own or find_class("score_function", self.score_function, {})
            if not isinstance(own, OwnRanking):
                raise InvalidConfig(f"score_function {self.score_function} needs fit and rank")
            object.__setattr__(self, "own", own)
        elif self.score_function != "auto":
            score_function_class(self.score_function)


@dataclass(frozen=True)
class ChosenUncertainty:
    """The uncertainty of queries that sizes sets, and what was compared for it.

    Attributes:
        name: one of `QUERY_UNCERTAINTIES`.
        sizes: mean sizes by each uncertainty alone at each alpha, if they were compared.
    """

    name: str
    sizes: ComparedSizes = field(default_factory=dict)


def choose_uncertainty(
    searcher: Searcher, tuning: LabelledResults, options: CalibrationOptions
) -> ChosenUncertainty:
    """Return the uncertainty of queries that the options name, or that needs the smallest sets.

    "auto" compares each alone (`smallest_uncertainty`). It prefers the encoder's uncertainty to the
    best one if sets that also depend on the neighbourhood are then at least 3% smaller.
    """
    if options.query_uncertainty != "auto":
        return ChosenUncertainty(options.query_uncertainty)
    queries = queries_of(tuning)
    candidates = {
        kind: with_uncertainty(searcher, tuning, kind)
        for kind in available_uncertainties(searcher)
        if queries.embedding is not None or not QUERY_UNCERTAINTIES[kind].by_draws
    }
    levels = options.alphas, options.delta
    name, sizes = smallest_uncertainty(candidates, *levels)
    if name == "encoder" or queries.uncertainty is None or options.own is not None:
        return ChosenUncertainty(name, sizes)
    ratio = size_ratio(candidates["encoder"], candidates[name], options.score_function, *levels)
    if np.isnan(ratio):
        return ChosenUncertainty(name, sizes)
    return ChosenUncertainty("encoder" if ratio <= ENCODER_ADDS else name, sizes)


def models_labels(searcher: Searcher, options: CalibrationOptions) -> bool:
    """Return True if a model of the gallery's labels sizes sets for misses."""
    return options.score_function == "auto" and searcher.why_no_label_model is None


def why_gallery_cannot_tune(
    searcher: Searcher, queries: Queries, options: CalibrationOptions
) -> str | None:
    """Return why the items of a gallery cannot tune in place of queries; None if they can."""
    if searcher.options.leave_one_out:
        return "with leave_one_out the gallery's items are the queries"
    if searcher.labels is None or searcher.why_no_label_model:
        return searcher.why_no_label_model
    if len(searcher.gallery) <= searcher.gallery.largest_unit:
        return "all items are copies of each other"
    kind = QUERY_UNCERTAINTIES.get(options.query_uncertainty)
    if kind is not None and kind.by_draws:
        return f"the uncertainty {options.query_uncertainty!r} needs draws of each query"
    if queries.uncertainty is not None and searcher.gallery.uncertainty is None:
        return "the queries come with uncertainties, and the gallery's items without"
    counts = np.unique(searcher.labels, return_counts=True)[1]
    if np.mean(counts > 1) <= 0.5 and not models_labels(searcher, options):
        return "most labels have one item only"
    return None


def search_items(searcher: Searcher, calibration: LabelledResults) -> LabelledResults | None:
    """Search the items of `draw_items` as queries, each without itself and its exact copies.

    The gallery can tune, see `why_gallery_cannot_tune`; None if no label has two items. The items
    have uncertainties if those of `calibration` have them.
    """
    gallery, labels = searcher.gallery, searcher.labels
    assert labels is not None
    rows = draw_items(searcher)
    if not len(rows):
        return None
    _, number, counts = np.unique(gallery.kinds, return_inverse=True, return_counts=True)
    stated = queries_of(calibration).uncertainty is not None
    uncertainty = gallery.uncertainty[rows] if stated and gallery.uncertainty is not None else None
    embedding = None if gallery.items is None else gallery.items[rows]
    keys = None if gallery.keys is None else gallery.keys[rows]
    queries = Queries(searcher.index.vectors_at(rows), uncertainty, embedding=embedding, keys=keys)
    results = searcher.candidates(queries, searcher.fingerprints(), gallery.units[rows])
    copies = gallery.members(gallery.units[rows])
    same = (gallery.kinds[copies] == gallery.kinds[rows, None]) & (copies >= 0)
    return LabelledResults(
        results,
        relevant=results.require("labels") == labels[rows, None],
        n_relevant=counts[number[rows]] - np.count_nonzero(same, axis=1),
        one_label=True,
        population=Population(len(rows), labels=labels[rows]),
    )


def _division_rng(
    names: NDArray[Any], seed: int | None
) -> tuple[np.random.Generator, NDArray[np.int64]]:
    """Return the generator that divides queries, and (n,) rows in the order to divide them in.

    Without a seed, both depend on the set of the queries alone, which (n,) `names` identify, so
    that nobody can try several divisions unnoticed. With a seed the order is that of the queries.
    """
    if seed is not None:
        return np.random.default_rng(int(seed)), np.arange(len(names))
    order = np.argsort(names, kind="stable")
    digest = hashlib.sha256(names[order].tobytes()).digest()
    return np.random.default_rng(list(digest)), order


def chosen_tuning(
    searcher: Searcher, queries: Queries, tuning: Tuning, options: CalibrationOptions
) -> Tuning:
    """Return what tunes: "queries", "labels" or "gallery", see `Retriever.calibrate`."""
    if tuning not in get_args(Tuning):
        choices = ", ".join(map(repr, get_args(Tuning)))
        raise InvalidConfig(f"tuning is {tuning!r}; choose one of {choices}")
    leave_one_out = searcher.options.leave_one_out
    population = queries.population
    in_clusters = population.clusters is not None and not leave_one_out
    if tuning == "labels" and (in_clusters or population.single_labels is None):
        raise InvalidData(
            f"{as_option('tuning', 'labels')} divides queries by label, and these come in clusters "
            f"or have no single label each: choose {as_option('tuning', 'queries')}, which divides "
            "by cluster"
        )
    if tuning == "labels" and leave_one_out:
        units, labels = searcher.units(queries), population.labels
        assert units is not None
        assert labels is not None
        pairs = np.unique(np.stack([units, labels]), axis=1)
        if len(np.unique(pairs[0])) < pairs.shape[1]:
            raise InvalidData(
                f"{as_option('tuning', 'labels')} divides queries by label, but some clusters "
                f"({searcher.options.cluster}) hold items of several labels: choose "
                f"{as_option('tuning', 'queries')}"
            )
    if tuning != "auto":
        return tuning
    if queries.probabilities is not None and population.clusters is None:
        return "gallery"  # nothing has to tune
    if population.clusters is not None or why_gallery_cannot_tune(searcher, queries, options):
        return "queries"
    few = len(queries) < FEW_QUERIES
    return "gallery" if few or models_labels(searcher, options) else "queries"


def divide_queries(
    searcher: Searcher, queries: Queries, tuning: Tuning, options: CalibrationOptions
) -> tuple[Queries | None, Queries]:
    """Divide labelled queries, or clusters, at random into those that tune and that calibrate;
    None and all queries if the gallery's items are to tune.
    """
    tuning = chosen_tuning(searcher, queries, tuning, options)
    if tuning == "gallery":
        return None, queries[_division_rng(queries.digests, options.seed)[1]]
    if len(queries) < 2:
        raise InvalidData(f"{len(queries)} queries: some must tune and others calibrate; give more")
    share = TUNING_SHARE
    if len(queries) < FEW_QUERIES and tuning == "queries":
        share = min(share, max(FEW_TUNING_SHARE, 3 / len(queries)))
    shares = {"tuning": share}
    rows = divide_rows(searcher, queries, queries.digests, tuning, shares, options.seed)
    tuned, calibrated = (queries[part] for part in rows)
    return tuned[searcher.one_of_each_unit(tuned)], calibrated[
        searcher.one_of_each_unit(calibrated)
    ]


def divide_rows(
    searcher: Searcher,
    queries: Queries,
    names: NDArray[Any],
    tuning: Tuning,
    shares: Mapping[str, float],
    seed: int | None,
) -> list[NDArray[np.int64]]:
    """Return the rows of each part of labelled queries, and of those that remain, drawn at random.

    No cluster is in two parts, or no label if labels divide the queries (`chosen_tuning`); shares
    are of queries, clusters or labels. Without a seed, the set of the names (n,) alone decides,
    with one also their order.
    """
    rng, order = _division_rng(names, seed)
    clusters, unit = searcher.units(queries), "clusters"
    if tuning == "labels":
        clusters, unit = queries.population.labels, f"{queries.population.label_word}s"
    if clusters is None:
        ends = np.cumsum([round(share * len(queries)) for share in shares.values()])
        return np.split(order[rng.permutation(len(queries))], ends)
    return [order[rows] for rows in draw_by_cluster(rng, clusters[order], shares, unit)]
