"""A calibrated retriever, measured on test queries that neither tuned nor calibrated it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.quality import Quality, assess
from calibration.resampling import Resampling, resample
from calibration.risk_results import RiskResult, SearchedSplits, rows
from calibration.subgroups import Part, subgroups
from rcir.data import ImageSet
from rcir.levels import ALPHA
from rcir.retrieval.calibration import CalibrationReport
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults
from rcir.risk.selection import ComparedSizes

# Numbers of each `RiskResult` that are logged as metrics.
TRACKED = (
    "threshold",
    "test_risk",
    "risk_low",
    "risk_high",
    "mean_size",
    "constant_size",
    "answered",
)
CHANCE = 0.55  # AUROC below which an uncertainty is called no better than chance


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
        quality: of rankings and uncertainties.
        parts: the risk of parts of the test queries, at the certified level nearest to `ALPHA`.
        parts_alpha: that level; None if nothing is certified.
        cluster: what the clusters are that the queries come in, if any.
        n_clusters, n_test_clusters: numbers of clusters of calibration and test queries, if any.
        resampling: the guarantee over many random splits of calibration and test queries; None if
            queries come in clusters, or test queries have other labels.
        beyond_depth: number of test queries without a match within the search depth.
        chosen_among: number of retrievers that this one was chosen among; its rows are then
            certified at delta divided by it, and the promise holds at delta.
        labels: which labels of the gallery calibrated, and which of them the test queries have, in
            sentences; None if queries have no single label each.
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
    resampling: Resampling | None
    beyond_depth: int
    chosen_among: int = 1
    labels: str | None = None

    @property
    def certified(self) -> list[RiskResult]:
        """The results of `rows` that are certified."""
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
        """Advice if many test queries have no true match within the search depth."""
        if self.beyond_depth < min(row.alpha for row in self.rows) * self.n_test / 2:
            return None
        return (
            f"{self.beyond_depth} of {self.n_test} test queries have no true match within the "
            "search depth, and are missed whatever the set size: search deeper (depth), or put a "
            "match of each into the gallery"
        )

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
        """Return the numbers to track, under flat names."""
        named: dict[str, float | None] = dict(self.quality.numbers)
        for row in (*self.rows, *self.others):
            place = f"alpha-{row.alpha:g}"
            if row.guarantee != "miss":
                place += "/" + re.sub(r"[^\w.-]+", "-", row.guarantee)
            named |= {f"{place}/{name}": getattr(row, name) for name in TRACKED}
        return {f"test/{name}": value for name, value in named.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        names = (
            "dataset",
            "encoder",
            "uncertainty",
            "n_calibration",
            "n_test",
            "beyond_depth",
            "cluster",
            "n_clusters",
            "n_test_clusters",
        )
        resampling = self.resampling
        return {name: getattr(self, name) for name in names} | {
            "unmatched": self.quality.unmatched,
            "quality": self.quality.numbers,
            "rows": [asdict(row) for row in self.rows],
            "others": [asdict(row) for row in self.others],
            "parts": [asdict(part) | {"risk": part.risk} for part in self.parts],
            "parts_alpha": self.parts_alpha,
            "resampling": resampling and resampling.summary(resampling.alphas.tolist()),
            "resampling_by_delta": resampling and resampling.summary_of_deltas(),
            "score_function_comparison": self.comparison,
            "uncertainty_comparison": self.uncertainties,
        }


def evaluate(
    dataset: str,
    retriever: Retriever,
    queries: SearchedSplits,
    images: ImageSet,
    alphas: Sequence[float],
    delta: float,
    calibrated: CalibrationReport | None = None,
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
        calibrated: what its calibration compared, if known.
        outside: (m,) uncertainties of out-of-distribution queries.
        baseline: recall at 1 of principal components of pixels, if there are pictures.
    """
    rule, test = retriever.require_calibration().main, queries.test
    misses, others = rows(retriever, queries, alphas, delta)
    quality = assess(retriever, test, images, outside)
    if baseline is not None:
        quality.numbers["recall_at_1_pixels"] = baseline
    covered = _covered_share(retriever, test)
    uncertainties = dict(calibrated.uncertainties) if calibrated else {}
    if test.results.require("queries").uncertainty is None:  # then "encoder" is the cosine's
        uncertainties.pop("encoder", None)
    evaluation = Evaluation(
        dataset=dataset,
        uncertainty=retriever.require_calibration().uncertainty,
        encoder=retriever.searcher.options.model or "vectors"
        if retriever.encoder is None
        else retriever.encoder.config.method,
        n_calibration=len(rule.calibration),
        n_test=len(test.ranks),
        rows=misses,
        others=others,
        comparison=calibrated.comparison[None] if calibrated else {},
        uncertainties=uncertainties,
        quality=quality,
        parts=[],
        parts_alpha=None,
        cluster=rule.calibration.cluster,
        n_clusters=rule.calibration.units if rule.calibration.cluster else None,
        n_test_clusters=None if test.clusters is None else len(np.unique(test.clusters)),
        resampling=None
        if rule.calibration.cluster or covered == 0
        else resample(retriever, queries.tuning, queries.calibration, test, alphas, delta),
        beyond_depth=int(np.isinf(test.ranks).sum()),
        chosen_among=retriever.require_calibration().chosen_among,
        labels=_tested_labels(retriever, covered),
    )
    headline = evaluation.headline
    if headline is None:
        return evaluation
    parts = subgroups(retriever, test, images, float(headline.threshold or 0))
    return replace(evaluation, parts=parts, parts_alpha=headline.alpha)


def _covered_share(retriever: Retriever, test: LabelledResults) -> float | None:
    """Return the share of test queries whose label calibrated; None without single labels."""
    if test.query_labels is None:
        return None
    covered = retriever.require_calibration().covers(test.query_labels)
    return None if covered is None else float(covered.mean())


def _tested_labels(retriever: Retriever, covered: float | None) -> str | None:
    """State which labels calibrated, and on which the risks were measured."""
    calibration = retriever.require_calibration()
    if covered is None or calibration.coverage is None:
        return None
    share = f"{100 * covered:.4g}% of the test queries have labels of calibration queries"
    if covered == 1 and calibration.can_cover_new_labels:
        share += "; the guarantee for new labels is measured on these labels too"
    elif covered == 0:
        share = (
            "No test query has the label of a calibration query: the guarantee for the labels of "
            "the calibration queries is measured on other labels"
        )
    sentence = str(calibration.coverage)
    if calibration.coverage.uncovered:
        sentence = calibration.sentence_of(calibration.coverage)
    return f"{sentence[0].upper()}{sentence[1:]}. {share}."
