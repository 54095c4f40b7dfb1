"""A calibration: everything that certifies the answers of a retriever, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.repeats import digests
from rcir.errors import (
    InvalidConfig,
    InvalidData,
    RiskUnattainable,
    StaleCalibration,
    as_option,
    warn,
)
from rcir.label_model import LabelModel
from rcir.notebook import Report
from rcir.retrieval.acceptance import Acceptance, Likeness
from rcir.retrieval.label_ranking import list_items, rank_labels
from rcir.retrieval.queries import Queries
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES, Results, with_uncertainty
from rcir.retrieval.rules import RuleKind, Rules, TunedOn
from rcir.retrieval.search import Searcher
from rcir.retrieval.shift import Shift
from rcir.retrieval.tuning import CalibrationOptions, ChosenUncertainty
from rcir.retrieval.whitening import Whitening
from rcir.risk import Guarantee, LabelledResults, Request, SetRule, make_request
from rcir.risk.guarantee import at_every_level, in_plural
from rcir.risk.losses import MISS, find_risk
from rcir.risk.options import Distinct, RequestOptions
from rcir.risk.own import OwnScore
from rcir.risk.planning import NUMBERS, Pilot, Plan, plan_calibration
from rcir.risk.probability import MatchProbabilities
from rcir.risk.refusals import rounded_up
from rcir.risk.request import conflict
from rcir.risk.selection import ComparedSizes
from rcir.store.codec import Array

MAX_GUARANTEES = 1000  # certified requests that a calibration remembers


@dataclass(frozen=True)
class Coverage:
    """The number of labels of the gallery that calibrated; `str` states it in a sentence.

    Attributes:
        uncalibrated: number of labels of the gallery that no calibration query has.
        labels: number of labels of the gallery.
    """

    uncalibrated: int
    labels: int

    def __post_init__(self) -> None:
        if not (0 <= self.uncalibrated <= self.labels and self.labels):
            raise InvalidData(f"{self.uncalibrated} of {self.labels} labels cannot be uncalibrated")

    @property
    def share(self) -> float:
        """The share of the labels that no calibration query has."""
        return self.uncalibrated / self.labels

    def __str__(self) -> str:
        if not self.uncalibrated:
            return f"all {self.labels} labels of the gallery have calibration queries"
        return (
            f"{self.uncalibrated} of {self.labels} labels of the gallery have no calibration "
            "query: the guarantee does not speak of queries with these labels"
        )


@dataclass(frozen=True, eq=False)
class Past:
    """The past of queries: those that calibrated a retriever before its present calibration.

    Attributes:
        digests: (m,) of these queries, ascending.
        chosen_among, attempts, sequential: the largest of these attributes of their calibrations.
    """

    digests: Annotated[NDArray[np.bytes_], Array(1)]
    chosen_among: int = 1
    attempts: int = 1
    sequential: bool = False

    def joined(self, calibration: Calibration) -> Past:
        """Return the past of a calibration that comes after another one."""
        return Past(
            np.union1d(self.digests, calibration.calibration_queries.digests),
            max(self.chosen_among, calibration.chosen_among),
            max(self.attempts, calibration.attempts),
            self.sequential or calibration.sequential,
        )


@dataclass(frozen=True, eq=False)
class Calibration:
    """Everything that a calibration is.

    Rules and certified requests are computed when they are needed first, and remembered.

    Attributes:
        rules: of sets of items and, if the gallery has labels, of sets of labels. Besides those
            that queries tuned there are rules that the gallery's items tuned, if they can. These
            answer requests for queries of new labels, because rules that are fitted on queries of
            the calibrating labels know these and no others.
        fingerprints: digests of everything that it depends on, see `Searcher.fingerprints`.
        options: how it was made.
        tuning_queries, calibration_queries: as they were searched; without tuning queries the
            gallery's items tuned.
        likeness: of further queries to those of them that have a match.
        chosen_among: number of retrievers that this one was chosen among, by results on the
            calibration queries; every request is then certified at delta divided by it.
        sequential: True if calibration queries were added one by one; then every request has to be
            `anytime`.
        coverage: which labels of the gallery had calibration queries when this was made; None if
            items have no single label.
        probability_labels: (L,) labels whose probabilities come with the queries; None if none do.
        label_model: the probabilities of the gallery's labels that size sets; None if they do not.
        whitening: a second metric, for galleries without labels; None if no score depends on it.
        acceptance: the estimated odds that the gallery holds a match of a query; None if every
            calibration query has a match, or matches may be left out of the search.
        past: of the queries that calibrated this retriever before.
        attempts: number of calibrations of this retriever, with different choices, that have
            queries in common, this one included.
        left_out: what the search of a gallery item leaves out, see `VectorOptions.left_out`.
        key: what the part of the gallery is that each query is searched in; None for all items.
        shift: how the calibration queries were drawn for a target population, if they were.
    """

    rules: Mapping[RuleKind, Rules]
    fingerprints: Mapping[str, str]
    options: CalibrationOptions
    tuning_queries: Queries
    calibration_queries: Queries
    likeness: Likeness
    chosen_among: int = 1
    sequential: bool = False
    coverage: Coverage | None = None
    probability_labels: Annotated[NDArray[np.int64], Array(1)] | None = None
    label_model: LabelModel | None = None
    whitening: Whitening | None = None
    acceptance: Acceptance | None = None
    past: Past = field(default_factory=lambda: Past(digests([])))
    attempts: int = 1
    left_out: str | None = None
    key: str | None = None
    shift: Shift | None = None
    _guarantees: dict[Request, Guarantee] = field(default_factory=dict, init=False, repr=False)
    _probabilities: dict[Any, MatchProbabilities] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if RuleKind(tuned_on=self.tuned_on) not in self.rules:
            raise InvalidData(f"there is no rule that the {self.tuned_on} tuned")
        for rule in (rule for rules in self.rules.values() for rule in rules.fitted.values()):
            if len(rule.evidence) != len(self.calibration_queries):
                raise InvalidData(
                    f"a rule has {len(rule.evidence)} calibration queries; expected "
                    f"{len(self.calibration_queries)}"
                )
            if rule.uncertainty not in QUERY_UNCERTAINTIES:
                raise InvalidData(f"the uncertainty {rule.uncertainty!r} of a rule is unknown")
        if min(self.chosen_among, self.attempts) < 1:
            numbers = f"chosen_among is {self.chosen_among} and attempts {self.attempts}"
            raise InvalidData(f"{numbers}; both must be at least 1")

    def __str__(self) -> str:
        queries, name = len(self.calibration_queries), self.miss_rule.score_function.name
        return f"{queries} calibration queries, {name} sizes, delta = {self.options.delta:g}"

    def __repr__(self) -> str:
        return f"Calibration({self})"

    @property
    def miss_rule(self) -> SetRule:
        """The rule that sizes sets of items for the miss risk."""
        return self.rules[RuleKind(tuned_on=self.tuned_on)][MISS.name]

    @property
    def uncertainty(self) -> str:
        """The name of the uncertainty of queries that the main rule depends on."""
        return self.miss_rule.uncertainty

    @property
    def distinct(self) -> list[Distinct]:
        """The values of the option `distinct` that can be requested."""
        return [kind.distinct for kind in self.rules if kind.tuned_on == self.tuned_on]

    @property
    def query_digests(self) -> NDArray[np.bytes_]:
        """(n,) digests of the tuning and the calibration queries, see `rcir.data.repeats`."""
        splits = (self.tuning_queries, self.calibration_queries)
        return np.concatenate([digests([]), *(queries.digests for queries in splits)])

    @property
    def options_to_repeat(self) -> CalibrationOptions:
        """Its options, with a score function of the user's own as it was fitted."""
        fitted = self.miss_rule.score_function
        own = fitted.own if isinstance(fitted, OwnScore) else None
        return replace(self.options, own=own)

    @property
    def required_options(self) -> RequestOptions:
        """The options that every request needs."""
        return {"anytime": self.sequential}

    def require_known_parts(
        self, searcher: Searcher, queries: Queries, group: str | None = None
    ) -> None:
        """Raise `InvalidData` for queries of parts without calibration queries, or of another part
        than a requested group.

        Clusters that are the parts cover new ones, drawn like these.
        """
        known, population = self.calibration_queries.keys, self.calibration_queries.population
        clusters = population.clusters
        if queries.keys is None or known is None:
            return
        by_part = population.groups is not None and np.array_equal(population.groups, known)
        if group is not None and by_part and (queries.keys != group).any():
            raise InvalidData(
                f"the guarantee is for group {group!r}, which is a {searcher.options.key}, and "
                f"some queries name another {searcher.options.key}: request both alike"
            )
        if clusters is not None and np.array_equal(clusters, known):
            return
        if len(new := np.setdiff1d(queries.keys, known)):
            key, names = searcher.options.key, ", ".join(map(repr, new[:3].tolist()))
            raise InvalidData(
                f"no calibration query has the {key} {names}, and the guarantee is for those that "
                f"calibrated: calibrate with queries of this {key}, or pass {key}s as clusters, "
                "which covers new ones"
            )

    @cached_property
    def labels(self) -> NDArray[np.int64] | None:
        """The labels of the calibration queries, ascending; None if they have no single label."""
        return self.calibration_queries.population.known_labels

    def complete(self) -> Calibration:
        """Return this calibration as it is stored: with all rules, and digests for images."""
        return replace(
            self,
            rules={kind: Rules(rules.fit_all()) for kind, rules in self.rules.items()},
            tuning_queries=self.tuning_queries.with_digests(),
            calibration_queries=self.calibration_queries.with_digests(),
        )

    def after(self, earlier: Calibration) -> Calibration:
        """Return this calibration with the past of its queries, see `Past`.

        A choice among retrievers, or looking at every moment, is not undone by calibrating again. A
        calibration of the same queries with other choices is counted and warned of.
        """
        past = earlier.past.joined(earlier)
        if not np.isin(self.calibration_queries.digests, past.digests).any():
            return replace(self, past=past)
        attempts = past.attempts
        if not self._repeats(earlier):
            attempts += 1
            warn(
                f"calibration {attempts} of this retriever with some of the same queries. Of "
                "several, the one with the smallest sets is often a lucky one, and its guarantee "
                "does not hold: decide for one beforehand, or calibrate on other queries"
            )
        return replace(
            self,
            past=past,
            attempts=attempts,
            chosen_among=max(self.chosen_among, past.chosen_among),
            sequential=self.sequential or past.sequential,
        )

    def _repeats(self, earlier: Calibration) -> bool:
        """Return True if an earlier calibration had the same queries and options."""
        alike = all(
            set(queries.digests.tolist()) == set(others.digests.tolist())
            for queries, others in (
                (self.tuning_queries, earlier.tuning_queries),
                (self.calibration_queries, earlier.calibration_queries),
            )
        )
        same = self.options == replace(earlier.options, recurring=self.options.recurring)
        return alike and same and self.options.own is earlier.options.own

    def warn_of_new_labels(self, searcher: Searcher) -> None:
        """Warn if a smaller share of the gallery's labels has calibration queries than before."""
        now = coverage(searcher, self.calibration_queries)
        if now is not None and self.coverage is not None and now.share > self.coverage.share:
            before = f"{self.coverage.uncalibrated} of {self.coverage.labels}"
            sentence = self.sentence_of(now)
            warn(f"{sentence}. Before the gallery changed: {before}")

    def sentence_of(self, coverage: Coverage) -> str:
        """Return the sentence of a coverage, with the request for the labels without queries."""
        advised = coverage.uncalibrated and self.can_cover_new_labels
        return str(coverage) + f" ({as_option('query_labels', 'any')} does)" * bool(advised)

    def changes(self, searcher: Searcher) -> list[str]:
        """Return the names of what has changed since: then the calibration is stale."""
        current = searcher.fingerprints()
        parts = dict.fromkeys([*current, *self.fingerprints])
        changes = [part for part in parts if current.get(part) != self.fingerprints.get(part)]
        if self.miss_rule.evidence.depth != searcher.depth:
            changes.append("search depth")
        return changes

    def queries_to_search(self, searcher: Searcher) -> tuple[Queries, Queries]:
        """Return the tuning and calibration queries, to be searched anew.

        Raises `StaleCalibration` if the encoder that made their vectors has changed.
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

    @property
    def tuned_on_gallery(self) -> bool:
        """True if the gallery's items tuned the main rule."""
        return not len(self.tuning_queries)

    @property
    def tuned_on(self) -> TunedOn:
        """What tuned the main rule."""
        return "gallery" if self.tuned_on_gallery else "queries"

    @property
    def can_cover_new_labels(self) -> bool:
        """True if requests for queries of new labels are possible."""
        clustered = self.miss_rule.evidence.population.clusters is not None
        return not (clustered or self.sequential or self._why_no_new_labels())

    def _why_no_new_labels(self) -> str | None:
        """Return why no rule can answer requests for queries of new labels, None if one can."""
        if self.shift is not None:
            return "the calibration is for a target population, of which no labels are known"
        tuned = self.tuning_queries.population.single_labels
        calibrated = self.calibration_queries.population.single_labels
        if calibrated is None:
            return "some calibration queries have no known, single label: calibrate by clusters"
        if RuleKind(tuned_on="gallery") in self.rules:
            return None
        if tuned is None or np.isin(tuned, calibrated).any():
            return (
                "the sizes were tuned on queries whose labels calibrated or are unknown; they "
                "would know these labels better than new ones: calibrate with "
                f"{as_option('tuning', 'labels')}, which divides queries by label"
            )
        return None

    def arrange(
        self,
        searcher: Searcher,
        results: Results,
        rule: SetRule,
        distinct: Distinct = None,
        up_to: float = np.inf,
    ) -> Results:
        """Return search results with the candidates that a rule scores, in their order.

        Labels whose score is above `up_to` may be left out.
        """
        results = self.describe(searcher, results, rule.uncertainty)
        if self.whitening is not None:
            results = self.whitening.add_to(searcher, results)
        if rule.score_function.by_label_probability:
            ranked = rank_labels(searcher, self.label_model, results, up_to=up_to)
            lists = rule.score_function.lists_items
            results = list_items(searcher, results, ranked) if lists else ranked
        return results if distinct is None else results.first_of_each_label()

    def describe(self, searcher: Searcher, results: Results, uncertainty: str) -> Results:
        """Return search results with an uncertainty of the queries and how like others they are."""
        results = self.likeness.add_to(self._with_acceptance(searcher, results))
        return with_uncertainty(searcher, results, uncertainty)

    def _with_acceptance(self, searcher: Searcher, results: Results) -> Results:
        return results if self.acceptance is None else self.acceptance.add_to(searcher, results)

    def rule_for(self, request: Request) -> SetRule:
        """Return the rule that answers a request.

        Raises `InvalidConfig` if there is none for such sets, or, for queries of new labels, if
        rules were tuned on queries of the labels that calibrated.
        """
        tuned_on = self.tuned_on
        if request.labels != "calibrated":
            if reason := self._why_no_new_labels():
                raise InvalidConfig(f"query_labels is {request.labels!r}, but {reason}")
            if RuleKind(tuned_on="gallery") in self.rules:
                tuned_on = "gallery"
        kind = RuleKind(request.distinct, tuned_on)
        if kind not in self.rules:
            raise InvalidConfig(
                f"distinct is {request.distinct!r}, but the gallery's items have no single label "
                "each: it can be None"
            )
        counted = [name for name in request.levels if not find_risk(name).first_match]
        risk = request.risk or find_risk(counted[0] if counted else MISS.name)
        return self.rules[kind][risk.name]

    def guarantee(self, request: Request) -> Guarantee:
        """Certify a request, once: the answer is remembered.

        Raises `InvalidConfig` or `InvalidRiskLevel` for an impossible request, `RiskUnattainable`
        if nothing certifies it.
        """
        request = request.promised
        guarantee = self._guarantees.get(request)
        if guarantee is None:
            cluster = self.miss_rule.evidence.population.cluster_word
            if reason := conflict(request, cluster, self.sequential):
                raise InvalidConfig(reason)
            if request.counted == "matchable" and (reason := self._why_matches_are_unknown()):
                counted = as_option("counted", "matchable")
                raise InvalidConfig(f"{counted} and beta are impossible: {reason}")
            rule = self.rule_for(request)
            guarantee, own = rule.guarantee(request, self.chosen_among), self.probability_labels
            guarantee = replace(
                guarantee,
                score_function=guarantee.score_function if own is None else "own-probability",
                attempts=self.attempts,
                seed=self.options.seed,
                left_out=self.left_out,
                key=self.key,
                encounters=self.calibration_queries.pictures is not None,
                by_own_model=own is not None,
                target=None if self.shift is None else str(self.shift),
            )
            if len(self._guarantees) >= MAX_GUARANTEES:
                self._guarantees.clear()
            self._guarantees[request] = guarantee
        return guarantee

    def _why_matches_are_unknown(self) -> str | None:
        """Return why a calibration query that seems to have no match may have one; else None."""
        if self.options.unlabelled_misses:
            return (
                "misses without a label calibrate as queries that match nothing (unlabelled_misses)"
                ", which may have a match. Calibrate with their labels"
            )
        unknown = self.acceptance is None and not self.miss_rule.evidence.matchable.all()
        if self.left_out is None and not unknown:
            return None
        return (
            "the search leaves items out of the gallery that calibration queries match, such as "
            "the query itself. An item that is the only one of its kind has no match here, and "
            "would have one in use. Leave all items of some kinds out of the gallery, and query "
            "with them"
        )

    def plan(
        self, request: Request, numbers: Sequence[int] = NUMBERS, pilot: Pilot = "calibration"
    ) -> Plan:
        """Plan a new calibration from the queries of this one, see `Retriever.plan`."""
        if request.counted == "matchable" and (reason := self._why_matches_are_unknown()):
            raise InvalidConfig(f"{as_option('counted', 'matchable')} is impossible: {reason}")
        rule = self.rule_for(request)
        tuned = None if self.tuned_on_gallery else rule.tuned
        queries = {"calibration": rule.evidence, "tuning": tuned}.get(pilot)
        if queries is None:
            also = "" if tuned is None else " or 'tuning'"
            raise InvalidConfig(
                f"pilot is {pilot!r}; choose 'calibration'{also}: {len(self.tuning_queries)} "
                "queries tuned this calibration"
            )
        return plan_calibration(request, queries, numbers, rule.bound)

    def has_certified(self, request: Request) -> bool:
        """Return True if `guarantee` remembers the guarantee of a request."""
        return request.promised in self._guarantees

    def match_probabilities(self, guarantee: Guarantee) -> MatchProbabilities:
        """Return the probabilities of matches, fitted once for all levels of a request."""
        request = guarantee.request
        rule = self.rule_for(request)
        limit = guarantee.certificate.acceptance_threshold
        key = rule, request.group, request.labels, limit
        if key not in self._probabilities:
            if len(self._probabilities) >= MAX_GUARANTEES:
                self._probabilities.clear()
            self._probabilities[key] = rule.match_probabilities(guarantee)
        return self._probabilities[key]

    def attainable(self, requests: Sequence[Request]) -> list[Guarantee]:
        """Certify requests with ascending alphas; leave out those that nothing certifies.

        Raises `RiskUnattainable` if none remains.
        """
        guarantees: list[Guarantee] = []
        for request in reversed(requests):  # the error of the largest alpha is the most helpful
            try:
                guarantees.insert(0, self.guarantee(request))
            except RiskUnattainable:
                if not guarantees:
                    raise
                break
        return guarantees

    def certified_size(self, alpha: float) -> CertifiedSize:
        """Return the mean size of the calibration queries' sets for misses, at their delta."""
        rule = self.miss_rule
        request = make_request(alpha, self.options.delta, **self.required_options)
        size, least = None, None
        constant = rule.constant_size(request, rule.evidence, self.chosen_among)
        try:
            size = float(rule.evidence.sizes(self.guarantee(request).threshold).mean())
        except RiskUnattainable as error:
            least = error.minimum_alpha
        return CertifiedSize(alpha, size, constant, least, self._new_labels_size(request))

    def _new_labels_size(self, request: Request) -> float | None:
        """Return the mean size of the sets that new labels need, None if refused."""
        try:
            request = replace(request, labels="new")
            threshold = self.guarantee(request).threshold
        except (InvalidConfig, RiskUnattainable):
            return None
        rule = self.rule_for(request)
        return float(rule.evidence.sizes(threshold).mean())

    @cached_property
    def rows(self) -> tuple[CertifiedSize, ...]:
        """The miss risk at each alpha that it was made for."""
        return tuple(map(self.certified_size, self.options.alphas))

    @property
    def table(self) -> list[list[str]]:
        """The header and the rows of a table of `rows`."""
        new_labels = any(row.new_labels_size is not None for row in self.rows)
        lines = [["alpha", "mean size", "one size", *["new labels"] * new_labels, ""]]
        for row in self.rows:
            note, least = "", row.minimum_alpha
            if row.mean_size is None:
                note = "not certified"
                if least is not None:
                    note += (
                        f"; the smallest alpha to certify on new queries is {rounded_up(least):g}"
                    )
            lines.append([f"{row.alpha:g}", _size(row.mean_size), _size(row.constant_size, ".4g")])
            lines[-1] += [*[_size(row.new_labels_size)] * new_labels, note]
        return lines

    def with_queries(
        self, searcher: Searcher, queries: LabelledResults, added: Queries, recurring: bool
    ) -> Calibration:
        """Return the calibration with further queries `added`, searched; it is then sequential."""
        rules = {}
        for kind in self.rules:
            if kind.tuned_on == self.tuned_on:  # the others do not certify for every moment
                arrange = partial(self.arrange, searcher, queries, distinct=kind.distinct)
                rules[kind] = self.rules[kind].with_queries(queries.population, arrange)
        return replace(
            self,
            rules=rules,
            calibration_queries=Queries.joined([self.calibration_queries, added]),
            likeness=self.likeness.joined(Likeness.fit(self._with_acceptance(searcher, queries))),
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
        new_labels_size: the mean size with which the level holds for queries of new labels; None if
            it does not.
    """

    alpha: float
    mean_size: float | None
    constant_size: float | None
    minimum_alpha: float | None = None
    new_labels_size: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class CalibrationReport(Report):
    """The outcome of a calibration; `str` gives a sentence and a table.

    `rows`, `comparison` and `str` fit the rules that they need, see `Rules`.

    Attributes:
        calibration: the calibration itself.
        chosen: the uncertainty that sizes sets, and what was compared for it.
    """

    calibration: Calibration = field(repr=False)
    chosen: ChosenUncertainty

    @property
    def n_tuning(self) -> int:
        """Number of queries that tuned, or of gallery items if these did."""
        tuned = self.calibration.miss_rule.tuned
        return 0 if tuned is None else len(tuned)

    @property
    def n_calibration(self) -> int:
        """Number of calibration queries."""
        return len(self.calibration.calibration_queries)

    @property
    def score_function(self) -> str:
        """How set sizes depend on the query."""
        return self.calibration.miss_rule.score_function.name

    @property
    def coverage(self) -> Coverage | None:
        """Which labels of the gallery calibrated; None if items have no single label."""
        return self.calibration.coverage

    @property
    def coverage_sentence(self) -> str | None:
        """What the coverage means for requests; None if all labels calibrated."""
        if self.coverage is None or not self.coverage.uncalibrated:
            return None
        return self.calibration.sentence_of(self.coverage)

    @property
    def rows(self) -> tuple[CertifiedSize, ...]:
        """The miss risk at each requested alpha."""
        return self.calibration.rows

    @cached_property
    def comparison(self) -> Mapping[Distinct, ComparedSizes]:
        """The mean sizes that "auto" compared, for sets of items (None) and of labels ("label")."""
        tuned_on = self.calibration.tuned_on
        return {
            kind.distinct: rules.compared
            for kind, rules in self.calibration.rules.items()
            if kind.tuned_on == tuned_on
        }

    def _parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        calibration = self.calibration
        queries = f"{self.n_calibration} calibration queries"
        if calibration.left_out is not None:
            items = in_plural(calibration.left_out)
            queries = f"{self.n_calibration} {items} of the gallery calibrated"
        population = calibration.miss_rule.evidence.population
        if population.cluster_word is not None:
            number, kind = population.n_units, population.cluster_word
            queries += f" in {number} clusters ({kind}), each counted alike"
        others = "items of the gallery" if calibration.tuned_on_gallery else "others"
        how = f"{self.score_function} sizes, {queries}"
        if self.n_tuning:
            how += f"; {self.n_tuning} {others} fitted the sizes"
        sentence = at_every_level(
            calibration.options.delta,
            how,
            anytime=calibration.sequential,
            chosen_among=calibration.chosen_among,
        )
        remarks = [str(text) for text in (self.coverage_sentence, calibration.shift) if text]
        return [sentence], calibration.table, remarks


def _size(size: float | None, form: str = ".2f") -> str:
    return "-" if size is None else format(size, form)


def coverage(searcher: Searcher, queries: Queries) -> Coverage | None:
    """Return which labels of a gallery calibration queries have; None if they have no labels."""
    query_labels = queries.population.known_labels
    if searcher.labels is None or query_labels is None:
        return None
    labels = np.unique(searcher.labels)
    return Coverage(int(np.count_nonzero(~np.isin(labels, query_labels))), len(labels))


def known_digests(searcher: Searcher, calibration: Calibration | None) -> NDArray[np.bytes_]:
    """(n,) ascending digests of queries that are not evidence for further ones: those that tuned or
    calibrated, and gallery items, unless these are the queries; none if queries recur.
    """
    if calibration is not None and calibration.options.recurring:
        return digests([])
    queries = digests([]) if calibration is None else calibration.query_digests
    gallery = searcher.foreign_digests
    return np.sort(queries if gallery is None else np.concatenate([queries, gallery]))


def needs_embeddings(searcher: Searcher, uncertainty: str) -> bool:
    """Return True if queries cannot be searched again without their full embeddings."""
    by_draws = QUERY_UNCERTAINTIES[uncertainty].by_draws
    return by_draws or (searcher.encoder is not None and searcher.encoder.reranks)
