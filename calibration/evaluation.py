"""Every guarantee of a calibration, measured on test queries, also for parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.quality import Quality, assess
from rcir.data import ImageSet
from rcir.errors import RiskUnattainable
from rcir.options import ALPHA
from rcir.retrieval.calibration import CalibrationReport
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    RISKS,
    GuaranteeRequest,
    LabelledResults,
    ScoredResults,
    SetRule,
    risk_interval,
    score,
)
from rcir.risk.bootstrap import Certified, Estimate, compare_sizes
from rcir.risk.request import DEFAULT
from rcir.risk.results import widened
from rcir.risk.selection import ComparedSizes

CURVE_ALPHAS = tuple(round(0.02 * step, 2) for step in range(1, 21))
CURVE_DRAWS = 200  # of the bootstrap of each size on the curve
DECILES = 10
SHOWN_CLASSES = 10  # classes, those that are missed most
CHANCE = 0.55  # AUROC below which an uncertainty is called no better than chance
# What MLflow's table of runs shows: of each of a few levels, and of `Quality.numbers`.
HEADLINE_LEVELS = 3
HEADLINE = {"mean_size": "mean_size", "constant_size": "constant_size", "risk": "test_risk"}
HEADLINE_QUALITY = ("recall_at_1", "map_at_r", "auroc_miss", "ausc", "ece", "ood_auroc")


@dataclass(frozen=True)
class RiskResult:
    """One guarantee, certified and measured; the fields after `bound` may be None.

    Attributes:
        guarantee: what is controlled, in words.
        alpha, delta: the requested levels.
        score_function, bound: how sizes are chosen.
        threshold: the calibrated threshold; None if the guarantee cannot be certified.
        test_risk: mean loss of the test queries that got an answer.
        risk_low, risk_high: 95% confidence interval of the risk, see `rcir.risk.risk_interval`.
        mean_size: mean set size over the test queries that got an answer.
        constant_size: the size of all sets if every query got the same number of candidates, in
            the same order, at the same alpha and delta.
        answered: share of test queries that got an answer.
        refusal: why it is not certified, and what would help.
    """

    guarantee: str
    alpha: float
    delta: float
    score_function: str
    bound: str
    threshold: float | None = None
    test_risk: float | None = None
    risk_low: float | None = None
    risk_high: float | None = None
    mean_size: float | None = None
    constant_size: float | None = None
    answered: float | None = None
    refusal: str | None = None

    @property
    def certified(self) -> bool:
        """True if some threshold certifies the guarantee."""
        return self.threshold is not None


def rows(
    retriever: Retriever, test: LabelledResults, alphas: Sequence[float], delta: float
) -> tuple[list[RiskResult], list[RiskResult], list[RiskResult]]:
    """Measure the miss risk at each alpha, and all else that the calibration queries certify.

    The third list is the miss risk at `CURVE_ALPHAS` and each alpha, where it is certified.
    """
    calibration = retriever.require_calibration()
    population = calibration.main.calibration.population
    options: dict[str, dict[str, Any]] = {
        key.replace("-", " "): {"risk": risk.name, "abstain": risk.abstains}
        for key, risk in RISKS.items()
        if key != DEFAULT and not (risk.abstains and population.cluster_word)
    }
    if population.clusters is None:
        options["miss, whatever alpha"] = {"simultaneous": True}
    for group in population.group_names:
        options[f"miss, group {group}"] = {"group": group}
    if population.groups is not None and not population.n_mixed_clusters:
        options["miss, any mix of groups"] = {"mix": "any"}
    options |= {
        f"miss, {query_labels} labels": {"query_labels": query_labels}
        for query_labels in ("new", "any")
        if calibration.can_cover_new_labels
    }
    if "label" in calibration.rules:
        options = {"miss, distinct labels": {"distinct": "label"}} | options
    scored: dict[int, ScoredResults] = {}  # the test queries, by the rule that scored them

    def measured(
        guarantee: str, changes: dict[str, Any], levels: Sequence[float] = alphas
    ) -> list[RiskResult]:
        requests = [GuaranteeRequest(alpha, delta, **changes) for alpha in levels]
        answering = calibration.for_request(requests[0])
        rule = answering.rule_for(requests[0])
        if id(rule) not in scored:
            queries = retriever.searcher.judged(test, answering.uncertainty)
            if requests[0].distinct is not None:
                queries = queries.first_of_each_label()
            scored[id(rule)] = score(rule.score_function, queries)
        results = [_measure(guarantee, request, rule, scored[id(rule)]) for request in requests]
        if requests[0].abstain:
            return results
        constant, of_test = rule.of_constant_size(), scored[id(rule)].of_constant_size()
        sizes = [_constant_size(constant, request, of_test) for request in requests]
        return [replace(row, constant_size=s) for row, s in zip(results, sizes, strict=True)]

    others = [row for name, changes in options.items() for row in measured(name, changes)]
    curve = measured("miss", {}, sorted({*CURVE_ALPHAS, *alphas}))
    by_alpha = {row.alpha: row for row in curve}
    return [by_alpha[alpha] for alpha in alphas], others, [row for row in curve if row.certified]


def curve_sizes(
    rule: SetRule, test: LabelledResults, curve: Sequence[RiskResult]
) -> list[Estimate]:
    """Return the mean set size at each level of a curve, with its bootstrap interval.

    Sizes certified by clusters of queries or by another bound than the binomial have no interval.
    """
    if rule.calibration.population.clusters is not None or rule.bound != "binomial":
        return [Estimate(float(row.mean_size or 0), None, None) for row in curve]
    scores = score(rule.score_function, test).require("scores")
    parts = [Certified(rule.calibration.match_score, scores)]
    return [compare_sizes([parts], row.alpha, row.delta, CURVE_DRAWS)[0][0] for row in curve]


def _measure(
    guarantee: str, request: GuaranteeRequest, rule: SetRule, test: ScoredResults
) -> RiskResult:
    """Measure a request on the test queries that it covers, which its rule has scored."""
    alpha, delta = float(request.alpha), float(request.delta or 0)  # type: ignore[arg-type]
    row = RiskResult(guarantee, alpha, delta, rule.score_function.name, rule.bound)
    try:
        certified = rule.guarantee(request)
    except RiskUnattainable as error:
        return replace(row, refusal=str(error))
    covered = np.ones(len(test), bool)
    if request.group is not None and test.population.groups is not None:
        covered = test.population.groups == request.group
    if request.abstain:
        sizes = (test.require("selection_score") <= certified.selection_threshold).astype(np.int64)
    else:
        sizes = test.sizes(certified.threshold)
    row = replace(row, bound=certified.bound, threshold=certified.threshold)
    answered = np.flatnonzero(covered & (sizes > 0))
    if len(answered) == 0:
        return replace(row, answered=0.0 if covered.any() else None)
    risk, queries = request.one_risk, test[answered]
    if request.query_labels == "new":
        queries = queries.by_label()
    losses = risk.unit_losses(queries, widened(np.array([certified.threshold])))[:, 0]
    binary = risk.binary and queries.population.clusters is None
    low, high = risk_interval(float(losses.sum()), len(losses), binary)
    return replace(
        row,
        test_risk=float(losses.mean()),
        risk_low=low,
        risk_high=high,
        mean_size=float(sizes[answered].mean()),
        answered=len(answered) / int(covered.sum()),
    )


def _constant_size(rule: SetRule, request: GuaranteeRequest, test: ScoredResults) -> float | None:
    """Return the mean size by a rule of constant size; None if that certifies nothing."""
    try:
        return float(test.sizes(rule.guarantee(request).threshold).mean())
    except RiskUnattainable:
        return None


@dataclass(frozen=True)
class Part:
    """Test queries of one kind.

    Attributes:
        kind: "uncertainty", "class" or "group".
        name: of the decile (1 is the most certain), class or group.
        n: number of queries.
        missed: how many got a set without a true match.
        low, high: exact 95% interval of their miss rate (Clopper-Pearson); None of queries that
            come in clusters, which are not independent.
        mean_size: of their sets.
    """

    kind: str
    name: str
    n: int
    missed: int
    low: float | None
    high: float | None
    mean_size: float

    @property
    def risk(self) -> float:
        """The share that was missed."""
        return self.missed / self.n


def subgroups(
    retriever: Retriever, test: LabelledResults, images: ImageSet, threshold: float
) -> list[Part]:
    """Count misses by decile of uncertainty, class (those missed most) and group.

    Args:
        retriever: that searched the queries.
        test, images: the test queries.
        threshold: of the guarantee for misses.
    """
    scored = score(retriever.require_calibration().main.score_function, test)
    sizes = scored.sizes(threshold)
    missed = scored.require("match_rank") > sizes
    independent = test.population.clusters is None
    order = np.argsort(test.results.uncertainty, kind="stable")
    decile = np.empty(len(order), np.int64)
    decile[order] = np.arange(len(order)) * min(DECILES, len(order)) // len(order) + 1
    parts = _parts("uncertainty", decile, missed, sizes, independent)
    classes = images.attributes.get("class", images.labels)
    if classes is not None:
        measured_parts = _parts("class", np.asarray(classes), missed, sizes, independent)
        parts += sorted(measured_parts, key=lambda part: (-part.risk, -part.n))[:SHOWN_CLASSES]
    if test.population.groups is not None:
        parts += _parts("group", test.population.groups, missed, sizes, independent)
    return parts


def _parts(
    kind: str,
    names: NDArray[Any],
    missed: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    independent: bool,
) -> list[Part]:
    """Return a part for each name."""
    unique_names, which = np.unique(names, return_inverse=True)
    n = np.bincount(which)
    misses = np.bincount(which, weights=missed).astype(np.int64)
    means = np.bincount(which, weights=sizes) / n
    parts = []
    for name, count, lost, size in zip(unique_names.tolist(), n, misses, means, strict=True):
        low, high = risk_interval(int(lost), int(count)) if independent else (None, None)
        parts.append(Part(kind, str(name), int(count), int(lost), low, high, float(size)))
    return parts


@dataclass(frozen=True)
class Evaluation:
    """The numbers of a calibrated retriever on test queries.

    Attributes:
        dataset, encoder: names.
        uncertainty: the one that set sizes depend on, see `Retriever.judged`.
        n_calibration, n_test: numbers of queries.
        rows: the miss risk at the requested levels.
        others: further guarantees at the requested levels.
        comparison: mean set size of each score function at each level on the tuning split, if
            compared.
        uncertainties: mean set size at each level on the tuning split if sizes depended on one
            uncertainty alone, if compared; without "encoder" if it states none.
        encoder_ratio: mean set size with the encoder's uncertainty beside the neighbourhood, over
            that with the best other one, on the tuning split; None if not compared.
        quality: of rankings and uncertainties.
        parts: the risk of parts of the test queries, at the certified level nearest to `ALPHA`.
        parts_alpha: that level; None if nothing is certified.
        cluster: what the clusters are that the queries come in, if any.
        n_clusters, n_test_clusters: numbers of clusters of calibration and test queries, if any.
        curve: the miss risk at the certified levels among `CURVE_ALPHAS` and the requested ones.
        curve_sizes: mean set size at each level of `curve`, with intervals, see the function.
        beyond_depth: number of test queries whose matches are all beyond the search depth.
        chosen_among: number of retrievers that this one was chosen among; its rows are then
            certified at delta divided by it, and the promise holds at delta.
        labels: which labels of the gallery calibrated, and which of them the test queries have, in
            sentences; None if queries have no single label each.
        left_out: "item", or what else was left out of the search of queries that are gallery items,
            such as "moment"; None if queries are no gallery items.
        other_labels: the plural of what the labels are called, if no test query has the label of a
            calibration query.
    """

    dataset: str
    encoder: str
    uncertainty: str
    n_calibration: int
    n_test: int
    rows: list[RiskResult]
    others: list[RiskResult]
    comparison: ComparedSizes
    uncertainties: ComparedSizes
    quality: Quality
    parts: list[Part]
    parts_alpha: float | None
    cluster: str | None
    n_clusters: int | None
    n_test_clusters: int | None
    curve: list[RiskResult]
    curve_sizes: list[Estimate]
    beyond_depth: int
    encoder_ratio: float | None = None
    chosen_among: int = 1
    labels: str | None = None
    other_labels: str | None = None
    left_out: str | None = None

    @property
    def certified(self) -> list[RiskResult]:
        """The certified results of `rows`."""
        return [row for row in self.rows if row.certified]

    @property
    def headline(self) -> RiskResult | None:
        """The certified miss risk at the level nearest to `ALPHA`; None if none is certified."""
        return min(self.certified, key=lambda row: abs(row.alpha - ALPHA), default=None)

    @property
    def refusal(self) -> str | None:
        """Why nothing is certified, and what would help; None if something is."""
        if self.certified:
            return None
        return max(self.rows, key=lambda row: row.alpha).refusal

    @property
    def depth_advice(self) -> str | None:
        """Advice if many test queries have no true match among the candidates."""
        beyond, unmatched, n = self.beyond_depth, self.quality.unmatched, self.n_test
        if beyond + unmatched < min(row.alpha for row in self.rows) * n / 2:
            return None
        reasons = {
            f"{beyond} of {n} test queries have their true matches beyond the search depth, and "
            "are missed whatever the set size: search deeper (depth)": beyond,
            f"{unmatched} of {n} test queries have no true match in the gallery, and are missed "
            "whatever the depth and the set size": unmatched,
        }
        return ". ".join(reason for reason, count in reasons.items() if count)

    @property
    def is_chance(self) -> bool:
        """True if the uncertainty predicts a wrong first image no better than chance."""
        return self.quality.numbers.get("auroc_miss", 1.0) < CHANCE

    @property
    def guessing(self) -> list[str]:
        """Kinds of uncertainty that predict a wrong first image no better than chance."""
        numbers = self.quality.numbers
        kinds = QUERY_UNCERTAINTIES
        return [kind for kind in kinds if numbers.get(f"auroc_miss_{kind}", 1.0) < CHANCE]

    def metrics(self) -> dict[str, float]:
        """Return the numbers to compare retrievers by in MLflow, see docs/mlflow.md.

        They are of the three levels nearest to `ALPHA`. What is not certified is left out.
        """
        numbers: dict[str, float | None] = {}
        for row in sorted(self.rows, key=lambda row: abs(row.alpha - ALPHA))[:HEADLINE_LEVELS]:
            for name, field in HEADLINE.items():
                numbers[f"certified/alpha_{row.alpha:g}/{name}"] = getattr(row, field)
        for name in HEADLINE_QUALITY:
            numbers[f"quality/{name}"] = self.quality.numbers.get(name)
        return {name: value for name, value in numbers.items() if value is not None}

    def curves(self) -> dict[str, dict[int, float]]:
        """Return curves over alpha to track, by name and 1000 alpha."""
        return {
            f"curve/{name}": {
                round(1000 * row.alpha): value
                for row in self.curve
                if (value := getattr(row, field)) is not None
            }
            for name, field in HEADLINE.items()
        }

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return tables to track, by name: all guarantees, and the quality of the rankings."""
        return {
            "guarantees": [asdict(row) for row in (*self.rows, *self.others)],
            "quality": [
                {"metric": name, "value": value} for name, value in self.quality.numbers.items()
            ],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "dataset": self.dataset,
            "encoder": self.encoder,
            "uncertainty": self.uncertainty,
            "n_calibration": self.n_calibration,
            "n_test": self.n_test,
            "beyond_depth": self.beyond_depth,
            "cluster": self.cluster,
            "n_clusters": self.n_clusters,
            "n_test_clusters": self.n_test_clusters,
            "unmatched": self.quality.unmatched,
            "quality": self.quality.numbers,
            "rows": [asdict(row) for row in self.rows],
            "others": [asdict(row) for row in self.others],
            "parts": [asdict(part) | {"risk": part.risk} for part in self.parts],
            "parts_alpha": self.parts_alpha,
            "score_function_comparison": self.comparison,
            "uncertainty_comparison": self.uncertainties,
            "encoder_uncertainty_ratio": self.encoder_ratio,
        }


