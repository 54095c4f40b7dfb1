"""A calibrated retriever, measured on queries that decided nothing about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.quality import Quality, assess
from calibration.repeats import Repeats, repeat
from calibration.risk_results import RiskResult, SearchedSplits, rows
from calibration.subgroups import Part, subgroups
from rcir.data import ImageSet
from rcir.levels import ALPHA
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.retrieval.retriever import Retriever

CHANCE = 0.55  # AUROC below which an uncertainty is called no better than chance


@dataclass(frozen=True)
class Evaluation:
    """The numbers of a calibrated retriever on test queries.

    Attributes:
        dataset, encoder: names.
        uncertainty: the one that set sizes go by, see `Retriever.judged`.
        n_calibration, n_test: numbers of queries.
        rows: the miss risk at the asked levels.
        others: further guarantees at the asked levels.
        comparison: mean set size of each score function at each level on the tuning split, if
            compared.
        quality: of rankings and uncertainties.
        parts: the risk of parts of the test queries, at the certified level nearest to `ALPHA`.
        parts_alpha: that level; None if nothing is certified.
        cluster: what the clusters are that the queries come in, if any.
        n_clusters, n_test_clusters: numbers of those of calibration and test queries, if any.
        repeats: the guarantee over many random divisions of calibration and test queries; None of
            queries in clusters.
        beyond_depth: number of test queries without a match in the search depth.
    """

    dataset: str
    encoder: str
    uncertainty: str
    n_calibration: int
    n_test: int
    rows: list[RiskResult]
    others: list[RiskResult]
    comparison: Mapping[str, Mapping[float, float]]
    quality: Quality
    parts: list[Part]
    parts_alpha: float | None
    cluster: str | None
    n_clusters: int | None
    n_test_clusters: int | None
    repeats: Repeats | None
    beyond_depth: int

    @property
    def certified(self) -> list[RiskResult]:
        """Those of `rows` that are certified."""
        return [row for row in self.rows if row.threshold is not None]

    @property
    def refusal(self) -> str | None:
        """Why nothing is certified, and what would help; None if something is."""
        if self.certified:
            return None
        return max(self.rows, key=lambda row: row.alpha).refusal

    @property
    def depth_advice(self) -> str | None:
        """Advice about true matches beyond the search depth, where these are many."""
        if self.beyond_depth < min(row.alpha for row in self.rows) * self.n_test / 2:
            return None
        return (
            f"{self.beyond_depth} of {self.n_test} test queries have no true match within the "
            "search depth, and are missed whatever the set size: search deeper (depth), or put a "
            "match of each into the gallery"
        )

    @property
    def told_by_chance(self) -> bool:
        """Whether the uncertainty tells a wrong first image no better than chance."""
        return self.quality.numbers.get("auroc_miss", 1.0) < CHANCE

    @property
    def guessing(self) -> list[str]:
        """Kinds of uncertainty that tell a wrong first image no better than chance."""
        numbers = self.quality.numbers
        kinds = QUERY_UNCERTAINTIES
        return [kind for kind in kinds if numbers.get(f"auroc_miss_{kind}", 1.0) < CHANCE]

    def metrics(self) -> dict[str, float]:
        """All numbers under flat names, for tracking."""
        named: dict[str, float | None] = dict(self.quality.numbers)
        for row in (*self.rows, *self.others):
            place = f"alpha-{row.alpha:g}"
            if row.guarantee != "miss":
                place += "/" + re.sub(r"[^\w.-]+", "-", row.guarantee)
            for name in ("threshold", "test_risk", "mean_size", "constant_size", "answered"):
                named[f"{place}/{name}"] = getattr(row, name)
        summary = self.repeats.summary([row.alpha for row in self.rows]) if self.repeats else {}
        for rule, levels in summary.items():
            for alpha, values in levels.items():
                place = f"alpha-{alpha}/divisions/{rule.replace(' ', '')}"
                named |= {f"{place}/{name}": value for name, value in values.items()}
        return {f"test/{name}": value for name, value in named.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        names = (
            *("dataset", "encoder", "uncertainty", "n_calibration", "n_test", "beyond_depth"),
            *("cluster", "n_clusters", "n_test_clusters"),
        )
        return {name: getattr(self, name) for name in names} | {
            "unmatched": self.quality.unmatched,
            "quality": self.quality.numbers,
            "rows": [asdict(row) for row in self.rows],
            "others": [asdict(row) for row in self.others],
            "parts": [asdict(part) | {"risk": part.risk} for part in self.parts],
            "parts_alpha": self.parts_alpha,
            "repeats": self.repeats and self.repeats.summary(self.repeats.alphas.tolist()),
            "repeats_by_delta": self.repeats and self.repeats.summary_of_deltas(),
            "score_function_comparison": self.comparison,
        }


def evaluate(
    dataset: str,
    retriever: Retriever,
    queries: SearchedSplits,
    images: ImageSet,
    alphas: Sequence[float],
    delta: float,
    comparison: Mapping[str, Mapping[float, float]],
    outside: NDArray[np.float64] | None = None,
    baseline: float | None = None,
) -> Evaluation:
    """Measure a calibrated retriever.

    Args:
        dataset: its name, for the report.
        retriever: the one to measure.
        queries: of its data set, searched by it.
        images: the test queries.
        alphas, delta: levels to measure.
        comparison: of score functions, for the report.
        outside: (m,) uncertainties of out-of-distribution queries.
        baseline: recall at 1 of principal components of pixels, if there are pictures.
    """
    controller, test = retriever.controllers[None], queries.test
    misses, others = rows(retriever, queries, alphas, delta)
    certified = [row for row in misses if row.threshold is not None]
    at = min(certified, key=lambda row: abs(row.alpha - ALPHA), default=None)
    quality = assess(retriever, test, images, outside)
    if baseline is not None:
        quality.numbers["recall_at_1_pixels"] = baseline
    return Evaluation(
        dataset=dataset,
        uncertainty=retriever.uncertainty,
        encoder=retriever.options.model or "vectors"
        if retriever.encoder is None
        else retriever.encoder.config.method,
        n_calibration=len(controller.calibration),
        n_test=len(test.ranks),
        rows=misses,
        others=others,
        comparison=comparison,
        quality=quality,
        parts=subgroups(retriever, test, images, float(at.threshold or 0)) if at else [],
        parts_alpha=at.alpha if at else None,
        cluster=controller.cluster,
        n_clusters=controller.calibration.units if controller.cluster else None,
        n_test_clusters=None if test.clusters is None else len(np.unique(test.clusters)),
        repeats=None
        if controller.cluster
        else repeat(retriever, queries.tuning, queries.calibration, test, alphas, delta),
        beyond_depth=int(np.isinf(test.ranks).sum()),
    )
