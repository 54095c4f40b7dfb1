"""Calibration: from labelled queries to everything that certifies the answers of a retriever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from rcir.data.clusters import draw_by_cluster
from rcir.data.digests import digests
from rcir.data.repeats import (
    require_new,
    require_no_repeats,
    warn_of_bursts,
    warn_of_copies,
    warn_of_twins,
)
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, StaleCalibration
from rcir.index import build_index
from rcir.levels import ALPHAS, DELTA
from rcir.retrieval.queries import Queries, require_alike
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES, check_uncertainty
from rcir.retrieval.search import Searcher
from rcir.risk import (
    RISKS,
    Bound,
    Exchangeability,
    Guarantee,
    GuaranteeRequest,
    LabelledResults,
    SetRule,
    check_exchangeability,
    fit_score_function,
    score,
    smallest_uncertainty,
)
from rcir.risk.bounds import check_bound, check_level, check_levels
from rcir.risk.guarantee import stated_confidence
from rcir.risk.losses import MISS
from rcir.risk.request import Distinct, conflict
from rcir.risk.selection import ComparedSizes, Fits, check_score_function

TUNING_SHARE = 0.3  # of labelled queries that are divided at random
MAX_GUARANTEES = 1000  # certified requests that a calibration remembers


class CalibrationKeywords(TypedDict, total=False):
    """The keyword arguments of `Retriever.calibrate` for editors; a test compares them."""

    bound: Bound
    alphas: Sequence[float]
    delta: float
    recurring: bool
    query_uncertainty: str


@dataclass(frozen=True)
class CalibrationOptions:
    """How to calibrate a retriever.

    Attributes:
        score_function: "constant", "minmax", "quantile", "learned", "reranked", or "auto", which
            chooses for each risk the one with the smallest sets on the tuning split; see
            `rcir.risk.fit_score_function`.
        bound: confidence bound of the risk, see `rcir.risk.p_value`.
        alphas, delta: levels at which "auto" compares, and to report.
        recurring: allow calibration queries that are in the tuning split too, or come twice: for
            images that recur in use exactly as they do here, each query drawn independently of all
            others. Copies of one list of images are not.
        query_uncertainty: the uncertainty of queries: one of `Retriever.uncertainties`; or "auto",
            which chooses the one with the smallest sets on the tuning split, see
            `rcir.risk.smallest_uncertainty`.

    Raises:
        InvalidConfig, InvalidRiskLevel: an option has no such value.
    """

    score_function: str = "auto"
    bound: Bound = "binomial"
    alphas: Sequence[float] = ALPHAS
    delta: float = DELTA
    recurring: bool = False
    query_uncertainty: str = "auto"

    def __post_init__(self) -> None:
        check_bound(self.bound)
        check_uncertainty(self.query_uncertainty)
        object.__setattr__(self, "alphas", check_levels(self.alphas))
        object.__setattr__(self, "delta", check_level("delta", self.delta))
        object.__setattr__(self, "recurring", bool(self.recurring))
        check_score_function(self.score_function)


@dataclass(frozen=True, eq=False)
class RuleSet:
    """The rules that size sets of items, or sets of labels.

    Attributes:
        main: for misses, for several risks together, and for all risks without a rule of their own.
        by_risk: rules with another score function, by the name of the risk.
    """

    main: SetRule
    by_risk: Mapping[str, SetRule] = field(default_factory=dict)

    def rule_for(self, request: GuaranteeRequest) -> SetRule:
        """Return the rule that answers a request."""
        if isinstance(request.alpha, Mapping):
            return self.main
        return self.by_risk.get(request.risk, self.main)

    def extended(self, queries: LabelledResults) -> RuleSet:
        """Return the rules with further calibration queries.

        Raises:
            InvalidData: the queries come in clusters, or only some have groups.
        """
        if self.main.calibration.cluster is not None or queries.cluster is not None:
            raise InvalidData("no queries can be added if they come in clusters: calibrate again")
        groups = set() if queries.groups is None else set(queries.groups.tolist())
        if new := groups.difference(self.main.calibration.group_names()):
            raise InvalidData(
                f"queries of new groups ({', '.join(sorted(new))}) cannot be added, because delta "
                "is divided by the number of groups: calibrate again"
            )

        def extended(rule: SetRule) -> SetRule:
            added = score(rule.score_function, queries)
            return replace(rule, calibration=rule.calibration.joined(added))

        by_risk = {risk: extended(rule) for risk, rule in self.by_risk.items()}
        return RuleSet(extended(self.main), by_risk)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Everything that a calibration is; nothing of it changes.

    Attributes:
        rules: under None those of sets of items and, if the gallery has labels, under "label" those
            of sets with one item of each label.
        fingerprints: digests of everything that it depends on, see `Searcher.fingerprints`.
        options: how it was made.
        uncertainty: of the queries, see `Searcher.judged`.
        tuning_queries, calibration_queries: as they were searched.
        chosen_among: number of retrievers that this one was chosen among, by results on the
            calibration queries; every request is then certified at delta divided by it.
        sequential: True if calibration queries were added one by one; then every request has to be
            `anytime`.
    """

    rules: Mapping[Distinct, RuleSet]
    fingerprints: Mapping[str, str]
    options: CalibrationOptions
    uncertainty: str
    tuning_queries: Queries
    calibration_queries: Queries
    chosen_among: int = 1
    sequential: bool = False
    _guarantees: dict[GuaranteeRequest, Guarantee] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def main(self) -> SetRule:
        """The rule that sizes sets of items for the miss risk."""
        return self.rules[None].main

    @property
    def query_digests(self) -> NDArray[np.bytes_]:
        """(n,) digests of the tuning and the calibration queries, see `rcir.data.digests`."""
        splits = (self.tuning_queries, self.calibration_queries)
        return np.concatenate([digests([]), *(queries.identities for queries in splits)])

    def changes(self, searcher: Searcher) -> list[str]:
        """Return the names of what has changed since: then the calibration is stale."""
        current = dict(searcher.fingerprints(), uncertainty=self.uncertainty)
        parts = dict.fromkeys([*current, *self.fingerprints])
        changes = [part for part in parts if current.get(part) != self.fingerprints.get(part)]
        if self.main.calibration.depth != searcher.depth:
            changes.append("search depth")
        return changes

    def queries_to_search(self, searcher: Searcher) -> tuple[Queries, Queries]:
        """Return the tuning and calibration queries, to be searched anew.

        Raises:
            StaleCalibration: the encoder has changed, so that their vectors are no longer its own.
            InvalidData: it is not known which queries some gallery items match.
        """
        for part in self.changes(searcher):
            if part in ("encoder", "preprocessing", "options"):
                raise StaleCalibration(
                    f"the {part} changed since calibration, so that the vectors of its queries are "
                    "no longer what it makes: search the labelled queries again and `calibrate`"
                )
        splits = self.tuning_queries, self.calibration_queries
        if searcher.relevance is None or any(queries.relevance is None for queries in splits):
            raise InvalidData(
                "it is not known which queries the gallery items match, so that the queries cannot "
                "be searched anew: give labelled queries to `calibrate`"
            )
        return splits

    def rule_for(self, request: GuaranteeRequest) -> SetRule:
        """Return the rule that answers a request.

        Raises:
            InvalidConfig: it is not calibrated for such sets.
        """
        return self._rules_of(request.distinct).rule_for(request)

    def _rules_of(self, distinct: Distinct) -> RuleSet:
        if distinct not in self.rules:
            raise InvalidConfig(
                f"distinct is {distinct!r}; it can be "
                + ("'label' or None" if "label" in self.rules else "None (no labels known)")
            )
        return self.rules[distinct]

    def guarantee(self, request: GuaranteeRequest) -> Guarantee:
        """Certify a request, once: the answer is remembered.

        Raises:
            InvalidConfig, InvalidRiskLevel: the request is impossible.
            RiskUnattainable: nothing certifies it.
        """
        guarantee = self._guarantees.get(request)
        if guarantee is None:
            rule = self.rule_for(request)
            if reason := conflict(request, rule.calibration.cluster, self.sequential):
                raise InvalidConfig(reason)
            guarantee = rule.guarantee(request, self.chosen_among)
            if len(self._guarantees) >= MAX_GUARANTEES:
                self._guarantees.clear()
            self._guarantees[request] = guarantee
        return guarantee

    def attainable(self, requests: Sequence[GuaranteeRequest]) -> list[Guarantee]:
        """Certify requests with ascending alphas; those that nothing certifies are left out.

        Raises:
            RiskUnattainable: nothing certifies any of them.
            InvalidData: there is no request.
        """
        if not requests:
            raise InvalidData("there are no alphas: give at least one")
        guarantees: list[Guarantee] = []
        for request in reversed(requests):  # the error of the largest alpha is the most helpful
            try:
                guarantees.insert(0, self.guarantee(request))
            except RiskUnattainable:
                if not guarantees:
                    raise
                break
        return guarantees

    def extended(self, queries: LabelledResults, added: Queries, recurring: bool) -> Calibration:
        """Return the calibration with further queries; it is sequential from now on.

        Args:
            queries: their search results, with the uncertainty of the calibration.
            added: the queries, to be stored.
            recurring: True if queries may come twice.
        """
        return replace(
            self,
            rules={
                distinct: rules.extended(
                    queries if distinct is None else queries.first_of_each_label()
                )
                for distinct, rules in self.rules.items()
            },
            calibration_queries=Queries.joined([self.calibration_queries, added]),
            options=replace(self.options, recurring=True) if recurring else self.options,
            sequential=True,
        )


