"""What a calibration certifies, and how large the sets are that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rcir.errors import RiskUnattainable
from rcir.risk import (
    LabelledResults,
    Request,
    RiskController,
    constant_baseline,
    decide_chosen,
)
from rcir.risk.choice import ComparedSizes
from rcir.risk.guarantee import stated_confidence
from rcir.risk.request import Distinct


@dataclass(frozen=True)
class CertifiedSize:
    """The miss risk at one level.

    Attributes:
        alpha: the level.
        mean_size: of the sets of the calibration queries; None if the level is not certified.
        constant_size: the size that they would need if all sets had the same size, over the same
            candidates in the same order; None if no size is certified.
        minimum_alpha: where the level is not certified, the smallest that is.
    """

    alpha: float
    mean_size: float | None
    constant_size: float | None
    minimum_alpha: float | None = None


@dataclass(frozen=True)
class CalibrationReport:
    """The outcome of a calibration; `str` gives a sentence and a table.

    Attributes:
        delta: the level that `rows` are certified at.
        n_tuning, n_calibration: numbers of queries.
        score_function: how set sizes depend on the query.
        rows: the miss risk at each asked alpha.
        comparison: what "auto" compared, of sets of images (None) and of labels ("label").
        uncertainties: mean sizes of each uncertainty at each alpha, if they were compared.
        anytime: whether calibration queries were added one by one, so that the rows are of
            guarantees that hold at every moment.
        chosen_among: number of retrievers that this one was chosen among, in spite of which the
            rows hold.
        clusters: number and kind of the clusters that the queries calibrate by, if they do.
    """

    delta: float
    n_tuning: int
    n_calibration: int
    score_function: str
    rows: tuple[CertifiedSize, ...]
    comparison: Mapping[Distinct, ComparedSizes]
    uncertainties: ComparedSizes
    anytime: bool = False
    chosen_among: int = 1
    clusters: tuple[int, str] | None = None

    def __str__(self) -> str:
        first = f"With probability at least {stated_confidence(self.delta)}"
        if self.chosen_among > 1:
            first = f"Chosen among {self.chosen_among} retrievers after looking: w{first[1:]}"
        if self.anytime:
            first += ", at every moment since calibration began"
        queries = f"{self.n_calibration} calibration queries"
        if self.clusters is not None:
            number, kind = self.clusters
            queries += f" by {kind}, {number} of them, each counted alike"
        lines = [
            f"{first}, a true match is missing from at most a fraction alpha of the sets "
            f"({self.score_function} sizes, {queries}; "
            f"{self.n_tuning} others fitted the sizes).",
            f"{'alpha':>6}  {'mean size':>9}  {'one size':>8}",
        ]
        for row in self.rows:
            size = "-" if row.mean_size is None else f"{row.mean_size:.2f}"
            constant = "-" if row.constant_size is None else f"{row.constant_size:.4g}"
            line = f"{row.alpha:>6g}  {size:>9}  {constant:>8}"
            if row.mean_size is None:
                least = row.minimum_alpha
                line += "  not certified" + ("" if least is None else f"; from {least:.4g} on")
            lines.append(line)
        return "\n".join(lines)


def report(
    controller: RiskController,
    tuning: LabelledResults,
    calibration: LabelledResults,
    alphas: Sequence[float],
    delta: float,
    comparison: Mapping[Distinct, ComparedSizes],
    uncertainties: ComparedSizes,
    chosen_among: int,
) -> CalibrationReport:
    """The report of a controller.

    Args:
        controller: of sets of images.
        tuning, calibration: the queries of the two splits, with their search results.
        alphas, delta: levels to report.
        comparison, uncertainties, chosen_among: see `CalibrationReport`.
    """
    score_function = controller.score_function
    baseline = constant_baseline(score_function, tuning, calibration, controller.bound)
    rows = []
    for alpha in alphas:
        request = Request(alpha, delta, anytime=controller.growing)
        constant, size, least = None, None, None
        try:
            decision = decide_chosen(baseline, request, chosen_among)
            constant = float(baseline.calibration.sizes(decision.threshold).mean())
        except RiskUnattainable:
            pass
        try:
            threshold = decide_chosen(controller, request, chosen_among).threshold
            size = float(np.mean(controller.calibration.sizes(threshold)))
        except RiskUnattainable as error:
            least = error.minimum_alpha
        rows.append(CertifiedSize(alpha, size, constant, least))
    kind = controller.cluster
    return CalibrationReport(
        delta=delta,
        n_tuning=len(controller.tuning),
        n_calibration=len(controller.calibration),
        score_function=score_function.name,
        rows=tuple(rows),
        comparison=comparison,
        uncertainties=uncertainties,
        anytime=controller.growing,
        chosen_among=chosen_among,
        clusters=None if kind is None else (controller.calibration.units, kind),
    )
