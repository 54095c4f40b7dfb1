"""The results of an evaluation on test queries, which screen, report, MLflow and JSON show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibration.open_set import OpenSet
from calibration.quality import Quality
from rcir.options import ALPHA
from rcir.risk.selection import ComparedSizes
from rcir.runs.results import HEADLINE, headline_metrics

# Attributes of `Evaluation` that are plain values in `results.json`.
PLAIN = [*("dataset", "encoder", "uncertainty", "n_calibration", "n_test", "beyond_depth")]
PLAIN += ["cluster", "n_clusters", "n_test_clusters", "parts_alpha", "chosen_among", "left_out"]
PLAIN += ["logistic"]


MATCHABLE = "miss, queries with a match"  # `RiskResult.guarantee` of these


@dataclass(frozen=True)
class RiskResult:
    """One guarantee, certified and measured: a row on the screen, in the report, MLflow and JSON.

    Attributes:
        guarantee: the controlled risk, in words.
        alpha: the requested level.
        delta: the level that certifies it: that of the evaluation, divided by `chosen_among`.
        score_function, bound: how sizes are chosen.
        threshold: the calibrated threshold; None if the guarantee cannot be certified.
        test_risk: mean loss of the test queries that got an answer.
        risk_low, risk_high: 95% confidence interval of the risk, see `rcir.risk.risk_interval`.
        mean_size: mean set size over the test queries that got an answer.
        constant_size: size at the same alpha and delta if all sets had the same.
        logistic_size: mean size of the sets of a logistic regression at the same alpha and delta,
            see `calibration.logistic`; None where it was not fitted.
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
    logistic_size: float | None = None
    answered: float | None = None
    refusal: str | None = None

    @property
    def certified(self) -> bool:
        """True if some threshold certifies the guarantee."""
        return self.threshold is not None

    def cells(self) -> dict[str, str]:
        """Return the cells of a table by the names of their columns."""
        interval = ""
        if self.risk_low is not None and self.risk_high is not None:
            interval = f"{self.risk_low:.4f} to {self.risk_high:.4f}"
        return {
            "certified": "yes" if self.certified else "no",
            "measured risk": "" if self.test_risk is None else f"{self.test_risk:.4f}",
            "95% interval": interval,
            "mean size": "" if self.mean_size is None else f"{self.mean_size:.2f}",
            "one size": "" if self.constant_size is None else f"{self.constant_size:.4g}",
            "logistic": "" if self.logistic_size is None else f"{self.logistic_size:.2f}",
        }


@dataclass(frozen=True)
class Part:
    """Test queries of one kind.

    Attributes:
        kind: "uncertainty", "class" or "group".
        name: of the fifth (1 is the most certain), class or group.
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


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The numbers of a calibrated retriever on test queries.

    Attributes:
        dataset, encoder: names.
        uncertainty: the one that set sizes depend on, see `with_uncertainty`.
        n_calibration, n_test: numbers of queries.
        delta: the requested one.
        rows: the miss risk at the requested levels.
        others: further guarantees at the requested levels.
        curve: the miss risk at the certified levels among `CURVE_ALPHAS` and the requested ones.
        comparison, uncertainties: mean sizes that were compared on the tuning split, see
            `CalibrationReport`; without "encoder" if the encoder has no uncertainty.
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
        open_set: of queries without a match in the gallery, if such queries calibrated.
        logistic: how `RiskResult.logistic_size` was measured, or why it was not, in a sentence.
    """

    dataset: str
    encoder: str
    uncertainty: str
    n_calibration: int
    n_test: int
    delta: float
    rows: list[RiskResult]
    others: list[RiskResult]
    curve: list[RiskResult]
    comparison: ComparedSizes
    uncertainties: ComparedSizes
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
    open_set: OpenSet | None
    logistic: str

    def __repr__(self) -> str:
        sizes = [f"{row.alpha:g}: {row.mean_size:.3g}" for row in self.certified if row.mean_size]
        return f"Evaluation({self.encoder} on {self.dataset}, mean size at alpha {sizes})"

    @property
    def certified(self) -> list[RiskResult]:
        """The certified results of `rows`."""
        return [row for row in self.rows if row.certified]

    @property
    def headline(self) -> RiskResult | None:
        """The certified miss risk at the level nearest to `ALPHA`; None if none is certified."""
        return find_headline(self.rows)

    @property
    def refusal(self) -> str | None:
        """Why nothing is certified, and what would help; None if something is."""
        return None if self.certified else max(self.rows, key=lambda row: row.alpha).refusal

    def metrics(self) -> dict[str, float]:
        """Return the numbers to compare retrievers by in MLflow, see `headline_metrics`."""
        return headline_metrics([asdict(row) for row in self.rows], self.quality.numbers)

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
            "open_set": None if self.open_set is None else asdict(self.open_set),
            "score_function_comparison": self.comparison,
            "uncertainty_comparison": self.uncertainties,
        }


def find_headline(rows: Sequence[RiskResult]) -> RiskResult | None:
    """Return the certified row at the level nearest to `ALPHA`; None if none is certified."""
    certified = (row for row in rows if row.certified)
    return min(certified, key=lambda row: abs(row.alpha - ALPHA), default=None)
