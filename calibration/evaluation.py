"""A calibrated retriever, measured on test queries that nothing else has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from rcir.data import ImageSet
from rcir.errors import InvalidData, RiskUnattainable
from rcir.metrics import Reliability, confidence, first_match_ranks, recall_at_k, reliability
from rcir.retriever import Candidates, Retriever
from rcir.risk import RiskController


@dataclass(frozen=True)
class Queries:
    """Labelled queries with what the retriever finds for them.

    Attributes:
        images: the queries.
        found: their candidates and uncertainties.
        relevant: (n, depth) whether each candidate is a true match.
        ranks: (n,) rank of the first true match, infinite if there is none in the search depth.
    """

    images: ImageSet
    found: Candidates
    relevant: NDArray[np.bool_]
    ranks: NDArray[np.float64]


def search(retriever: Retriever, images: ImageSet) -> Queries:
    """Search labelled queries in the retriever's gallery, which has labels."""
    if retriever.labels is None:
        raise InvalidData("the gallery has no labels: what is a true match cannot be told")
    found = retriever.search(images.images)
    same = retriever.labels[found.positions] == images.labels[:, None]
    relevant = same & (found.positions >= 0)
    return Queries(images, found, relevant, first_match_ranks(relevant))


@dataclass(frozen=True)
class Row:
    """One level of risk, certified and measured; None in what follows alpha if not certified.

    Attributes:
        alpha, delta: what was asked.
        adapter, bound: how sizes are chosen.
        kappa: the calibrated parameter.
        test_risk: fraction of test queries whose set holds no true match.
        mean_size: mean set size over the test queries.
        constant_size: the size that all queries would need alike at the same alpha and delta.
    """

    alpha: float
    delta: float
    adapter: str
    bound: str
    kappa: float | None
    test_risk: float | None
    mean_size: float | None
    constant_size: int | None


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        dataset, encoder: names.
        recall_at_1: of the test queries.
        n_calibration, n_test: numbers of queries.
        auroc_miss: how well uncertainty predicts a wrong top-1; None if all or none are wrong.
        auroc_occlusion: how well it predicts an occluded query; None if the set does not tell.
        rows: the asked levels.
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
        for row in self.rows:
            for name in ("kappa", "test_risk", "mean_size", "constant_size"):
                named[f"alpha-{row.alpha:g}/{name}"] = getattr(row, name)
        return {f"test/{name}": value for name, value in named.items() if value is not None}


def evaluate(
    dataset: str,
    controller: RiskController,
    constant: RiskController,
    adapter_split: Queries,
    test: Queries,
    encoder: str,
    alphas: Sequence[float],
    delta: float,
) -> Evaluation:
    """Measure a controller on test queries.

    Args:
        dataset, encoder: names for the report.
        controller: the one to measure.
        constant: calibrated on the same queries, with the same size for all.
        adapter_split: its range of uncertainty scales the confidences.
        test: the queries to measure on.
        alphas, delta: levels to measure.
    """
    missed = test.ranks > 1
    low, high = adapter_split.found.uncertainty.min(), adapter_split.found.uncertainty.max()
    return Evaluation(
        dataset=dataset,
        encoder=encoder,
        recall_at_1=recall_at_k(test.ranks, 1),
        n_calibration=controller.n_calibration,
        n_test=len(test.ranks),
        auroc_miss=_auroc(missed, test.found.uncertainty),
        auroc_occlusion=_auroc(test.images.attributes.get("occluded"), test.found.uncertainty),
        rows=[measure(controller, constant, test, alpha, delta) for alpha in alphas],
        reliability=reliability(confidence(test.found.uncertainty, low, high), ~missed),
        unmatched=int(np.isinf(test.ranks).sum()),
    )


def measure(
    controller: RiskController, constant: RiskController, test: Queries, alpha: float, delta: float
) -> Row:
    """One level on the test queries."""
    asked = (alpha, delta, controller.adapter.name, controller.bound)
    constant_size = None
    try:
        one = np.zeros(1)
        constant_size = int(constant.sizes(one, constant.kappa(alpha, delta))[0])
        kappa = controller.kappa(alpha, delta)
    except RiskUnattainable:
        return Row(*asked, None, None, None, constant_size)
    sizes = controller.sizes(test.found.uncertainty, kappa)
    risk = float(np.mean(test.ranks > sizes))
    return Row(*asked, kappa, risk, float(sizes.mean()), constant_size)


def _auroc(positive: NDArray[Any] | None, score: NDArray[np.float64]) -> float | None:
    if positive is None or not 0 < positive.sum() < len(positive):
        return None
    return float(roc_auc_score(positive, score))
