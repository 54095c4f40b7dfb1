"""Measure a calibrated retriever on test queries: every guarantee, also for subgroups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.quality import Quality, assess
from calibration.splits import SearchedSplits
from rcir.errors import RiskUnattainable
from rcir.options import ALPHA
from rcir.retrieval.calibration import Calibration, CalibrationReport
from rcir.retrieval.query_uncertainty import with_uncertainty
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    RISKS,
    LabelledResults,
    Request,
    RequestOptions,
    ScoredResults,
    SetRule,
    corrected,
    make_request,
    risk_interval,
    score,
)
from rcir.risk.losses import MISS
from rcir.risk.options import Distinct
from rcir.risk.results import widened
from rcir.risk.selection import ComparedSizes

CURVE_ALPHAS = tuple(round(0.02 * step, 2) for step in range(1, 21))
DECILES = 10
SHOWN_CLASSES = 10  # classes, those that are missed most
# What MLflow's table of runs shows: of each of a few levels, and of `Quality.numbers`.
HEADLINE_LEVELS = 3
HEADLINE = {"mean_size": "mean_size", "constant_size": "constant_size", "risk": "test_risk"}
HEADLINE_QUALITY = ("recall_at_1", "map_at_r", "auroc_miss", "ausc", "ece", "ood_auroc")
# Attributes of `Evaluation` that are plain values in `results.json`.
PLAIN = [*("dataset", "encoder", "uncertainty", "n_calibration", "n_test", "beyond_depth")]
PLAIN += ["cluster", "n_clusters", "n_test_clusters", "parts_alpha"]


@dataclass(frozen=True)
class RiskResult:
    """One guarantee, certified and measured: a row on the screen, in the report, MLflow and JSON.

    Attributes:
        guarantee: what is controlled, in words.
        alpha, delta: the requested levels.
        score_function, bound: how sizes are chosen.
        threshold: the calibrated threshold; None if the guarantee cannot be certified.
        test_risk: mean loss of the test queries that got an answer.
        risk_low, risk_high: 95% confidence interval of the risk, see `rcir.risk.risk_interval`.
        mean_size: mean set size over the test queries that got an answer.
        constant_size: size at the same alpha and delta if all sets had the same.
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

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table: certified, risk, interval, mean size, one size for all."""
        interval = ""
        if self.risk_low is not None and self.risk_high is not None:
            interval = f"{self.risk_low:.4f} to {self.risk_high:.4f}"
        return (
            "yes" if self.certified else "no",
            "" if self.test_risk is None else f"{self.test_risk:.4f}",
            interval,
            "" if self.mean_size is None else f"{self.mean_size:.2f}",
            "" if self.constant_size is None else f"{self.constant_size:.4g}",
        )


@dataclass(frozen=True)
class Part:
    """Test queries of one kind.

    Attributes:
        kind: "uncertainty", "class" or "group".
        name: of the decile (1 is the most certain), class or group.
        n: number of queries.
        missed: number of queries that got a set without a true match.
        low, high: exact 95% interval of their miss rate (Clopper-Pearson); None for queries that
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


