"""A calibrated retriever, measured on test queries that nothing else has seen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from rcir.candidates import Judged
from rcir.data import ImageSet
from rcir.errors import RiskUnattainable
from rcir.metrics import Reliability, confidence, recall_at_k, reliability
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


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        dataset, encoder: names.
        recall_at_1: of the test queries.
        n_calibration, n_test: numbers of queries.
        auroc_miss: how well uncertainty predicts a wrong top-1; None if all or none are wrong.
        auroc_occlusion: how well it predicts an occluded query; None if the set does not tell.
        rows: the miss risk at the asked levels.
        others: further statements at the asked levels.
        comparison: mean set size of each adapter at each level on the adapter split, if compared.
        reliability: recall at 1 against confidence.
        unmatched: number of test queries without a match in the search depth.
    """

    dataset: str
    encoder: str
    recall_at_1: float
    n_calibration: int
    n_test: int
    auroc_miss: float | None
    auroc_occlusion: float | None
    rows: list[Row]
    others: list[Row]
    comparison: Mapping[str, Mapping[float, float]]
    reliability: Reliability
    unmatched: int

    def metrics(self) -> dict[str, float]:
        """All numbers under flat names, for tracking."""
        named = {
            "recall_at_1": self.recall_at_1,
            "auroc_miss": self.auroc_miss,
            "auroc_occlusion": self.auroc_occlusion,
            "calibration_error": self.reliability.error,
        }
        for row in (*self.rows, *self.others):
            place = f"alpha-{row.alpha:g}"
            if row.statement != "miss":
                place += "/" + re.sub(r"[^\w.-]+", "-", row.statement)
            for name in ("kappa", "test_risk", "mean_size", "constant_size", "answered"):
                named[f"{place}/{name}"] = getattr(row, name)
        return {f"test/{name}": value for name, value in named.items() if value is not None}


def evaluate(
    dataset: str,
    retriever: Retriever,
    comparison: Mapping[str, Mapping[float, float]],
    test: Judged,
    images: ImageSet,
    alphas: Sequence[float],
    delta: float,
) -> Evaluation:
    """Measure a calibrated retriever.

    Args:
        dataset: its name, for the report.
        retriever: the one to measure.
        comparison: of adapters, for the report.
        test: the test queries.
        images: their images.
        alphas, delta: levels to measure.
    """
    controller = retriever.controllers[None]
    missed = test.ranks > 1
    uncertainty = test.found.uncertainty
    low, high = controller.tuning.uncertainty.min(), controller.tuning.uncertainty.max()
    return Evaluation(
        dataset=dataset,
        encoder=retriever.encoder.config.method,
        recall_at_1=recall_at_k(test.ranks, 1),
        n_calibration=len(controller.calibration),
        n_test=len(test.ranks),
        auroc_miss=_auroc(missed, uncertainty),
        auroc_occlusion=_auroc(images.attributes.get("occluded"), uncertainty),
        rows=[measure(controller, Request(alpha, delta), test) for alpha in alphas],
        others=others(retriever, test, alphas, delta),
        comparison=comparison,
        reliability=reliability(confidence(uncertainty, low, high), ~missed),
        unmatched=int(np.isinf(test.ranks).sum()),
    )


def others(retriever: Retriever, test: Judged, alphas: Sequence[float], delta: float) -> list[Row]:
    """What else can be certified of the same calibration queries."""
    controller, distinct = retriever.controllers[None], retriever.controllers["label"]
    distinct_test = test.distinct()
    rows = []
    for alpha in alphas:
        request = Request(alpha, delta)
        rows.append(measure(distinct, request, distinct_test, "miss, distinct labels"))
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


def _auroc(positive: NDArray[Any] | None, score: NDArray[np.float64]) -> float | None:
    if positive is None or not 0 < positive.sum() < len(positive):
        return None
    return float(roc_auc_score(positive, score))