@dataclass(frozen=True)
class CertifiedSize:
    """The miss risk at one level.

    Attributes:
        alpha: the level.
        mean_size: of the sets of the calibration queries; None if the level is not certified.
        constant_size: the size that they would need if all sets had the same size, over the same
            candidates in the same order; None if no size is certified.
        minimum_alpha: if the level is not certified, the smallest that is.
    """

    alpha: float
    mean_size: float | None
    constant_size: float | None
    minimum_alpha: float | None = None


@dataclass(frozen=True)
class CalibrationReport:
    """The outcome of a calibration; `str` gives a sentence and a table.

    Attributes:
        delta: the level that `rows` are certified at.
        n_tuning, n_calibration: numbers of queries.
        score_function: how set sizes depend on the query.
        rows: the miss risk at each requested alpha.
        comparison: what "auto" compared, for sets of items (None) and of labels ("label").
        uncertainties: mean sizes of each uncertainty at each alpha, if they were compared.
        anytime: True if calibration queries were added one by one, so that the rows are of
            guarantees that hold at every moment.
        chosen_among: number of retrievers that this one was chosen among; the rows hold
            nevertheless.
        clusters: number and kind of the clusters that the queries calibrate by, if they do.
    """

    delta: float
    n_tuning: int
    n_calibration: int
    score_function: str
    rows: tuple[CertifiedSize, ...]
    comparison: Mapping[Distinct, ComparedSizes]
    uncertainties: ComparedSizes
    anytime: bool = False
    chosen_among: int = 1
    clusters: tuple[int, str] | None = None

    def __str__(self) -> str:
        first = f"With probability at least {stated_confidence(self.delta)}"
        if self.chosen_among > 1:
            first = f"Chosen among {self.chosen_among} retrievers after looking: w{first[1:]}"
        if self.anytime:
            first += ", at every moment since calibration began"
        queries = f"{self.n_calibration} calibration queries"
        if self.clusters is not None:
            number, kind = self.clusters
            queries += f" by {kind}, {number} of them, each counted alike"
        lines = [
            f"{first}, a true match is missing from at most a fraction alpha of the sets "
            f"({self.score_function} sizes, {queries}; "
            f"{self.n_tuning} others fitted the sizes).",
            f"{'alpha':>6}  {'mean size':>9}  {'one size':>8}",
        ]
        for row in self.rows:
            size = "-" if row.mean_size is None else f"{row.mean_size:.2f}"
            constant = "-" if row.constant_size is None else f"{row.constant_size:.4g}"
            line = f"{row.alpha:>6g}  {size:>9}  {constant:>8}"
            if row.mean_size is None:
                least = row.minimum_alpha
                line += "  not certified" + ("" if least is None else f"; from {least:.4g} on")
            lines.append(line)
        return "\n".join(lines)


