"""The guarantee over many random splits of the same queries into calibration and test queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from rcir.options import ALPHA
from rcir.retrieval.retriever import Retriever
from rcir.risk import Bound, LabelledResults, MinMax, ScoredResults, allowed_misses, score
from rcir.risk.results import widened

SPLITS = 200  # the share of splits above alpha then has a standard error below 0.04
SWEPT_ALPHAS = np.round(np.arange(0.02, 0.401, 0.02), 2)
DELTAS = np.array([0.001, 0.01, 0.05, 0.1, 0.2, 0.5])


@dataclass(frozen=True)
class ResampledRule:
    """Risks and sizes of one rule for set sizes over R splits at m levels.

    A split that certified nothing has NaN.

    Attributes:
        risk: (R, m) share of test queries whose set holds no match.
        mean, median, high: (R, m) mean, median and 95% quantile of the set sizes of test queries.
    """

    risk: NDArray[np.float64]
    mean: NDArray[np.float64]
    median: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Resampling:
    """Results of all rules for set sizes over the same random splits.

    Attributes:
        alphas: (m,) levels, ascending, at `delta`.
        delta: the probability that the guarantee may fail with.
        rules: by name, the retriever's own score function first. All rules take the candidates in
            the same order. "constant" gives every query the same size; "1 - cosine" scales sizes by
            the distance to the nearest item instead of the uncertainty; "uncontrolled" takes the
            smallest sizes whose risk on the calibration queries is at most alpha, without a
            confidence bound.
        deltas: (d,) further deltas, at `alpha`.
        alpha: the level of `by_delta`.
        by_delta: the retriever's own sizes at those deltas.
        n_calibration, n_test: numbers of queries in the two parts of a split.
    """

    alphas: NDArray[np.float64]
    delta: float
    rules: dict[str, ResampledRule]
    deltas: NDArray[np.float64]
    alpha: float
    by_delta: ResampledRule
    n_calibration: int
    n_test: int

    @property
    def expected(self) -> float:
        """The share of splits whose measured risk is above alpha if the bound is exact.

        It is larger than delta, because the risk is measured on a finite number of test queries.
        """
        return float(self.expected_at(self.delta))

    def expected_at(self, delta: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return `expected` at other deltas, by the normal approximation of both numbers of
        misses.
        """
        scale = math.sqrt(1 + self.n_calibration / self.n_test)
        return np.asarray(norm.sf(norm.isf(delta) / scale), np.float64)

    def summary(self, alphas: Sequence[float]) -> dict[str, dict[str, dict[str, float | None]]]:
        """Return `_summary` of each rule at each of some levels."""
        columns = {alpha: int(np.argmin(np.abs(self.alphas - alpha))) for alpha in alphas}
        return {
            name: {f"{alpha:g}": _summary(rule, column, alpha) for alpha, column in columns.items()}
            for name, rule in self.rules.items()
        }

    def summary_of_deltas(self) -> dict[str, dict[str, float | None]]:
        """Return `_summary` of the retriever's own sizes at each delta."""
        return {
            f"{delta:g}": _summary(self.by_delta, column, self.alpha)
            for column, delta in enumerate(self.deltas)
        }


def _summary(rule: ResampledRule, column: int, alpha: float) -> dict[str, float | None]:
    """Summarise a rule at one level over all splits.

    The share of splits that certified it, the share whose risk exceeds it (one that certified
    nothing does not), and of those certified: mean and standard deviation of risk and mean size,
    mean coverage, and the means of median and 95% size.
    """
    certified = np.isfinite(rule.risk[:, column])
    risk, size = rule.risk[certified, column], rule.mean[certified, column]
    summary: dict[str, float | None] = {
        "certified": float(certified.mean()),
        "violations": float((rule.risk[:, column] > alpha).mean()),
    }
    if not certified.any():
        names = ("risk", "risk_std", "coverage", "mean", "mean_std", "median", "high")
        return summary | dict.fromkeys(names)
    return summary | {
        "risk": float(risk.mean()),
        "risk_std": float(risk.std()),
        "coverage": float(1 - risk.mean()),
        "mean": float(size.mean()),
        "mean_std": float(size.std()),
        "median": float(rule.median[certified, column].mean()),
        "high": float(rule.high[certified, column].mean()),
    }