@dataclass(frozen=True)
class Evaluation:
    """The numbers of a calibrated retriever on test queries.

    Attributes:
        dataset, encoder: names.
        uncertainty: the one that set sizes depend on, see `with_uncertainty`.
        n_calibration, n_test: numbers of queries.
        rows: the miss risk at the requested levels.
        others: further guarantees at the requested levels.
        curve: the miss risk at the certified levels among `CURVE_ALPHAS` and the requested ones.
        comparison, uncertainties, encoder_ratio: mean sizes that were compared on the tuning split,
            see `CalibrationReport`; without "encoder" if the encoder has no uncertainty.
        quality: of rankings and uncertainties.
        parts: the risk of parts of the test queries, at the certified level nearest to `ALPHA`.
        parts_alpha: that level; None if nothing is certified.
        cluster: what the clusters are that the queries come in, if any.
        n_clusters, n_test_clusters: numbers of clusters of calibration and test queries, if any.
        beyond_depth: number of test queries whose matches are all beyond the search depth.
        chosen_among: number of retrievers that this one was chosen among; its rows are certified
            at delta divided by it.
        labels: which labels of the gallery calibrated, and which of them the test queries have, in
            sentences; None if queries have no single label each.
        left_out: what was left out of the search of queries that are gallery items, such as "item"
            or "moment"; None if queries are not gallery items.
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
    curve: list[RiskResult]
    comparison: ComparedSizes
    uncertainties: ComparedSizes
    encoder_ratio: float | None
    quality: Quality
    parts: list[Part]
    parts_alpha: float | None
    cluster: str | None
    n_clusters: int | None
    n_test_clusters: int | None
    beyond_depth: int
    chosen_among: int
    labels: str | None
    left_out: str | None
    other_labels: str | None

    @property
    def certified(self) -> list[RiskResult]:
        """The certified results of `rows`."""
        return [row for row in self.rows if row.certified]

    @property
    def headline(self) -> RiskResult | None:
        """The certified miss risk at the level nearest to `ALPHA`; None if none is certified."""
        return _headline(self.rows)

    @property
    def refusal(self) -> str | None:
        """Why nothing is certified, and what would help; None if something is."""
        return None if self.certified else max(self.rows, key=lambda row: row.alpha).refusal

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
        return {name: getattr(self, name) for name in PLAIN} | {
            "unmatched": self.quality.unmatched,
            "quality": self.quality.numbers,
            "rows": [asdict(row) for row in self.rows],
            "others": [asdict(row) for row in self.others],
            "parts": [asdict(part) | {"risk": part.risk} for part in self.parts],
            "score_function_comparison": self.comparison,
            "uncertainty_comparison": self.uncertainties,
            "encoder_uncertainty_ratio": self.encoder_ratio,
        }


def measure(
    splits: SearchedSplits,
    alphas: Sequence[float],
    delta: float,
    report: CalibrationReport | None = None,
) -> Evaluation:
    """Measure a calibrated retriever on test queries.

    Args:
        splits: with the uncertainty that the retriever was calibrated with.
        alphas, delta: levels to measure; delta is divided by `Calibration.chosen_among`, so that
            the measured sets are those that the retriever returns.
        report: of its calibration, if known.
    """
    retriever, test = splits.retriever, splits.test
    calibration = retriever.require_calibration()
    delta = corrected(delta, calibration.chosen_among)
    rows, others, curve = measure_guarantees(retriever, test, alphas, delta)
    quality = assess(splits)
    uncertainties = {} if report is None else dict(report.uncertainties)
    if test.results.require("queries").uncertainty is None:  # then "encoder" is the cosine's
        uncertainties.pop("encoder", None)
    encoder = retriever.searcher.options.model or "vectors"
    if retriever.encoder is not None:
        encoder = retriever.encoder.config.method
    share = _calibrated_share(calibration, test)
    calibrated = calibration.miss_rule.calibration.population
    in_clusters = calibrated.clusters is not None
    headline = _headline(rows)
    return Evaluation(
        dataset=splits.dataset,
        encoder=encoder,
        uncertainty=calibration.uncertainty,
        n_calibration=len(calibrated),
        n_test=len(test),
        rows=rows,
        others=others,
        curve=curve,
        comparison={} if report is None else report.comparison[None],
        uncertainties=uncertainties,
        encoder_ratio=None if report is None else report.encoder_ratio,
        quality=quality,
        parts=[] if headline is None else subgroups(splits, float(headline.threshold or 0)),
        parts_alpha=None if headline is None else headline.alpha,
        cluster=calibrated.cluster_word,
        n_clusters=calibrated.n_units if in_clusters else None,
        n_test_clusters=test.population.n_units if in_clusters else None,
        beyond_depth=int((np.isinf(test.ranks) & (test.n_relevant > 0)).sum()),
        chosen_among=calibration.chosen_among,
        labels=_tested_labels(calibration, share),
        left_out=calibration.left_out,
        other_labels=f"{test.population.label_word}s" if share == 0 else None,
    )


def _headline(rows: Sequence[RiskResult]) -> RiskResult | None:
    """Return the certified row at the level nearest to `ALPHA`; None if none is certified."""
    certified = (row for row in rows if row.certified)
    return min(certified, key=lambda row: abs(row.alpha - ALPHA), default=None)


def measure_guarantees(
    retriever: Retriever, test: LabelledResults, alphas: Sequence[float], delta: float
) -> tuple[list[RiskResult], list[RiskResult], list[RiskResult]]:
    """Measure the miss risk at each alpha, and all else that the calibration queries certify.

    The third list is the miss risk at `CURVE_ALPHAS` and each alpha, where it is certified.
    """
    calibration = retriever.require_calibration()

    @cache
    def scored(rule: SetRule, distinct: Distinct) -> tuple[ScoredResults, ScoredResults]:
        """Score the test queries by a rule, and by the same rule of constant size."""
        results = with_uncertainty(retriever.searcher, test, rule.uncertainty)
        queries = score(
            rule.score_function, results if distinct is None else results.first_of_each_label()
        )
        return queries, queries.of_constant_size()

    def measure_levels(
        guarantee: str, options: RequestOptions, levels: Sequence[float]
    ) -> list[RiskResult]:
        requests = [make_request(alpha, delta, **options) for alpha in levels]
        rule = calibration.rule_for(requests[0])
        constant = rule.of_constant_size()
        rows = []
        for request, alpha in zip(requests, levels, strict=True):
            queries, of_constant_size = scored(rule, request.distinct)
            row = RiskResult(guarantee, alpha, delta, rule.score_function.name, rule.bound)
            if not request.abstain:
                size = _constant_size(request, constant, of_constant_size)
                row = replace(row, constant_size=size)
            rows.append(_measure(row, request, rule, queries))
        return rows

    others = [
        row
        for guarantee, options in _further_requests(calibration).items()
        for row in measure_levels(guarantee, options, alphas)
    ]
    curve = measure_levels("miss", {}, sorted({*CURVE_ALPHAS, *alphas}))
    by_alpha = {row.alpha: row for row in curve}
    return [by_alpha[alpha] for alpha in alphas], others, [row for row in curve if row.certified]


def _further_requests(calibration: Calibration) -> dict[str, RequestOptions]:
    """Return options of requests beside the miss risk, by the guarantee in words."""
    population = calibration.miss_rule.calibration.population
    options: dict[str, RequestOptions] = {}
    if "label" in calibration.distinct:
        options["miss, distinct labels"] = {"distinct": "label"}
    for key, risk in RISKS.items():
        if key != MISS.key and not (risk.abstains and population.clusters is not None):
            options[key.replace("-", " ")] = {"risk": risk.name, "abstain": risk.abstains}
    if population.clusters is None:
        options["miss, whatever alpha"] = {"simultaneous": True}
    for group in population.group_names:
        options[f"miss, group {group}"] = {"group": group}
    if population.groups is not None and not population.n_mixed_clusters:
        options["miss, any mix of groups"] = {"mix": "any"}
    if calibration.can_cover_new_labels:
        for labels in ("new", "any"):
            options[f"miss, {labels} labels"] = {"query_labels": labels}
    return options


def _measure(row: RiskResult, request: Request, rule: SetRule, test: ScoredResults) -> RiskResult:
    """Measure a request on the test queries that it covers, which its rule has scored."""
    try:
        certified = rule.guarantee(request)
    except RiskUnattainable as error:
        return replace(row, refusal=str(error))
    covered = np.ones(len(test), bool)
    if request.group is not None and test.population.groups is not None:
        covered = test.population.groups == request.group
    if (limit := certified.selection_threshold) is not None:
        sizes = (test.require("selection_score") <= limit).astype(np.int64)
    else:
        sizes = test.sizes(certified.threshold)
    row = replace(row, bound=certified.bound, threshold=certified.threshold)
    answered = np.flatnonzero(covered & (sizes > 0))
    if len(answered) == 0:
        return replace(row, answered=0.0 if covered.any() else None)
    risk, queries = request.risk, test[answered]
    assert risk is not None  # rows are of one alpha
    if request.labels == "new":
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


def _constant_size(request: Request, rule: SetRule, test: ScoredResults) -> float | None:
    """Return the mean size by a rule of constant size; None if that certifies nothing."""
    try:
        return float(test.sizes(rule.guarantee(request).threshold).mean())
    except RiskUnattainable:
        return None


def subgroups(splits: SearchedSplits, threshold: float) -> list[Part]:
    """Count misses by decile of uncertainty, class (those missed most) and group."""
    test, images = splits.test, splits.images
    population = test.population
    scored = score(splits.retriever.require_calibration().miss_rule.score_function, test)
    sizes = scored.sizes(threshold)
    missed, in_clusters = scored.require("match_rank") > sizes, population.clusters is not None

    def count(kind: str, names: NDArray[Any]) -> list[Part]:
        unique, which, n = np.unique(names, return_inverse=True, return_counts=True)
        n_missed = np.bincount(which, weights=missed).astype(np.int64)
        means = np.bincount(which, weights=sizes) / n
        parts = []
        columns = unique, n.tolist(), n_missed.tolist(), means.tolist()
        for name, count, lost, mean in zip(*columns, strict=True):
            low, high = (None, None) if in_clusters else risk_interval(lost, count)
            parts.append(Part(kind, str(name), count, lost, low, high, mean))
        return parts

    order = np.argsort(test.results.uncertainty, kind="stable")
    decile = np.empty(len(order), np.int64)
    decile[order] = np.arange(len(order)) * min(DECILES, len(order)) // len(order) + 1
    parts = count("uncertainty", decile)
    classes = images.attributes.get("class", images.labels)
    if classes is not None:
        by_class = count("class", np.asarray(classes))
        parts += sorted(by_class, key=lambda part: (-part.risk, -part.n))[:SHOWN_CLASSES]
    return parts if population.groups is None else parts + count("group", population.groups)


def _calibrated_share(calibration: Calibration, test: LabelledResults) -> float | None:
    """Return the share of test queries whose label calibrated; None without single labels."""
    labels = test.population.single_labels
    calibrated = calibration.calibration_queries.population.known_labels
    if labels is None or calibrated is None:
        return None
    return float(np.isin(labels, calibrated).mean())


def _tested_labels(calibration: Calibration, calibrated_share: float | None) -> str | None:
    """State which labels calibrated, and on which the risks were measured."""
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