def calibrate(
    searcher: Searcher,
    tuning: LabelledResults,
    calibration: LabelledResults,
    options: CalibrationOptions,
    like: Calibration | None = None,
) -> tuple[Calibration, CalibrationReport]:
    """Calibrate on two searched splits.

    Args:
        searcher: that searched both, as it is now.
        tuning, calibration: the two splits.
        options: how to calibrate.
        like: an earlier calibration with the same queries. Its uncertainty and its kinds of score
            functions are kept, and the new one holds although it was chosen among several.

    Raises:
        StaleCalibration: the searcher has changed since it searched.
        InvalidData: the queries are unsuitable, see `Retriever.calibrate`.
    """
    for split in (tuning, calibration):
        check_labelled(split)
    if tuning is calibration or tuning.results.vectors is calibration.results.vectors:
        raise InvalidData(
            "tuning split and calibration queries are the same: the guarantee needs others"
        )
    for queries in (tuning, calibration):
        check_searched(searcher, queries)
    require_alike(calibration.results.require("queries"), tuning.results.require("queries"))
    _check_clusters(tuning, calibration)
    _check_repeats(searcher, tuning, calibration, options.recurring, like is not None)
    uncertainty, uncertainties = _choose_uncertainty(searcher, tuning, options, like)
    tuning, calibration = (searcher.judged(one, uncertainty) for one in (tuning, calibration))
    rules: dict[Distinct, RuleSet] = {}
    comparison: dict[Distinct, ComparedSizes] = {}
    fits, queries = Fits(tuning), calibration
    for distinct in (None, "label") if searcher.labels is not None else (None,):
        if distinct is not None:
            fits, queries = fits.first_of_each_label(), queries.first_of_each_label()
        before = like.rules[distinct] if like else None
        rules[distinct], comparison[distinct] = fit_rules(fits, queries, options, before)
    made = Calibration(
        rules=rules,
        fingerprints=dict(searcher.fingerprints(), uncertainty=uncertainty),
        options=options,
        uncertainty=uncertainty,
        tuning_queries=queries_to_store(searcher, tuning, uncertainty),
        calibration_queries=queries_to_store(searcher, calibration, uncertainty),
        chosen_among=like.chosen_among if like else 1,
        sequential=like is not None and like.sequential,
    )
    return made, _report(made, comparison, uncertainties)


