"""Every guarantee of one calibration, measured on test queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rcir.errors import RiskUnattainable
from rcir.retrieval.retriever import Retriever
from rcir.risk import RISKS, Constant, LabelledResults, Request, RiskController
from rcir.risk.request import DEFAULT
from rcir.risk.score_functions import widened


@dataclass(frozen=True)
class SearchedSplits:
    """The queries of the three splits, as a retriever found them."""

    tuning: LabelledResults
    calibration: LabelledResults
    test: LabelledResults

    def judged(self, retriever: Retriever) -> SearchedSplits:
        """The same by the uncertainty that a retriever was calibrated with."""
        parts = (self.tuning, self.calibration, self.test)
        return SearchedSplits(*map(retriever.judged, parts))

    def distinct(self) -> SearchedSplits:
        """The same of labels."""
        return SearchedSplits(
            *(part.distinct() for part in (self.tuning, self.calibration, self.test))
        )


@dataclass(frozen=True)
class RiskResult:
    """One guarantee, certified and measured; None in what follows alpha if not certified.

    Attributes:
        guarantee: what is controlled, in words.
        alpha, delta: what was asked.
        score_function, bound: how sizes are chosen.
        threshold: the calibrated parameter.
        test_risk: the risk of the test queries.
        mean_size: mean set size over the test queries that got an answer.
        constant_size: the size that all queries would need alike at the same alpha and delta.
        answered: the share of test queries that got an answer.
        refusal: why it is not certified, and what would help.
    """

    guarantee: str
    alpha: float
    delta: float
    score_function: str
    bound: str
    threshold: float | None = None
    test_risk: float | None = None
    mean_size: float | None = None
    constant_size: float | None = None
    answered: float | None = None
    refusal: str | None = None


def rows(
    retriever: Retriever, queries: SearchedSplits, alphas: Sequence[float], delta: float
) -> tuple[list[RiskResult], list[RiskResult]]:
    """The miss risk at each alpha, and what else the same calibration queries certify."""
    controller = retriever.controllers[None]
    options: dict[str, dict[str, Any]] = {
        key.replace("-", " "): {"risk": risk.name, "abstain": risk.abstains}
        for key, risk in RISKS.items()
        if key != DEFAULT and (controller.cluster is None or not risk.independent)
    }
    if controller.cluster is None:
        options["miss, whatever alpha"] = {"simultaneous": True}
    for group in [] if controller.groups is None else sorted(set(controller.groups.tolist())):
        options[f"miss, group {group}"] = {"group": group}
    if controller.groups is not None:
        options["miss, any mix of groups"] = {"mix": "any"}

    def measured(
        controller: RiskController, queries: SearchedSplits, guarantees: dict[str, dict[str, Any]]
    ) -> list[RiskResult]:
        alike = _alike(queries, controller)
        return [
            _measure(controller, alike, Request(alpha, delta, **asked), queries.test, guarantee)
            for guarantee, asked in guarantees.items()
            for alpha in alphas
        ]

    distinct: list[RiskResult] = []
    if "label" in retriever.controllers:
        labels: dict[str, dict[str, Any]] = {"miss, distinct labels": {}}
        distinct = measured(retriever.controllers["label"], queries.distinct(), labels)
    everything = measured(controller, queries, {"miss": {}, **options})
    return everything[: len(alphas)], distinct + everything[len(alphas) :]


def _measure(
    controller: RiskController,
    alike: RiskController,
    request: Request,
    test: LabelledResults,
    guarantee: str,
) -> RiskResult:
    """One guarantee on the test queries that it speaks of."""
    controller = controller.for_risk(request)
    alpha, delta = float(request.alpha), float(request.delta or 0)  # type: ignore[arg-type]
    row = RiskResult(guarantee, alpha, delta, controller.score_function.name, controller.bound)
    if not request.abstain:
        row = replace(row, constant_size=_constant_size(alike, request, test))
    try:
        decision = controller.decide(request)
    except RiskUnattainable as error:
        return replace(row, refusal=str(error))
    asked = np.ones(len(test.ranks), bool)
    if request.group is not None and test.groups is not None:
        asked = test.groups == request.group
    ordered, _ = controller.score_function.ordered(test)
    _, sizes = controller.sets(ordered, decision)
    answered = np.flatnonzero(asked & (sizes > 0))
    row = replace(row, bound=decision.bound, threshold=decision.threshold)
    if len(answered) == 0:
        return replace(row, answered=0.0 if asked.any() else None)
    labelled = test.scored(controller.score_function)[answered]
    threshold = widened(np.array([decision.threshold]))
    return replace(
        row,
        test_risk=float(request.one_risk.unit_losses(labelled, threshold).mean()),
        mean_size=float(sizes[answered].mean()),
        answered=len(answered) / int(asked.sum()),
    )


def _alike(queries: SearchedSplits, controller: RiskController) -> RiskController:
    """The controller of the same queries with one size for all."""
    # Whoever searched them anew may not know of their groups, which the controller does.
    calibration = replace(queries.calibration, groups=controller.groups)
    return RiskController(Constant(), queries.tuning, calibration, controller.bound)


def _constant_size(alike: RiskController, request: Request, test: LabelledResults) -> float | None:
    """The mean size that the constant score function needs for the same guarantee."""
    try:
        decision = alike.decide(request)
    except RiskUnattainable:
        return None
    return float(alike.sets(test, decision)[1].mean())
