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
    LabelledResults,
    Request,
    RiskController,
    constant_baseline,
    risk_interval,
)
from rcir.risk.request import DEFAULT
from rcir.risk.score_functions import widened


@dataclass(frozen=True)
class SearchedSplits:
    """The queries of the three splits with their search results."""

    tuning: LabelledResults
    calibration: LabelledResults
    test: LabelledResults

    def judged(self, retriever: Retriever) -> SearchedSplits:
        """Return the splits with the uncertainty that the retriever was calibrated with."""
        parts = (self.tuning, self.calibration, self.test)
        return SearchedSplits(*map(retriever.judged, parts))

    def distinct(self) -> SearchedSplits:
        """Return the splits as searches for labels, see `SearchResults.distinct`."""
        return SearchedSplits(
            *(part.distinct() for part in (self.tuning, self.calibration, self.test))
        )


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
    controller = retriever.controllers[None]
    options: dict[str, dict[str, Any]] = {
        key.replace("-", " "): {"risk": risk.name, "abstain": risk.abstains}
        for key, risk in RISKS.items()
        if key != DEFAULT and (controller.cluster is None or not risk.independent)
    }
    if controller.cluster is None:
        options["miss, whatever alpha"] = {"simultaneous": True}
    for group in controller.known_groups():
        options[f"miss, group {group}"] = {"group": group}
    if controller.groups is not None:
        options["miss, any mix of groups"] = {"mix": "any"}

    def measured(
        controller: RiskController, queries: SearchedSplits, guarantees: dict[str, dict[str, Any]]
    ) -> list[RiskResult]:
        baselines: dict[str, RiskController] = {}
        return [
            _measure(guarantee, Request(alpha, delta, **request), controller, baselines, queries)
            for guarantee, request in guarantees.items()
            for alpha in alphas
        ]

    distinct: list[RiskResult] = []
    if "label" in retriever.controllers:
        labels: dict[str, dict[str, Any]] = {"miss, distinct labels": {}}
        distinct = measured(retriever.controllers["label"], queries.distinct(), labels)
    everything = measured(controller, queries, {"miss": {}, **options})
    return everything[: len(alphas)], distinct + everything[len(alphas) :]


def _measure(
    guarantee: str,
    request: Request,
    controller: RiskController,
    baselines: dict[str, RiskController],
    queries: SearchedSplits,
) -> RiskResult:
    """Measure one guarantee on the test queries that it covers.

    Args:
        guarantee: its name.
        request: what to certify.
        controller: of all risks.
        baselines: of one size for all queries, by the score function whose order they follow;
            those that are missing are added.
        queries: the three splits.
    """
    controller, test = controller.for_risk(request), queries.test
    score_function = controller.score_function
    alpha, delta = float(request.alpha), float(request.delta or 0)  # type: ignore[arg-type]
    row = RiskResult(guarantee, alpha, delta, score_function.name, controller.bound)
    ordered, _ = score_function.ordered(test)
    if not request.abstain:
        if score_function.name not in baselines:
            # Splits that were searched again have no groups, which the controller knows.
            calibration = replace(queries.calibration, groups=controller.groups)
            baselines[score_function.name] = constant_baseline(
                score_function, queries.tuning, calibration, controller.bound
            )
        row = replace(
            row, constant_size=_constant_size(baselines[score_function.name], request, ordered)
        )
    try:
        decision = controller.decide(request)
    except RiskUnattainable as error:
        return replace(row, refusal=str(error))
    covered = np.ones(len(test.ranks), bool)
    if request.group is not None and test.groups is not None:
        covered = test.groups == request.group
    _, sizes = controller.sets(ordered, decision)
    answered = np.flatnonzero(covered & (sizes > 0))
    row = replace(row, bound=decision.bound, threshold=decision.threshold)
    if len(answered) == 0:
        return replace(row, answered=0.0 if covered.any() else None)
    risk, scored = request.one_risk, test.scored(score_function)[answered]
    losses = risk.unit_losses(scored, widened(np.array([decision.threshold])))[:, 0]
    binary = risk.binary and scored.clusters is None
    low, high = risk_interval(float(losses.sum()), len(losses), binary)
    return replace(
        row,
        test_risk=float(losses.mean()),
        risk_low=low,
        risk_high=high,
        mean_size=float(sizes[answered].mean()),
        answered=len(answered) / int(covered.sum()),
    )


def _constant_size(
    baseline: RiskController, request: Request, test: LabelledResults
) -> float | None:
    """Return the mean size of the baseline for the same guarantee, None if it has none."""
    try:
        decision = baseline.decide(request)
    except RiskUnattainable:
        return None
    return float(baseline.sets(test, decision)[1].mean())