def recalibrate(searcher: Searcher, earlier: Calibration) -> tuple[Calibration, CalibrationReport]:
    """Calibrate anew with the queries of a calibration, see `Retriever.recalibrate`."""
    splits = earlier.queries_to_search(searcher)
    tuning, calibration = (searcher.search_labelled(split) for split in splits)
    return calibrate(searcher, tuning, calibration, earlier.options, like=earlier)


def fit_rules(
    fits: Fits,
    calibration: LabelledResults,
    options: CalibrationOptions,
    like: RuleSet | None = None,
) -> tuple[RuleSet, ComparedSizes]:
    """Fit a score function for every risk, and score the calibration queries with it.

    Args:
        fits: of the tuning split.
        calibration: the calibration queries, which are only scored.
        options: how to calibrate.
        like: rules whose kinds of score functions are kept; else they are chosen.

    Returns:
        The rules, and what was compared for the miss risk.
    """
    tuning = fits.split
    by_score_function: dict[str, SetRule] = {}

    def fit(risk: str) -> tuple[SetRule, ComparedSizes]:
        before = None if like is None else like.by_risk.get(risk, like.main).score_function.name
        fitted, compared = fit_score_function(
            before or options.score_function,
            tuning.results,
            tuning.relevant,
            options.alphas,
            options.delta,
            risk,
            tuning.n_relevant,
            fits,
        )
        if fitted.name not in by_score_function:
            by_score_function[fitted.name] = SetRule(
                fitted, score(fitted, tuning), score(fitted, calibration), options.bound
            )
        return by_score_function[fitted.name], compared

    main, compared = fit(MISS.name)
    by_risk = {}
    for name, risk in RISKS.items():
        if risk.fits_own_scores(tuning.n_relevant):
            rule, _ = fit(name)
            if rule is not main:
                by_risk[name] = rule
    return RuleSet(main, by_risk), compared


def extend(
    searcher: Searcher, calibration: Calibration, queries: LabelledResults, recurring: bool
) -> Calibration:
    """Return a calibration with further queries, see `Retriever.extend_calibration`."""
    check_labelled(queries)
    check_searched(searcher, queries)
    require_alike(queries.results.require("queries"), calibration.calibration_queries)
    queries = searcher.judged(queries, calibration.uncertainty)
    added = queries_to_store(searcher, queries, calibration.uncertainty)
    gallery = None if searcher.options.leave_one_out else searcher.digests
    require_new(gallery, calibration.query_digests, digests_of(queries), recurring)
    if not searcher.options.leave_one_out:
        distances = vector_distances(searcher, queries)
        warn_of_copies("queries to add", distances, searcher.digests is not None)
    return calibration.extended(queries, added, recurring)