def evaluate(
    dataset: str,
    retriever: Retriever,
    test: LabelledResults,
    images: ImageSet,
    alphas: Sequence[float],
    delta: float,
    calibrated: CalibrationReport | None = None,
    outside: NDArray[np.float64] | None = None,
    baseline: float | None = None,
) -> Evaluation:
    """Measure a calibrated retriever.

    Args:
        dataset: name of the data set, for the report.
        retriever: the one to measure.
        test: the test queries, searched by it, with the uncertainty that it was calibrated with.
        images: the test queries.
        alphas, delta: levels to measure.
        calibrated: what its calibration compared, if known.
        outside: (m,) uncertainties of out-of-distribution queries.
        baseline: recall at 1 of principal components of pixels, if there are pictures.
    """
    calibration = retriever.require_calibration()
    rule, tested = calibration.main, test.population
    population = rule.calibration.population
    misses, others, curve = rows(retriever, test, alphas, delta)
    quality = assess(retriever, test, images, outside)
    if baseline is not None:
        quality.numbers["recall_at_1_pixels"] = baseline
    calibrated_share = _calibrated_share(retriever, test)
    uncertainties = dict(calibrated.uncertainties) if calibrated else {}
    if test.results.require("queries").uncertainty is None:  # then "encoder" is the cosine's
        uncertainties.pop("encoder", None)
    evaluation = Evaluation(
        dataset=dataset,
        uncertainty=calibration.uncertainty,
        encoder=retriever.searcher.options.model or "vectors"
        if retriever.encoder is None
        else retriever.encoder.config.method,
        n_calibration=len(rule.calibration),
        n_test=len(test.ranks),
        rows=misses,
        others=others,
        comparison=calibrated.comparison[None] if calibrated else {},
        uncertainties=uncertainties,
        encoder_ratio=calibrated.encoder_ratio if calibrated else None,
        quality=quality,
        parts=[],
        parts_alpha=None,
        cluster=population.cluster_word,
        n_clusters=population.n_units if population.cluster_word else None,
        n_test_clusters=None if tested.clusters is None else tested.n_units,
        curve=curve,
        curve_sizes=curve_sizes(rule, test, curve),
        beyond_depth=int((np.isinf(test.ranks) & (test.n_relevant > 0)).sum()),
        chosen_among=calibration.chosen_among,
        labels=_tested_labels(retriever, calibrated_share),
        other_labels=f"{tested.label_word}s" if calibrated_share == 0 else None,
        left_out=calibration.left_out,
    )
    if (headline := evaluation.headline) is None:
        return evaluation
    parts = subgroups(retriever, test, images, float(headline.threshold or 0))
    return replace(evaluation, parts=parts, parts_alpha=headline.alpha)


def _calibrated_share(retriever: Retriever, test: LabelledResults) -> float | None:
    """Return the share of test queries whose label calibrated; None without single labels."""
    population = retriever.require_calibration().calibration_queries.population
    labels = test.population.single_labels
    if labels is None or population.known_labels is None:
        return None
    return float(np.isin(labels, population.known_labels).mean())


def _tested_labels(retriever: Retriever, calibrated_share: float | None) -> str | None:
    """State which labels calibrated, and on which the risks were measured."""
    calibration = retriever.require_calibration()
    if calibrated_share is None or calibration.coverage is None:
        return None
    share = f"{100 * calibrated_share:.4g}% of the test queries have labels of calibration queries"
    if calibrated_share == 1 and calibration.can_cover_new_labels:
        share += "; the guarantee for new labels is measured on these labels too"
    elif calibrated_share == 0:
        share = (
            "No test query has the label of a calibration query: the guarantee for the labels of "
            "the calibration queries is measured on other labels"
        )
    sentence = calibration.sentence_of(calibration.coverage)
    return f"{sentence[0].upper()}{sentence[1:]}. {share}."
