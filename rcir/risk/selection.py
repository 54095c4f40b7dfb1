"""The choice of the score function and the uncertainty that suit the tuning split best.

To add a score function, write a subclass of `ScoreFunction`, add it to `SCORE_FUNCTIONS`, and its
name to `ScoreFunctionName`. If it suits risks that count all matches, add it to `_OF_ALL_MATCHES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.metrics.uncertainty import auroc
from rcir.options import ALPHAS, DELTA
from rcir.risk.bounds import allowed_misses
from rcir.risk.learned import Learned
from rcir.risk.losses import MISS, Risk, find_risk
from rcir.risk.reordering import LabelListScore, LabelScore, MatchProbability
from rcir.risk.results import LabelledResults, ScoredResults, SearchResults, widen
from rcir.risk.score_functions import (
    Constant,
    MinMax,
    Quantile,
    ScoreFunction,
    Truth,
    check_split,
    score,
)
from rcir.store.codec import register

ScoreFunctionName = Literal["auto", "constant", "minmax", "quantile", "learned"]
SCORE_FUNCTIONS: Mapping[str, type[ScoreFunction]] = {
    score_function.name: score_function for score_function in (Constant, MinMax, Quantile, Learned)
}
# For risks that count all matches; the others learn from the first match alone.
_OF_ALL_MATCHES = (Constant, MinMax, Quantile, MatchProbability)
_BY_NAME: Mapping[str, type[ScoreFunction]] = {
    **SCORE_FUNCTIONS,
    MatchProbability.name: MatchProbability,
}
for _score_function in _BY_NAME.values():
    register(_score_function)
register(LabelScore)
register(LabelListScore)
MIN_QUERIES = 50  # of a tuning split on which score functions are compared
MUCH_SMALLER = 1.25  # ratio of mean sizes that is more than noise
NEARLY_SMALLEST = 1.1  # times the smallest mean size
N_THRESHOLDS = 256  # at which recall and false discovery are compared
FOLDS = 5

ComparedSizes = Mapping[str, Mapping[float, float]]


@dataclass(frozen=True, eq=False)
class Fits:
    """Score functions fitted on one tuning split, each once."""

    split: LabelledResults
    _fitted: dict[tuple[str, int | None], ScoreFunction] = field(default_factory=dict)
    _cross_fitted: dict[str, ScoredResults] = field(default_factory=dict)

    def fitted(self, kind: type[ScoreFunction], held_out: int | None = None) -> ScoreFunction:
        """Return a score function fitted on all queries, or on those outside of a fold."""
        key = (kind.name, held_out)
        if key not in self._fitted:
            split = self.split
            if held_out is not None:
                split = split[np.arange(len(split)) % FOLDS != held_out]
            self._fitted[key] = kind.fit(split.results, split.relevant)
        return self._fitted[key]

    def cross_fitted(self, kind: type[ScoreFunction]) -> ScoredResults:
        """Return the queries, each fold scored by a score function fitted on the others."""
        if kind.name not in self._cross_fitted:
            split = self.split
            independent = LabelledResults(split.results, split.relevant, split.n_relevant)
            first, *others = (
                score(self.fitted(kind, fold), independent[fold::FOLDS]) for fold in range(FOLDS)
            )
            self._cross_fitted[kind.name] = first.joined(*others)
        return self._cross_fitted[kind.name]


def score_function_class(name: str) -> type[ScoreFunction]:
    """Return the score function of a name, or raise `InvalidConfig`."""
    if not isinstance(name, str) or name not in _BY_NAME:
        raise InvalidConfig(
            f"score_function {name!r} is unknown; choose {', '.join(SCORE_FUNCTIONS)} or auto, "
            'or pass your own with fit and rank, or its import path, "package.module:Class"'
        )
    return _BY_NAME[name]


def fit_score_function(
    name: str,
    results: SearchResults,
    truth: Truth,
    alphas: Sequence[float] = ALPHAS,
    delta: float = DELTA,
    *,
    risk: str = MISS.name,
    n_relevant: NDArray[np.int64] | None = None,
    fits: Fits | None = None,
) -> tuple[ScoreFunction, ComparedSizes]:
    """Fit the score function of a name, or with "auto" the one that suits a risk best.

    "auto" compares all score functions on the tuning split alone, each query sized by a score
    function that was fitted on the other folds. For misses it chooses `Learned`, unless another one
    needs much smaller sets: with few queries smaller differences are noise. For other risks it
    chooses, among those that attain the most levels and are never worse than `Constant`, the one
    with the smallest sets (for false discovery: with the most true matches). The calibration
    queries are not used, so that the guarantee holds whatever it chooses.

    Args:
        name: "constant", "minmax", "quantile", "learned" or "auto". For other risks than misses,
            "learned" stands for "match-probability".
        results, truth: the tuning split, see `ScoreFunction.fit`; for other risks than misses truth
            is (n, depth), True where a candidate is a true match.
        alphas, delta: levels at which sizes are compared; other risks have levels of their own.
        risk: the name of one of `rcir.risk.RISKS`.
        n_relevant: (n,) numbers of true matches in the gallery; by default among the candidates.
        fits: of the same split, made for other risks before.

    Returns:
        The score function, fitted on the whole split, and for "auto" the mean set size (for false
        discovery the inverse of the mean number of true matches) of each score function at each
        alpha that as many calibration queries could certify. With fewer than 50 queries nothing
        can be compared: the score function is then `Learned`, for other risks than misses
        `Constant`, and there are no sizes.

    Raises:
        InvalidConfig: there is no such score function.
        InvalidData: the split is unsuitable.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> u = rng.uniform(size=2000)
        >>> ranks = np.where(rng.uniform(size=2000) < u / 2, rng.integers(2, 20, 2000), 1)
        >>> score_function, sizes = fit_score_function("auto", SearchResults(u, depth=20), ranks)
        >>> sizes[score_function.name][0.1] < sizes["constant"][0.1]
        True
    """
    target = find_risk(risk)
    if name != "auto":
        kind = score_function_class(name)
        if not target.first_match and kind not in _OF_ALL_MATCHES:
            kind = MatchProbability
        return (kind.fit(results, truth) if fits is None else fits.fitted(kind)), {}
    matches = check_split(results, truth)
    if len(results) < MIN_QUERIES:
        few = Learned if target.first_match else Constant
        return (few.fit(results, truth) if fits is None else fits.fitted(few)), {}
    relevant = matches.relevant
    if relevant is None:  # for misses no other match counts
        relevant = np.arange(1, results.depth + 1) == matches.ranks[:, None]
    totals = relevant.sum(axis=1) if n_relevant is None else np.asarray(n_relevant)
    fits = fits or Fits(LabelledResults(results, relevant, totals))
    kinds = SCORE_FUNCTIONS.values() if target.first_match else _OF_ALL_MATCHES
    comparison = {
        kind.name: mean_sizes(fits.cross_fitted(kind), target, alphas, delta) for kind in kinds
    }
    constant = comparison["constant"]

    def order(kind: str) -> tuple[bool, int, float, bool]:
        sizes = comparison[kind]
        ratios = [sizes.get(alpha, np.inf) / constant[alpha] for alpha in constant]
        mean = float(np.log(ratios).mean()) if ratios else 0.0
        if kind == Learned.name:
            mean -= np.log(MUCH_SMALLER)
        larger = not target.first_match and max(ratios, default=1.0) > 1
        return larger, -len(sizes), mean, kind != "constant"

    best = min(comparison, key=order)
    return fits.fitted(_BY_NAME[best]), comparison


def cross_fitted_sizes(
    results: LabelledResults, name: str, alphas: Sequence[float] = ALPHAS, delta: float = DELTA
) -> dict[float, float]:
    """Return mean set sizes of a tuning split by alpha, cross-fitted as in `fit_score_function`.

    Levels that as many calibration queries could not certify are left out.
    """
    scored = Fits(results).cross_fitted(score_function_class(name))
    return mean_sizes(scored, MISS, alphas, delta)


def size_ratio(
    results: LabelledResults,
    others: LabelledResults,
    name: str,
    alphas: Sequence[float] = ALPHAS,
    delta: float = DELTA,
) -> float:
    """Return how much larger sets are with the uncertainty of `results` than with that of `others`.

    It is the geometric mean of the ratios of mean sizes over the levels that both attain; NaN
    without such a level, and with fewer than 50 queries. "auto" gives both the score function that
    suits `others` best.
    """
    if len(results) < MIN_QUERIES:
        return np.nan

    if name == "auto":  # one for both
        fitted, compared = fit_score_function(
            name, others.results, others.relevant, alphas, delta, n_relevant=others.n_relevant
        )
        name, theirs = fitted.name, compared[fitted.name]
    else:
        theirs = cross_fitted_sizes(others, name, alphas, delta)
    ours = cross_fitted_sizes(results, name, alphas, delta)
    logs = [np.log(ours[alpha] / theirs[alpha]) for alpha in ours if alpha in theirs]
    return float(np.exp(np.mean(logs))) if logs else np.nan


def smallest_uncertainty(
    candidates: Mapping[str, LabelledResults],
    alphas: Sequence[float] = ALPHAS,
    delta: float = DELTA,
) -> tuple[str, ComparedSizes]:
    """Return the uncertainty of the queries that needs the smallest sets, and the mean sizes.

    Each is judged by sizes that depend on it alone (`Quantile`), cross-fitted as in
    `fit_score_function`: by their geometric mean over the levels that all attain. Few queries do
    not distinguish those within a tenth of the smallest; among them, the one that best detects a
    wrong first candidate (AUROC) is chosen. With fewer than 50 queries it is the first, without
    sizes.

    Args:
        candidates: the tuning split with each uncertainty, by its name; the first is chosen if
            no other is better.
        alphas, delta: levels at which sizes are compared.
    """
    first = next(iter(candidates))
    if len(candidates) == 1 or len(candidates[first]) < MIN_QUERIES:
        return first, {}
    sizes = {}
    for name, results in candidates.items():
        sizes[name] = cross_fitted_sizes(results, Quantile.name, alphas, delta)
    shared = [alpha for alpha in sizes[first] if all(alpha in other for other in sizes.values())]
    if not shared:
        return first, sizes
    means = {
        name: float(np.exp(np.log([by_alpha[alpha] for alpha in shared]).mean()))
        for name, by_alpha in sizes.items()
    }
    close = [name for name in means if means[name] <= NEARLY_SMALLEST * min(means.values())]

    def order(name: str) -> tuple[float, bool]:
        results = candidates[name]
        area = auroc(~results.relevant[:, 0], results.results.uncertainty)
        return float(np.nan_to_num(area, nan=0.5)), name == first

    return max(close, key=order), sizes


def mean_sizes(
    scored: ScoredResults, risk: Risk, alphas: Sequence[float], delta: float
) -> dict[float, float]:
    """Return mean set sizes at each attainable alpha, see `fit_score_function`."""
    sizes = {}
    if risk.exact:
        ascending = scored.ascending_match_scores
        for alpha in alphas:
            allowed = allowed_misses(len(ascending), alpha, delta)
            if allowed >= 0 and np.isfinite(threshold := ascending[len(ascending) - 1 - allowed]):
                sizes[alpha] = float(scored.sizes(float(threshold)).mean())
        return sizes
    thresholds = scored.size_thresholds(N_THRESHOLDS)
    losses = risk.query_losses(scored, widen(thresholds)).mean(axis=0)
    for alpha in risk.levels or alphas:
        if not (losses <= alpha).any():
            continue
        if risk.monotone:
            threshold = thresholds[np.argmax(losses <= alpha)]
            sizes[alpha] = float(scored.sizes(float(threshold)).mean())
        else:
            threshold = thresholds[np.flatnonzero(losses <= alpha)[-1]]
            within = np.arange(scored.depth) < scored.sizes(float(threshold))[:, None]
            matches = scored.require("relevant") & within
            sizes[alpha] = 1 / max(float(matches.sum(axis=1).mean()), 1e-9)
    return sizes