def check_recent(
    searcher: Searcher,
    calibration: Calibration,
    recent: LabelledResults,
    alpha: float,
    delta: float,
) -> Exchangeability:
    """Compare recent queries with those of a calibration, see `Retriever.check`."""
    rule = calibration.main
    check_labelled(recent)
    check_searched(searcher, recent)
    require_alike(recent.results.require("queries"), calibration.calibration_queries)
    cluster = rule.calibration.cluster or recent.cluster
    if cluster is not None:
        raise InvalidData(
            f"queries come in clusters ({cluster}), and are compared as independent ones: "
            "calibrate and check with one query of each"
        )
    request = GuaranteeRequest(alpha, delta, anytime=calibration.sequential)
    threshold = calibration.guarantee(request).threshold
    scored = score(rule.score_function, searcher.judged(recent, calibration.uncertainty))
    return check_exchangeability(rule.calibration, scored, certified=(threshold, alpha))


def known_digests(searcher: Searcher, calibration: Calibration | None) -> NDArray[np.bytes_]:
    """(n,) ascending digests of the queries that are no evidence for further ones.

    Those that tuned or calibrated, and the items of the gallery, unless these are the queries; none
    if queries recur.
    """
    if calibration is not None and calibration.options.recurring:
        return digests([])
    queries = digests([]) if calibration is None else calibration.query_digests
    gallery = None if searcher.options.leave_one_out else searcher.digests
    return np.sort(queries if gallery is None else np.concatenate([queries, gallery.ravel()]))


def check_labelled(queries: object) -> None:
    """Raise `InvalidData` unless queries are labelled search results."""
    if not isinstance(queries, LabelledResults):
        raise InvalidData(
            f"queries are a {type(queries).__name__}: pass what `search_labelled` returns"
        )


def check_searched(searcher: Searcher, queries: LabelledResults) -> None:
    """Raise `StaleCalibration` unless the searcher, as it is now, searched the queries."""
    if queries.results.fingerprints != searcher.fingerprints() or (
        queries.results.depth != searcher.depth
    ):
        raise StaleCalibration(
            "the queries were searched by another retriever, or this one has changed since: "
            "search them again"
        )


def needs_embeddings(searcher: Searcher, uncertainty: str) -> bool:
    """Return True if queries cannot be searched again without their full embeddings."""
    by_draws = QUERY_UNCERTAINTIES[uncertainty].by_draws
    return by_draws or (searcher.encoder is not None and searcher.encoder.reranks)


def queries_to_store(searcher: Searcher, results: LabelledResults, uncertainty: str) -> Queries:
    """Return the queries of search results as they are stored, to be searched again.

    Their relevance is stored if the relevance of the results follows from it.
    """
    queries: Queries = results.results.require("queries").identified()
    relevance = queries.relevance
    if relevance is not None and searcher.relevance is not None:
        relevant = relevance.of(searcher.relevance, results.results.require("positions"))
        if not np.array_equal(relevant, results.relevant):
            relevance = None
    clusters = results.clusters
    return replace(
        queries,
        embedding=queries.embedding if needs_embeddings(searcher, uncertainty) else None,
        relevance=relevance,
        groups=results.groups,
        clusters=None if clusters is None else clusters.astype(str),
        cluster=results.cluster,
    )


def _choose_uncertainty(
    searcher: Searcher,
    tuning: LabelledResults,
    options: CalibrationOptions,
    like: Calibration | None,
) -> tuple[str, ComparedSizes]:
    if like:
        return like.uncertainty, {}
    if options.query_uncertainty != "auto":
        return options.query_uncertainty, {}
    embedded = tuning.results.require("queries").embedding is not None
    candidates = {
        kind: searcher.judged(tuning, kind)
        for kind in searcher.uncertainties
        if embedded or not QUERY_UNCERTAINTIES[kind].by_draws
    }
    return smallest_uncertainty(candidates, options.alphas, options.delta)


def _report(
    calibration: Calibration,
    comparison: Mapping[Distinct, ComparedSizes],
    uncertainties: ComparedSizes,
) -> CalibrationReport:
    """Return the report of a calibration at the levels of its options."""
    rule, options = calibration.main, calibration.options
    baseline = rule.of_constant_size()
    rows = []
    for alpha in options.alphas:
        request = GuaranteeRequest(alpha, options.delta, anytime=calibration.sequential)
        constant, size, least = None, None, None
        try:
            certified = baseline.guarantee(request, calibration.chosen_among)
            constant = float(baseline.calibration.sizes(certified.threshold).mean())
        except RiskUnattainable:
            pass
        try:
            threshold = calibration.guarantee(request).threshold
            size = float(rule.calibration.sizes(threshold).mean())
        except RiskUnattainable as error:
            least = error.minimum_alpha
        rows.append(CertifiedSize(alpha, size, constant, least))
    kind = rule.calibration.cluster
    return CalibrationReport(
        delta=options.delta,
        n_tuning=len(rule.tuning),
        n_calibration=len(rule.calibration),
        score_function=rule.score_function.name,
        rows=tuple(rows),
        comparison=comparison,
        uncertainties=uncertainties,
        anytime=calibration.sequential,
        chosen_among=calibration.chosen_among,
        clusters=None if kind is None else (rule.calibration.units, kind),
    )


