"""Every guarantee of one calibration, measured on test queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rcir.errors import RiskUnattainable
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
from rcir.risk.request import DEFAULT
from rcir.risk.results import widened


@dataclass(frozen=True)
class SearchedSplits:
    """The queries of the three splits with their search results."""

    tuning: LabelledResults
    calibration: LabelledResults
    test: LabelledResults

    def judged(self, retriever: Retriever) -> SearchedSplits:
        """Return the splits with the uncertainty that the retriever was calibrated with."""
        parts = (self.tuning, self.calibration, self.test)
        uncertainty = retriever.require_calibration().uncertainty
        return SearchedSplits(*(retriever.searcher.judged(part, uncertainty) for part in parts))


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
    retriever: Retriever, queries: SearchedSplits, alphas: Sequence[float], delta: float
) -> tuple[list[RiskResult], list[RiskResult]]:
    """Measure the miss risk at each alpha, and all else that the calibration queries certify."""
    calibration = retriever.require_calibration()
    calibrated = calibration.main.calibration
    options: dict[str, dict[str, Any]] = {
        key.replace("-", " "): {"risk": risk.name, "abstain": risk.abstains}
        for key, risk in RISKS.items()
        if key != DEFAULT and not (risk.abstains and calibrated.cluster)
    }
    if calibrated.cluster is None:
        options["miss, whatever alpha"] = {"simultaneous": True}
    for group in calibrated.group_names():
        options[f"miss, group {group}"] = {"group": group}
    if calibrated.groups is not None:
        options["miss, any mix of groups"] = {"mix": "any"}
    options |= {
        f"miss, {query_labels} labels": {"query_labels": query_labels}
        for query_labels in ("new", "any")
        if calibration.can_cover_new_labels
    }
    if "label" in calibration.rules:
        options = {"miss, distinct labels": {"distinct": "label"}} | options
    scored: dict[int, ScoredResults] = {}  # the test queries, by the rule that scored them

    def measured(guarantee: str, given: dict[str, Any]) -> list[RiskResult]:
        requests = [GuaranteeRequest(alpha, delta, **given) for alpha in alphas]
        serving = calibration.serving(requests[0])
        rule = serving.rule_for(requests[0])
        if id(rule) not in scored:
            test = retriever.searcher.judged(queries.test, serving.uncertainty)
            if requests[0].distinct is not None:
                test = test.first_of_each_label()
            scored[id(rule)] = score(rule.score_function, test)
        return [_measure(guarantee, request, rule, scored[id(rule)]) for request in requests]

    others = [row for name, given in options.items() for row in measured(name, given)]
    return measured("miss", {}), others


def _measure(
    guarantee: str, request: GuaranteeRequest, rule: SetRule, test: ScoredResults
) -> RiskResult:
    """Measure one guarantee on the test queries that it covers.

    Args:
        guarantee: its name.
        request: what to certify.
        rule: that certifies it.
        test: the test queries, scored by the rule.
    """
    alpha, delta = float(request.alpha), float(request.delta or 0)  # type: ignore[arg-type]
    row = RiskResult(guarantee, alpha, delta, rule.score_function.name, rule.bound)
    if not request.abstain:
        row = replace(row, constant_size=_constant_size(rule, request, test))
    try:
        certified = rule.guarantee(request)
    except RiskUnattainable as error:
        return replace(row, refusal=str(error))
    covered = np.ones(len(test), bool)
    if request.group is not None and test.groups is not None:
        covered = test.groups == request.group
    if request.abstain:
        sizes = (test.require("selection_score") <= certified.selection_threshold).astype(np.int64)
    else:
        sizes = test.sizes(certified.threshold)
    answered = np.flatnonzero(covered & (sizes > 0))
    row = replace(row, bound=certified.bound, threshold=certified.threshold)
    if len(answered) == 0:
        return replace(row, answered=0.0 if covered.any() else None)
    risk, queries = request.one_risk, test[answered]
    if request.query_labels == "new":
        queries = queries.by_label()
    losses = risk.unit_losses(queries, widened(np.array([certified.threshold])))[:, 0]
    binary = risk.binary and queries.clusters is None
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
    """Return the mean size if every query gets the same; None if that certifies nothing."""
    try:
        certified = rule.of_constant_size().guarantee(request)
    except RiskUnattainable:
        return None
    return float(test.of_constant_size().sizes(certified.threshold).mean())
