"""Measure a calibrated retriever on test queries: every guarantee, also for subgroups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.evaluation import MATCHABLE, Evaluation, Part, RiskResult, find_headline
from calibration.logistic import Logistic, score_by_logistic
from calibration.open_set import measure_open_set
from calibration.quality import assess, assess_probabilities
from calibration.splits import SearchedSplits
from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.retrieval.calibration import Calibration, CalibrationReport
from rcir.risk import (
    RISKS,
    Guarantee,
    LabelledResults,
    RequestOptions,
    ScoredResults,
    SetRule,
    corrected,
    make_request,
    risk_interval,
    score,
)
from rcir.risk.balance import bins_of, thresholds_of
from rcir.risk.losses import MISS
from rcir.risk.options import Distinct
from rcir.risk.results import widen

CURVE_ALPHAS = tuple(round(0.02 * step, 2) for step in range(1, 21))
FIFTHS = 5
SHOWN_CLASSES = 10  # classes, those that are missed most


def measure(
    splits: SearchedSplits,
    alphas: Sequence[float],
    delta: float,
    report: CalibrationReport | None = None,
) -> Evaluation:
    """Measure a calibrated retriever on test queries.

    Args:
        splits: with the uncertainty that the retriever was calibrated with.
        alphas, delta: levels to request, as of the retriever itself: of one that was chosen, each
            is certified at delta divided by `Calibration.chosen_among`.
        report: of its calibration, if known.
    """
    retriever, test = splits.retriever, splits.test
    calibration = retriever.require_calibration()
    logistic = score_by_logistic(splits)
    rows, others, curve = measure_guarantees(splits, alphas, delta, logistic)
    quality = assess(splits)
    uncertainties = {} if report is None else dict(report.chosen.sizes)
    if test.results.require("queries").uncertainty is None:  # then "encoder" is the cosine's
        uncertainties.pop("encoder", None)
    encoder = retriever.searcher.options.model or "vectors"
    if not retriever.searcher.takes_vectors and retriever.encoder is not None:
        encoder = retriever.encoder.config.method
    share = _share_with_calibrated_labels(calibration, test)
    calibrated = calibration.miss_rule.evidence.population
    in_clusters = calibrated.clusters is not None
    headline = find_headline(rows)
    if headline is not None:
        request = make_request(headline.alpha, delta, **calibration.required_options)
        guarantee = calibration.guarantee(request)
        quality = quality.with_probabilities(assess_probabilities(splits, guarantee))
    return Evaluation(
        dataset=splits.dataset,
        encoder=encoder,
        uncertainty=calibration.uncertainty,
        n_calibration=len(calibrated),
        n_test=len(test),
        delta=delta,
        rows=rows,
        others=others,
        curve=curve,
        comparison={} if report is None else report.comparison[None],
        uncertainties=uncertainties,
        quality=quality,
        parts=[] if headline is None else count_subgroups(splits, float(headline.threshold or 0)),
        parts_alpha=None if headline is None else headline.alpha,
        cluster=calibrated.cluster_word,
        n_clusters=calibrated.n_units if in_clusters else None,
        n_test_clusters=test.population.n_units if in_clusters else None,
        beyond_depth=int((np.isinf(test.ranks) & (test.n_relevant > 0)).sum()),
        chosen_among=calibration.chosen_among,
        labels=_state_labels(calibration, share),
        left_out=calibration.left_out,
        other_labels=f"{test.population.label_word}s" if share == 0 else None,
        open_set=measure_open_set(splits, delta),
        logistic=logistic.sentence,
    )


def measure_guarantees(
    splits: SearchedSplits, alphas: Sequence[float], delta: float, logistic: Logistic
) -> tuple[list[RiskResult], list[RiskResult], list[RiskResult]]:
    """Measure the miss risk at each alpha, and all else that the calibration queries certify.

    The third list is the miss risk at `CURVE_ALPHAS` and each alpha, where it is certified.
    """
    retriever = splits.retriever
    calibration = retriever.require_calibration()
    delta_of_each = corrected(delta, calibration.chosen_among)

    @cache
    def score_test_queries(rule: SetRule, distinct: Distinct) -> ScoredResults:
        if rule is calibration.miss_rule:
            return splits.scored_test
        results = calibration.arrange(retriever.searcher, splits.test, rule, distinct)
        return score(rule.score_function, results)

    def measure_levels(
        guarantee: str, options: RequestOptions, levels: Sequence[float]
    ) -> list[RiskResult]:
        requests = [make_request(alpha, delta, **options) for alpha in levels]
        rule = calibration.rule_for(requests[0])
        queries = score_test_queries(rule, requests[0].distinct)
        rows = []
        for request, alpha in zip(requests, levels, strict=True):
            row = RiskResult(guarantee, alpha, delta_of_each, rule.score_function.name, rule.bound)
            try:
                certified = calibration.guarantee(request)
            except (InvalidConfig, RiskUnattainable) as error:
                row = replace(row, refusal=str(error))
                impossible = isinstance(error, InvalidConfig)
            else:
                row, impossible = _measure(row, certified, queries), False
            if not (request.abstain or impossible):
                size = rule.constant_size(request, queries, calibration.chosen_among)
                row = replace(row, constant_size=size)
                scored, tested = logistic.calibration, logistic.test
                if guarantee == MISS.key and scored is not None and tested is not None:
                    baseline = replace(rule, tuned=None, evidence=scored)
                    size = baseline.mean_size(request, tested, calibration.chosen_among)
                    row = replace(row, logistic_size=size)
            rows.append(row)
        return rows

    others = [
        row
        for guarantee, options in _further_requests(calibration).items()
        for row in measure_levels(guarantee, options, alphas)
    ]
    levels = sorted({*CURVE_ALPHAS, *alphas})
    curve = measure_levels(MISS.key, calibration.required_options, levels)
    by_alpha = {row.alpha: row for row in curve}
    return [by_alpha[alpha] for alpha in alphas], others, [row for row in curve if row.certified]


def _further_requests(calibration: Calibration) -> dict[str, RequestOptions]:
    """Return options of requests beside the miss risk, by the guarantee in words."""
    population = calibration.miss_rule.evidence.population
    required = calibration.required_options
    options: dict[str, RequestOptions] = {}
    if "label" in calibration.distinct:
        options["miss, distinct labels"] = {"distinct": "label", **required}
    for key, risk in RISKS.items():
        if key != MISS.key and not (risk.abstains and population.clusters is not None):
            options[key.replace("-", " ")] = {"risk": risk.name, "abstain": risk.abstains}
    if calibration.acceptance is not None and not calibration.sequential:
        options[MATCHABLE] = {"counted": "matchable"}
    if population.clusters is None:
        options["miss, whatever alpha"] = {"simultaneous": True}
    for group in population.group_names:
        options[f"miss, group {group}"] = {"group": group, **required}
    if population.groups is not None and not population.n_mixed_clusters:
        options["miss, any mix of groups"] = {"mix": "any", **required}
    if not calibration.sequential:
        options["miss, each quarter of the uncertainty"] = {"balance": "uncertainty"}
    if calibration.can_cover_new_labels:
        for labels in ("new", "any"):
            options[f"miss, {labels} labels"] = {"query_labels": labels}
    return options


def _measure(row: RiskResult, certified: Guarantee, test: ScoredResults) -> RiskResult:
    """Measure a guarantee on the test queries that it covers, which its rule has scored."""
    request, covered = certified.request, np.ones(len(test), bool)
    if request.group is not None and test.population.groups is not None:
        covered = test.population.groups == request.group
    if request.counted == "matchable":
        covered = covered & test.matchable
    if (limit := certified.selection_threshold) is not None:
        sizes = (test.require("selection_score") <= limit).astype(np.int64)
    else:
        sizes = test.sizes(thresholds_of(certified.certificate, test.uncertainty))
    row = replace(row, bound=certified.bound, threshold=certified.threshold)
    answered = np.flatnonzero(covered & (sizes > 0))
    if len(answered) == 0:
        return replace(row, answered=0.0 if covered.any() else None)
    risk, queries = request.risk, test[answered]
    assert risk is not None  # rows are of one alpha
    if request.labels == "new":
        queries = queries.by_label()
    losses = max(
        (
            risk.unit_losses(queries[rows], widen(np.array([threshold])))[:, 0]
            for threshold, rows in _bins(certified, queries)
        ),
        key=np.mean,
    )
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


def _bins(
    certified: Guarantee, queries: ScoredResults
) -> Iterator[tuple[float, NDArray[np.bool_]]]:
    """Yield threshold and rows of each bin that holds queries; of one bin without `balance`."""
    certificate = certified.certificate
    thresholds = certificate.thresholds or (certificate.threshold,)
    in_bin = bins_of(queries.require("uncertainty"), np.array(certificate.cuts))
    for number, threshold in enumerate(thresholds):
        if (rows := in_bin == number).any():
            yield threshold, rows


def count_subgroups(splits: SearchedSplits, threshold: float) -> list[Part]:
    """Count misses by fifth of uncertainty, class (those missed most) and group."""
    test, images = splits.test, splits.images
    population = test.population
    sizes = splits.scored_test.sizes(threshold)
    missed = splits.scored_test.require("match_rank") > sizes
    in_clusters = population.clusters is not None

    def count(kind: str, names: NDArray[Any]) -> list[Part]:
        unique, which, n = np.unique(names, return_inverse=True, return_counts=True)
        n_missed = np.bincount(which, weights=missed).astype(np.int64)
        means = np.bincount(which, weights=sizes) / n
        parts = []
        columns = unique, n.tolist(), n_missed.tolist(), means.tolist()
        for name, n_queries, lost, mean in zip(*columns, strict=True):
            low, high = (None, None) if in_clusters else risk_interval(lost, n_queries)
            parts.append(Part(kind, str(name), n_queries, lost, low, high, mean))
        return parts

    order = np.argsort(test.results.uncertainty, kind="stable")
    fifth = np.empty(len(order), np.int64)
    fifth[order] = np.arange(len(order)) * min(FIFTHS, len(order)) // len(order) + 1
    parts = count("uncertainty", fifth)
    classes = images.attributes.get("class", images.labels)
    if classes is not None:
        by_class = count("class", np.asarray(classes))
        parts += sorted(by_class, key=lambda part: (-part.risk, -part.n))[:SHOWN_CLASSES]
    return parts if population.groups is None else parts + count("group", population.groups)


def _share_with_calibrated_labels(calibration: Calibration, test: LabelledResults) -> float | None:
    """Return the share of test queries whose label calibrated; None without single labels."""
    labels = test.population.single_labels
    calibrated = calibration.calibration_queries.population.known_labels
    if labels is None or calibrated is None:
        return None
    return float(np.isin(labels, calibrated).mean())


def _state_labels(calibration: Calibration, calibrated_share: float | None) -> str | None:
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