def divide_queries(
    queries: Queries, seed: int, tuning: float = TUNING_SHARE
) -> tuple[Queries, Queries]:
    """Divide queries at random into tuning and calibration queries, by clusters if they have any.

    Raises:
        InvalidData: one of the two would be empty.
        InvalidConfig: the seed is not a whole number of at least 0.
    """
    if not isinstance(seed, Integral) or seed < 0:
        raise InvalidConfig(f"seed is {seed!r}; it must be a whole number, at least 0")
    rng = np.random.default_rng(seed)
    if queries.clusters is None:
        first = max(1, round(tuning * len(queries)))
        if first >= len(queries):
            raise InvalidData(
                f"{len(queries)} queries: some must tune and others calibrate; give more"
            )
        rows = np.split(rng.permutation(len(queries)), [first])
    else:
        rows = draw_by_cluster(rng, queries.clusters, {"tuning": tuning})
    return queries[rows[0]], queries[rows[1]]


def _check_clusters(tuning: LabelledResults, calibration: LabelledResults) -> None:
    """Raise `InvalidData` unless both have the same kind of clusters, and no cluster in common."""
    if tuning.cluster != calibration.cluster:
        raise InvalidData(
            f"the tuning split is of clusters {tuning.cluster!r}, the calibration queries of "
            f"{calibration.cluster!r}: search both with the same"
        )
    if tuning.clusters is None or calibration.clusters is None:
        return
    shared = np.intersect1d(tuning.clusters, calibration.clusters)
    if len(shared):
        names = ", ".join(map(str, shared[:3].tolist()))
        raise InvalidData(
            f"{len(shared)} clusters ({calibration.cluster} {names}) are in the tuning split and "
            "among the calibration queries: divide the queries by clusters"
        )


def _check_repeats(
    searcher: Searcher,
    tuning: LabelledResults,
    calibration: LabelledResults,
    recurring: bool,
    again: bool,
) -> None:
    """Raise `InvalidData` for images that occur twice, and warn of those that nearly do.

    Args:
        searcher: that searched both.
        tuning, calibration: the two splits.
        recurring: see `Retriever.calibrate`.
        again: True if the queries were compared with each other before.
    """
    tuned, calibrated = (digests_of(part) for part in (tuning, calibration))
    if searcher.options.leave_one_out:
        require_no_repeats(None, tuned, calibrated, recurring)
        return
    require_no_repeats(searcher.digests, tuned, calibrated, recurring)
    has_digests = searcher.digests is not None
    distances = vector_distances(searcher, calibration)
    warn_of_copies("queries of the tuning split", vector_distances(searcher, tuning), has_digests)
    warn_of_copies("calibration queries", distances, has_digests)
    if not recurring and not again:
        nearest = _nearest_other(tuning, calibration)
        warn_of_twins("calibration queries", nearest, distances)
        if calibration.cluster is None:
            others = len(tuning) + len(calibration) - 1
            warn_of_bursts(nearest, distances, others, len(searcher.gallery))


def vector_distances(searcher: Searcher, results: LabelledResults) -> NDArray[np.floating[Any]]:
    """(n, k) ascending distances of queries to the nearest vectors of gallery items, k >= 2.

    Distances that an encoder re-ranks by are not comparable with those among queries.
    """
    distances: NDArray[np.floating[Any]] = results.results.require("distances")
    if searcher.items is not None:
        distances = searcher.nearest(results.results.require("vectors"), min(2, searcher.depth))[0]
    return distances


def digests_of(results: LabelledResults) -> NDArray[np.bytes_]:
    """(n,) digests of the queries of search results."""
    identities: NDArray[np.bytes_] = results.results.require("queries").identities
    return identities


def _nearest_other(tuning: LabelledResults, calibration: LabelledResults) -> NDArray[np.float32]:
    """(n,) distance of each calibration query to the nearest other query of the two splits."""
    vectors = calibration.results.require("vectors")
    index = build_index(np.concatenate([vectors, tuning.results.require("vectors")]))
    distances, positions = index.search(vectors, 2)
    itself = positions[:, 0] == np.arange(len(vectors))
    return np.where(itself, distances[:, 1], distances[:, 0])
