"""The guarantee over many random divisions of the same queries into calibration and test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from rcir.levels import ALPHA
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    Bound,
    Constant,
    LabelledResults,
    MinMax,
    ScoreFunction,
    allowed_misses,
)
from rcir.risk.score_functions import set_sizes, widened

REPEATS = 20
SWEPT_ALPHAS = np.round(np.arange(0.02, 0.401, 0.02), 2)
DELTAS = np.array([0.001, 0.01, 0.05, 0.1, 0.2, 0.5])


@dataclass(frozen=True)
class Repeated:
    """One way of choosing sizes over R divisions at m levels; NaN where nothing was certified.

    Attributes:
        risk: (R, m) share of test queries whose set holds no match.
        mean, median, high: (R, m) mean, median and 95% quantile of the sizes of the test queries.
    """

    risk: NDArray[np.float64]
    mean: NDArray[np.float64]
    median: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Repeats:
    """All ways of choosing sizes, over the same divisions.

    Attributes:
        alphas: (m,) levels, ascending, at `delta`.
        delta: the probability that the guarantee may fail with.
        rules: by name. "uncontrolled" takes the smallest sizes whose risk on the calibration part
            is at most alpha, without a confidence bound; "1 - cosine" scales sizes by the distance
            to the nearest item instead of the uncertainty, with control.
        deltas: (d,) further deltas, at `alpha`.
        alpha: the level of `by_delta`.
        by_delta: the retriever's own sizes at those deltas.
        n_calibration, n_test: queries in the two parts of a division.
    """

    alphas: NDArray[np.float64]
    delta: float
    rules: dict[str, Repeated]
    deltas: NDArray[np.float64]
    alpha: float
    by_delta: Repeated
    n_calibration: int
    n_test: int

    @property
    def expected(self) -> float:
        """The share of divisions whose measured risk is above alpha where the bound is exact.

        More than delta: the risk is measured on test queries, whose noise is their own.
        """
        return float(
            norm.sf(norm.isf(self.delta) / math.sqrt(1 + self.n_calibration / self.n_test))
        )

    def summary(self, alphas: Sequence[float]) -> dict[str, dict[str, dict[str, float | None]]]:
        """For each rule and level what `_summary` says."""
        columns = {alpha: int(np.argmin(np.abs(self.alphas - alpha))) for alpha in alphas}
        return {
            name: {f"{alpha:g}": _summary(rule, column, alpha) for alpha, column in columns.items()}
            for name, rule in self.rules.items()
        }

    def summary_of_deltas(self) -> dict[str, dict[str, float | None]]:
        """The same of the retriever's own sizes, for each delta."""
        return {
            f"{delta:g}": _summary(self.by_delta, column, self.alpha)
            for column, delta in enumerate(self.deltas)
        }


def _summary(rule: Repeated, column: int, alpha: float) -> dict[str, float | None]:
    """Summary of a rule at one level, over all divisions.

    The share of divisions that certified it, the share whose risk exceeds it (one that certified
    nothing does not), and of those certified: mean and standard deviation of risk and mean size,
    mean coverage, and the means of median and 95% size.
    """
    known = np.isfinite(rule.risk[:, column])
    risk, size = rule.risk[known, column], rule.mean[known, column]
    found: dict[str, float | None] = {
        "certified": float(known.mean()),
        "violations": float((rule.risk[:, column] > alpha).mean()),
    }
    if not known.any():
        names = ("risk", "risk_std", "coverage", "mean", "mean_std", "median", "high")
        return found | dict.fromkeys(names)
    return found | {
        "risk": float(risk.mean()),
        "risk_std": float(risk.std()),
        "coverage": float(1 - risk.mean()),
        "mean": float(size.mean()),
        "mean_std": float(size.std()),
        "median": float(rule.median[known, column].mean()),
        "high": float(rule.high[known, column].mean()),
    }


def repeat(
    retriever: Retriever,
    tuning: LabelledResults,
    calibration: LabelledResults,
    test: LabelledResults,
    alphas: Sequence[float],
    delta: float,
    seed: int = 0,
) -> Repeats:
    """Divide calibration and test queries anew, calibrate and measure, many times over.

    The score function is fitted on the tuning split once and for all. The parts are as large as the
    original ones.

    Args:
        retriever: calibrated.
        tuning, calibration, test: queries that it searched.
        alphas: levels that must be among those of the sweep.
        delta: of the sweep of alphas; that of deltas is at the alpha nearest to `ALPHA`.
        seed: decides the divisions.
    """
    rng = np.random.default_rng(seed)
    controller = retriever.controllers[None]
    n = len(calibration.ranks)
    divisions = [np.split(rng.permutation(n + len(test.ranks)), [n]) for _ in range(REPEATS)]

    def rule(score_function: ScoreFunction, bound: Bound | None, heuristic: bool = False) -> _Rule:
        candidate_scores, scores = [], []
        for part in (calibration, test):
            results = retriever.judged(part, "cosine") if heuristic else part
            candidate_scores.append(score_function.candidate_scores(results))
            scores.append(score_function.scores(results, part.ranks))
        return _Rule(np.concatenate(candidate_scores), np.concatenate(scores), bound, divisions)

    own = rule(controller.score_function, controller.bound)
    near = MinMax.fit(retriever.judged(tuning, "cosine"), tuning.ranks)
    rules = {
        controller.score_function.name: own,
        "constant": rule(Constant(), controller.bound),
        "1 - cosine": rule(near, controller.bound, heuristic=True),
        "uncontrolled": rule(controller.score_function, None),
    }
    levels = np.union1d(SWEPT_ALPHAS, alphas)
    alpha = float(min(alphas, key=lambda level: abs(level - ALPHA)))
    sweep = [(level, delta) for level in levels.tolist()]
    return Repeats(
        levels,
        delta,
        {name: one.at(sweep) for name, one in rules.items()},
        DELTAS,
        alpha,
        own.at([(alpha, level) for level in DELTAS.tolist()]),
        n,
        len(test.ranks),
    )


@dataclass(frozen=True)
class _Rule:
    """Scores of candidates and of queries, and how the threshold is chosen (None: no
    bound).
    """

    candidate_scores: NDArray[np.float32]
    scores: NDArray[np.float32]
    bound: Bound | None
    divisions: list[list[NDArray[np.int64]]]

    def at(self, levels: list[tuple[float, float]]) -> Repeated:
        """Calibrate on the first part of each division, measure on the second, at each level."""
        shape = (len(self.divisions), len(levels))
        found = Repeated(*(np.full(shape, np.nan) for _ in range(4)))
        for row, (first, second) in enumerate(self.divisions):
            scores = np.sort(self.scores[first])
            for column, (alpha, delta) in enumerate(levels):
                threshold = self._threshold(scores, alpha, delta)
                if threshold is None:
                    continue
                sizes = set_sizes(self.candidate_scores, threshold)[second]
                found.risk[row, column] = np.mean(self.scores[second] > widened(threshold))
                found.mean[row, column] = sizes.mean()
                found.median[row, column], found.high[row, column] = np.quantile(sizes, [0.5, 0.95])
        return found

    def _threshold(self, scores: NDArray[np.float32], alpha: float, delta: float) -> float | None:
        """Of the sorted scores of calibration queries; None if nothing is certified."""
        n = len(scores)
        if self.bound is None:
            allowed = math.floor(alpha * n + 1e-9)  # 0.29 * 100 < 29
        else:
            allowed = allowed_misses(n, alpha, delta, self.bound)
        threshold = float(scores[n - 1 - allowed]) if allowed >= 0 else math.inf
        return threshold if math.isfinite(threshold) else None
