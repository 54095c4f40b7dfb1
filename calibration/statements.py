"""What one calibration certifies, statement by statement, measured on test queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rcir.candidates import Judged
from rcir.errors import RiskUnattainable
from rcir.retriever import Retriever
from rcir.risk import Constant, Outcomes, Request, RiskController


@dataclass(frozen=True)
class Row:
    """One statement, certified and measured; None in what follows alpha if not certified.

    Attributes:
        statement: what is controlled, in words.
        alpha, delta: what was asked.
        adapter, bound: how sizes are chosen.
        kappa: the calibrated parameter.
        test_risk: the risk of the test queries.
        mean_size: mean set size over the test queries that got an answer.
        constant_size: the size that all queries would need alike at the same alpha and delta.
        answered: the share of test queries that got an answer.
    """

    statement: str
    alpha: float
    delta: float
    adapter: str
    bound: str
    kappa: float | None = None
    test_risk: float | None = None
    mean_size: float | None = None
    constant_size: float | None = None
    answered: float | None = None


def others(retriever: Retriever, test: Judged, alphas: Sequence[float], delta: float) -> list[Row]:
    """What else can be certified of the same calibration queries."""
    controller = retriever.controllers[None]
    rows = []
    if "label" in retriever.controllers:
        distinct, distinct_test = retriever.controllers["label"], test.distinct()
        rows = [
            measure(distinct, Request(alpha, delta), distinct_test, "miss, distinct labels")
            for alpha in alphas
        ]
    statements: dict[str, dict[str, Any]] = {
        "miss, abstaining": {"abstain": True},
        "recall": {"risk": "recall"},
        "false discovery": {"risk": "false-discovery"},
    }
    for group in [] if controller.groups is None else sorted(set(controller.groups.tolist())):
        statements[f"miss, group {group}"] = {"group": group}
    rows += [
        measure(controller, Request(alpha, delta, **options), test, statement)
        for statement, options in statements.items()
        for alpha in alphas
    ]
    return rows


def measure(
    controller: RiskController, request: Request, test: Judged, statement: str = "miss"
) -> Row:
    """One statement on the test queries that it speaks of."""
    alpha, delta = float(request.alpha), float(request.delta or 0)  # type: ignore[arg-type]
    row = Row(statement, alpha, delta, controller.adapter.name, controller.bound)
    if not request.abstain:
        row = replace(row, constant_size=constant_size(controller, request, test))
    try:
        decision = controller.decide(request)
    except RiskUnattainable:
        return row
    asked = np.ones(len(test.ranks), bool)
    if request.group is not None and test.groups is not None:
        asked = test.groups == request.group
    sizes = controller.sizes(test.found.rankings, decision)
    rows = np.flatnonzero(asked & (sizes > 0))
    row = replace(row, bound=decision.bound, kappa=decision.kappa)
    if len(rows) == 0:
        return replace(row, answered=0.0 if asked.any() else None)
    outcomes = test.outcomes(controller.adapter).subset(rows)
    return replace(
        row,
        test_risk=float(outcomes.losses(request.risk, np.array([decision.kappa])).mean()),
        mean_size=float(sizes[rows].mean()),
        answered=len(rows) / int(asked.sum()),
    )


def constant_size(controller: RiskController, request: Request, test: Judged) -> float | None:
    """The mean size that the constant adapter needs for the same statement."""
    alike = RiskController(
        Constant(),
        _same_for_all(controller.tuning),
        _same_for_all(controller.calibration),
        controller.bound,
        controller.groups,
    )
    try:
        decision = alike.decide(request)
    except RiskUnattainable:
        return None
    return float(alike.sizes(test.found.rankings, decision).mean())


def _same_for_all(outcomes: Outcomes) -> Outcomes:
    """Outcomes with the prices of the constant adapter."""
    prices = np.arange(outcomes.costs.shape[1], dtype=np.float32)
    return replace(outcomes, costs=np.where(np.isinf(outcomes.costs), np.inf, prices))
