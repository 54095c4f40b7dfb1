"""Which score functions there are, and which of them suits the data at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.levels import ALPHAS, DELTA
from rcir.risk.boosted import Boosted
from rcir.risk.bounds import allowed_misses
from rcir.risk.fits import Fits
from rcir.risk.labelled import LabelledResults
from rcir.risk.learned import Learned
from rcir.risk.matching import MatchProbability
from rcir.risk.reranked import Reranked
from rcir.risk.risks import Risk, find_risk
from rcir.risk.score_functions import (
    Constant,
    MinMax,
    Quantile,
    ScoreFunction,
    check_split,
    widened,
)
from rcir.risk.search_results import SearchResults

SCORE_FUNCTIONS: Mapping[str, type[ScoreFunction]] = {
    score_function.name: score_function
    for score_function in (Constant, MinMax, Quantile, Learned, Boosted, Reranked)
}
# Of risks that count all matches: the others learn from the first match alone.
_OF_ALL_MATCHES = (Constant, MinMax, Quantile, MatchProbability)
KNOWN: Mapping[str, type[ScoreFunction]] = {
    **SCORE_FUNCTIONS,
    MatchProbability.name: MatchProbability,
}
FEWEST_COMPARED = 50
NO_WORSE = 1.1  # times the smallest mean size
GRID = 256  # thresholds at which recall and false discovery are compared

ComparedSizes = Mapping[str, Mapping[float, float]]


def score_function_class(name: str) -> type[ScoreFunction]:
    """The score function of a name, or `InvalidConfig`."""
    if not isinstance(name, str) or name not in KNOWN:
        raise InvalidConfig(
            f"score function {name!r} is unknown; choose one of {', '.join(SCORE_FUNCTIONS)}, auto"
        )
    return KNOWN[name]


def fit_score_function(
    name: str,
    results: SearchResults,
    truth: NDArray[Any],
    alphas: Sequence[float] = ALPHAS,
    delta: float = DELTA,
    risk: str = "miss",
    totals: NDArray[np.int64] | None = None,
    fits: Fits | None = None,
) -> tuple[ScoreFunction, ComparedSizes]:
    """Fit the named score function, or with "auto" the one that suits a risk best.

    "auto" compares all score functions on the tuning split alone, each query sized by a score
    function that was fitted on the other four fifths, and takes the one with the smallest sets (for
    the false-discovery risk: with the most true matches in them) among those that are never worse
    than `Constant`; before that, one that attains more of the levels. The calibration queries have
    no part in it, so that the guarantee stands whatever it takes.

    Args:
        name: "constant", "minmax", "quantile", "learned", "boosted", "reranked" or "auto". For the
            other risks than misses the last four stand for "match-probability" where they learn.
        results, truth: the tuning split, see `ScoreFunction.fit`; of other risks than misses truth
            is (n, depth), whether each candidate is a true match.
        alphas, delta: levels at which sizes are compared; other risks have levels of their own.
        risk: the name of one of `rcir.risk.RISKS`.
        totals: (n,) numbers of true matches in the gallery; among the candidates unless given.
        fits: of the same split, made for other risks before.

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
        >>> score_function, sizes = fit_score_function("auto", SearchResults(u, depth=20), ranks)
        >>> sizes[score_function.name][0.1] < sizes["constant"][0.1]
        True
    """
    known = find_risk(risk)
    if name != "auto":
        kind = score_function_class(name)
        if not known.first_match and kind not in _OF_ALL_MATCHES:
            kind = MatchProbability
        return (kind.fit(results, truth) if fits is None else fits.fitted(kind)), {}
    ranks = check_split(results, truth)
    if len(results) < FEWEST_COMPARED:
        return Constant(), {}
    if np.ndim(truth) == 1:  # of misses no other match counts
        truth = np.arange(1, results.depth + 1) == ranks[:, None]
    given = truth.sum(axis=1) if totals is None else np.asarray(totals)
    fits = fits or Fits(LabelledResults.of(results, truth, given))
    kinds = SCORE_FUNCTIONS.values() if known.first_match else _OF_ALL_MATCHES
    comparison = {}
    for kind in kinds:
        if kind.suits(results, truth):
            comparison[kind.name] = _sizes(fits.crossed(kind), known, alphas, delta)
    constant = comparison["constant"]

    def order(kind: str) -> tuple[bool, int, float, bool]:
        sizes = comparison[kind]
        ratios = [sizes.get(alpha, np.inf) / constant[alpha] for alpha in constant]
        mean = float(np.log(ratios).mean()) if ratios else 0.0
        return max(ratios, default=1.0) > 1, -len(sizes), mean, kind != "constant"

    best = min(comparison, key=order)
    return fits.fitted(KNOWN[best]), comparison


def crossed_sizes(
    results: LabelledResults, name: str, alphas: Sequence[float] = ALPHAS, delta: float = DELTA
) -> dict[float, float]:
    """Mean set sizes of a tuning split, cross-fitted as in `fit_score_function`.

    Args:
        results: the tuning split, 5 queries or more.
        name: of the score function.
        alphas, delta: levels; those that as many calibration queries could not certify are left
            out.
    """
    crossed = Fits(results).crossed(score_function_class(name))
    return _sizes(crossed, find_risk("miss"), alphas, delta)


def smallest_uncertainty(
    candidates: Mapping[str, LabelledResults],
    alphas: Sequence[float] = ALPHAS,
    delta: float = DELTA,
) -> tuple[str, ComparedSizes]:
    """The uncertainty of the queries that needs the smallest sets.

    Each is judged by sizes that depend on it alone (`Quantile`), cross-fitted as in
    `fit_score_function`: their geometric mean over the levels that all attain. Of those within a
    tenth of the smallest, which few queries do not tell apart, it is the one that best tells a
    wrong first candidate (AUROC).

    Args:
        candidates: the tuning split with each uncertainty, by its name; the first is taken where
            nothing can be compared, and where others are no better.
        alphas, delta: levels at which sizes are compared.

    Returns:
        The name, and the mean sizes of each at each alpha; of fewer than 50 queries, none.
    """
    first = next(iter(candidates))
    if len(candidates) == 1 or len(candidates[first]) < FEWEST_COMPARED:
        return first, {}
    sizes = {}
    for name, results in candidates.items():
        sizes[name] = crossed_sizes(results, Quantile.name, alphas, delta)
    shared = [alpha for alpha in sizes[first] if all(alpha in own for own in sizes.values())]
    if not shared:
        return first, sizes
    means = {
        name: float(np.exp(np.log([own[alpha] for alpha in shared]).mean()))
        for name, own in sizes.items()
    }
    close = [name for name in means if means[name] <= NO_WORSE * min(means.values())]
    return max(close, key=lambda name: (_auroc_miss(candidates[name]), name == first)), sizes


def _auroc_miss(results: LabelledResults) -> float:
    """Of a wrong first candidate, told by the uncertainty; 0.5 where all are right or all wrong."""
    from scipy.stats import rankdata  # slow to import, and no query needs it

    wrong = ~results.relevant[:, 0]
    n, m = int(wrong.sum()), int((~wrong).sum())
    if not n or not m:
        return 0.5
    return float((rankdata(results.uncertainty)[wrong].sum() - n * (n + 1) / 2) / (n * m))


def _sizes(
    labelled: LabelledResults, risk: Risk, alphas: Sequence[float], delta: float
) -> dict[float, float]:
    """How large sets have to be at each alpha that can be had, see `fit_score_function`."""
    sizes = {}
    if risk.exact:
        falling = np.sort(labelled.scores)[::-1]
        for alpha in alphas:
            allowed = allowed_misses(len(falling), alpha, delta)
            if allowed >= 0 and np.isfinite(falling[allowed]):
                sizes[alpha] = float(labelled.sizes(float(falling[allowed])).mean())
        return sizes
    thresholds = labelled.steps(GRID)
    losses = risk.losses(labelled, widened(thresholds)).mean(axis=0)
    for alpha in risk.levels or alphas:
        if not (losses <= alpha).any():
            continue
        if risk.falls:
            threshold = thresholds[np.argmax(losses <= alpha)]
            sizes[alpha] = float(labelled.sizes(float(threshold)).mean())
        else:
            threshold = thresholds[np.flatnonzero(losses <= alpha)[-1]]
            within = np.arange(labelled.depth) < labelled.sizes(float(threshold))[:, None]
            sizes[alpha] = 1 / max(float((labelled.relevant & within).sum(axis=1).mean()), 1e-9)
    return sizes