def resample(
    retriever: Retriever,
    tuning: LabelledResults,
    calibration: LabelledResults,
    test: LabelledResults,
    alphas: Sequence[float],
    delta: float,
) -> Resampling:
    """Split calibration and test queries anew, calibrate and measure, many times.

    The score function stays as it was fitted on the tuning split. The parts are as large as the
    original ones.

    Args:
        retriever: calibrated.
        tuning, calibration, test: queries that it searched.
        alphas: levels that are added to those of the sweep.
        delta: of the sweep of alphas; the sweep of deltas is at the alpha nearest to `ALPHA`.
    """
    rng = np.random.default_rng(0)
    searcher, main = retriever.searcher, retriever.require_calibration().main
    score_function, n = main.score_function, len(calibration.ranks)
    splits = [np.split(rng.permutation(n + len(test.ranks)), [n]) for _ in range(SPLITS)]
    cosine = MinMax.fit(searcher.judged(tuning, "cosine").results, tuning.ranks)
    scored: dict[str, list[ScoredResults]] = {"adaptive": [], "constant": [], "cosine": []}
    for part in (calibration, test):
        adaptive_scores = score(score_function, part)
        scored["adaptive"].append(adaptive_scores)
        scored["constant"].append(adaptive_scores.of_constant_size())
        scored["cosine"].append(
            _in_order_of(adaptive_scores, cosine, searcher.judged(part, "cosine"))
        )

    def rule(name: str, bound: Bound | None) -> _Rule:
        parts = scored[name]
        return _Rule(
            np.concatenate([part.require("scores") for part in parts]),
            np.concatenate([part.match_score for part in parts]),
            bound,
            splits,
        )

    adaptive = rule("adaptive", main.bound)
    rules = {
        score_function.name: adaptive,
        "constant": rule("constant", main.bound),
        "1 - cosine": rule("cosine", main.bound),
        "uncontrolled": rule("adaptive", None),
    }
    levels = np.union1d(SWEPT_ALPHAS, alphas)
    alpha = float(min(alphas, key=lambda level: abs(level - ALPHA)))
    sweep = [(level, delta) for level in levels.tolist()]
    return Resampling(
        alphas=levels,
        delta=delta,
        rules={name: one.at(sweep) for name, one in rules.items()},
        deltas=DELTAS,
        alpha=alpha,
        by_delta=adaptive.at([(alpha, level) for level in DELTAS.tolist()]),
        n_calibration=n,
        n_test=len(test.ranks),
    )


def _in_order_of(
    scored: ScoredResults, score_function: MinMax, queries: LabelledResults
) -> ScoredResults:
    """Return the scores by another uncertainty of candidates in the order of scored results."""
    scale = score_function.scale(queries.results.uncertainty).astype(np.float32)[:, None]
    constant = scored.of_constant_size()
    return ScoredResults.of(constant.require("scores") / scale, scored.require("relevant"))


@dataclass(frozen=True)
class _Rule:
    """Scores of candidates and of queries, and the bound that chooses the threshold, if any."""

    candidate_scores: NDArray[np.float32]
    scores: NDArray[np.float32]
    bound: Bound | None
    splits: list[list[NDArray[np.int64]]]

    def at(self, levels: list[tuple[float, float]]) -> ResampledRule:
        """Calibrate on the first part of each split, measure on the second, at each level."""
        n = len(self.splits[0][0])
        second = np.array([second for _, second in self.splits])
        allowed = np.array([self._allowed(n, alpha, delta) for alpha, delta in levels])
        calibration = np.sort([self.scores[first] for first, _ in self.splits], axis=1)
        thresholds = np.where(allowed >= 0, calibration[:, n - 1 - np.maximum(allowed, 0)], np.inf)
        risk, mean, median, high = np.full((4, *thresholds.shape), np.nan)
        for column in range(len(levels)):
            certified = np.flatnonzero(np.isfinite(thresholds[:, column]))
            values, places = np.unique(thresholds[certified, column], return_inverse=True)
            limits = np.minimum(widened(values), np.finfo(np.float32).max).astype(np.float32)
            queries = second[certified]
            missed = self.scores[queries] > limits[places][:, None]
            risk[certified, column] = missed.mean(axis=1)
            sizes = self._sizes(limits)[places[:, None], queries]
            mean[certified, column] = sizes.mean(axis=1)
            median[certified, column], high[certified, column] = _quantiles(sizes, (0.5, 0.95))
        return ResampledRule(risk, mean, median, high)

    def _allowed(self, n: int, alpha: float, delta: float) -> int:
        """Return the number of misses among n calibration queries that a threshold may have."""
        if self.bound is None:
            return math.floor(alpha * n + 1e-9)  # 0.29 * 100 < 29
        return allowed_misses(n, alpha, delta, self.bound)

    def _sizes(self, limits: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return (g, n) set sizes of all queries at g ascending limits of the scores."""
        n, width = len(self.candidate_scores), len(limits) + 1
        enters = np.searchsorted(limits, self.candidate_scores, side="left")
        cells = enters + width * np.arange(n)[:, None]
        counts = np.bincount(cells.ravel(), minlength=n * width).reshape(n, width)
        return np.ascontiguousarray(np.cumsum(counts[:, :-1], axis=1).T)


def _quantiles(sizes: NDArray[np.int64], levels: Sequence[float]) -> list[NDArray[np.float64]]:
    """Return quantiles of each row of whole numbers, as `np.quantile` does, by counting them."""
    rows, columns = sizes.shape
    width = int(sizes.max(initial=0)) + 1
    cells = sizes + width * np.arange(rows)[:, None]
    counts = np.bincount(cells.ravel(), minlength=rows * width).reshape(rows, width)
    cumulated = np.cumsum(counts, axis=1)
    quantiles = []
    for level in levels:
        place = level * (columns - 1)
        ends = math.floor(place), math.ceil(place)
        below, above = (np.count_nonzero(cumulated <= end, axis=1) for end in ends)
        quantiles.append(below + (above - below) * (place - math.floor(place)))
    return quantiles
