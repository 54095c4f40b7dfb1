"""Which score functions there are, and which of them suits the data at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.risk.boosted import Boosted
from rcir.risk.bounds import allowed_misses
from rcir.risk.learned import Learned
from rcir.risk.matching import MatchProbability
from rcir.risk.outcomes import Outcomes, Risk, check_risk
from rcir.risk.rankings import Rankings
from rcir.risk.reranked import Reranked
from rcir.risk.score_functions import (
    Constant,
    MinMax,
    Quantile,
    ScoreFunction,
    check_split,
    set_sizes,
    widened,
)

SCORE_FUNCTIONS: Mapping[str, type[ScoreFunction]] = {
    score_function.name: score_function
    for score_function in (Constant, MinMax, Quantile, Learned, Boosted, Reranked)
}
# What counts all matches cannot be told by who is the first.
_OF_ALL_MATCHES = (Constant, MinMax, Quantile, MatchProbability)
KNOWN: Mapping[str, type[ScoreFunction]] = {
    **SCORE_FUNCTIONS,
    MatchProbability.name: MatchProbability,
}
ALPHAS = (0.05, 0.1, 0.2)
LEVELS: Mapping[Risk, Sequence[float]] = {
    "recall": (0.1, 0.2, 0.3, 0.5),
    "false-discovery": (0.1, 0.2, 0.3, 0.5, 0.7),
}
FOLDS, FEWEST = 5, 50
GRID = 256  # thresholds at which recall and false discovery are compared

Comparison = Mapping[str, Mapping[float, float]]


def score_function_class(name: str) -> type[ScoreFunction]:
    """The score function of a name, or `InvalidConfig`."""
    if not isinstance(name, str) or name not in KNOWN:
        raise InvalidConfig(
            f"score function {name!r} is unknown; choose one of {', '.join(SCORE_FUNCTIONS)}, auto"
        )
    return KNOWN[name]


def fit_score_function(
    name: str,
    rankings: Rankings,
    truth: NDArray[Any],
    alphas: Sequence[float] = ALPHAS,
    delta: float = 0.1,
    risk: Risk = "miss",
    totals: NDArray[np.int64] | None = None,
) -> tuple[ScoreFunction, Comparison]:
    """Fit the named score function, or with "auto" the one that suits a risk best.

    "auto" compares all score functions on the tuning split alone, each query sized by a score
    function that was fitted on the other four fifths, and takes the one with the smallest sets (for
    the false-discovery risk: with the most true matches in them) among those that are never worse
    than `Constant`; before that, one that attains more of the levels. The calibration queries have
    no part in it, so that the guarantee stands whatever it takes.

    Args:
        name: "constant", "minmax", "quantile", "learned", "boosted", "reranked" or "auto". For the
            other risks than misses the last four stand for "match-probability" where they learn.
        rankings, truth: the tuning split, see `ScoreFunction.fit`; of other risks than misses truth
            is (n, depth), whether each candidate is a true match.
        alphas, delta: levels at which sizes are compared; other risks have levels of their own.
        risk: "miss", "recall" or "false-discovery".
        totals: (n,) numbers of true matches in the gallery; among the candidates unless given.

    Returns:
        The score function, fitted on the whole split, and for "auto" the mean set size (the inverse
        of the mean number of true matches, for false discovery) of each score function at each
        alpha that as many calibration queries could certify (empty with fewer than 50 queries, on
        which nothing can be
        compared: then it is `Constant`).

    Raises:
        InvalidConfig: there is no such score function.
        InvalidData: of the split.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> u = rng.uniform(size=2000)
        >>> ranks = np.where(rng.uniform(size=2000) < u / 2, rng.integers(2, 20, 2000), 1)
        >>> score_function, sizes = fit_score_function("auto", Rankings(u, depth=20), ranks)
        >>> sizes[score_function.name][0.1] < sizes["constant"][0.1]
        True
    """
    check_risk(risk)
    if name != "auto":
        kind = score_function_class(name)
        if risk != "miss" and kind not in _OF_ALL_MATCHES:
            kind = MatchProbability
        return kind.fit(rankings, truth), {}
    ranks = check_split(rankings, truth)
    if len(rankings) < FEWEST:
        return Constant(), {}
    if np.ndim(truth) == 1:  # of misses no other match counts
        truth = np.arange(1, rankings.depth + 1) == ranks[:, None]
    given = truth.sum(axis=1) if totals is None else totals
    kinds = SCORE_FUNCTIONS.values() if risk == "miss" else _OF_ALL_MATCHES
    comparison = {}
    for kind in kinds:
        if kind.suits(rankings, truth):
            outcomes = _cross_fitted(kind, rankings, truth, given)
            comparison[kind.name] = _sizes(outcomes, risk, alphas, delta)
    constant = comparison["constant"]

    def order(kind: str) -> tuple[bool, int, float, bool]:
        sizes = comparison[kind]
        ratios = [sizes.get(alpha, np.inf) / constant[alpha] for alpha in constant]
        mean = float(np.log(ratios).mean()) if ratios else 0.0
        return max(ratios, default=1.0) > 1, -len(sizes), mean, kind != "constant"

    best = min(comparison, key=order)
    return KNOWN[best].fit(rankings, truth), comparison


def _cross_fitted(
    kind: type[ScoreFunction],
    rankings: Rankings,
    relevant: NDArray[np.bool_],
    totals: NDArray[np.int64],
) -> Outcomes:
    """The queries, every fifth one sized by a score function that was fitted on the others."""
    fold = np.arange(len(rankings)) % FOLDS
    parts = []
    for held in range(FOLDS):
        inside, outside = fold == held, fold != held
        fitted = kind.fit(rankings[outside], relevant[outside])
        parts.append(Outcomes.of(fitted, rankings[inside], relevant[inside], totals[inside]))
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("candidate_scores", "relevant", "totals", "uncertainty", "selection_score")
    }
    return Outcomes(**joined)


def _sizes(
    outcomes: Outcomes, risk: Risk, alphas: Sequence[float], delta: float
) -> dict[float, float]:
    """How large sets have to be at each alpha that can be had, see `fit_score_function`."""
    sizes = {}
    if risk == "miss":
        falling = np.sort(outcomes.scores)[::-1]
        for alpha in alphas:
            allowed = allowed_misses(len(falling), alpha, delta)
            if allowed >= 0 and np.isfinite(falling[allowed]):
                sizes[alpha] = float(set_sizes(outcomes.candidate_scores, falling[allowed]).mean())
        return sizes
    thresholds = outcomes.steps(GRID)
    losses = outcomes.losses(risk, widened(thresholds)).mean(axis=0)
    for alpha in LEVELS[risk]:
        if not (losses <= alpha).any():
            continue
        if risk == "recall":
            threshold = thresholds[np.argmax(losses <= alpha)]
            sizes[alpha] = float(set_sizes(outcomes.candidate_scores, float(threshold)).mean())
        else:
            threshold = thresholds[np.flatnonzero(losses <= alpha)[-1]]
            paid = (
                np.arange(outcomes.candidate_scores.shape[1])
                < set_sizes(outcomes.candidate_scores, float(threshold))[:, None]
            )
            sizes[alpha] = 1 / max(float((outcomes.relevant & paid).sum(axis=1).mean()), 1e-9)
    return sizes
