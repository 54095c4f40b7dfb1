"""Measure what a calibration certifies of queries with and without a match in the gallery."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.splits import SearchedSplits
from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import corrected, make_request, open_set
from rcir.risk.probability import sizes_of
from rcir.risk.refusals import rounded_up
from rcir.risk.score_functions import Ranking

BETAS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class TradeOff:
    """A beta, and the smallest alpha that is certified with it.

    Attributes:
        beta: largest share of the queries without a match that get a set.
        alpha: largest share of the others whose set, or lack of one, misses the match.
        accepted: share of the test queries without a match that get a set; None if there are none.
        missed: miss rate of the test queries with a match; None if there are none.
        mean_size: of the sets of test queries with a match, empty ones included.
    """

    beta: float
    alpha: float
    accepted: float | None
    missed: float | None
    mean_size: float | None


@dataclass(frozen=True)
class OpenSet:
    """Queries without a match in the gallery, and what giving them no set costs the others.

    Attributes:
        n_calibration, n_test: numbers of such queries.
        trade_off: for the betas with which some alpha is certified.
        refusal: why none can be; None if that is not known.
    """

    n_calibration: int
    n_test: int
    trade_off: list[TradeOff]
    refusal: str | None = None


def measure_open_set(splits: SearchedSplits, delta: float) -> OpenSet | None:
    """Measure pairs of alpha and beta on the test queries.

    None if every calibration query has a match, or it is not known which have.
    """
    calibration, test = splits.retriever.require_calibration(), splits.scored_test
    if calibration.acceptance is None:
        return None
    rule, matchable = calibration.miss_rule, test.matchable
    n_calibration, n_test = (int((~part.matchable).sum()) for part in (rule.evidence, test))
    try:
        of_each = corrected(delta, calibration.chosen_among)
        request = make_request(0.5, of_each, beta=0.5, anytime=calibration.sequential)
        pairs = open_set.trade_off(request, BETAS, rule.evidence, rule.bound)
    except (InvalidConfig, InvalidData) as error:
        return OpenSet(n_calibration, n_test, [], str(error))
    scores, selection_score = test.require("scores"), test.require("selection_score")
    ranking = Ranking(scores, selection_score, acceptance=test.acceptance)
    rows = []
    for beta, smallest in pairs:
        if smallest is not None and (alpha := rounded_up(smallest)) < 1:
            guarantee = calibration.guarantee(make_request(alpha, delta, beta=beta))
            sizes = sizes_of(ranking, guarantee)
            missed = test.require("match_rank") > sizes
            accepted = _mean(sizes[~matchable] > 0)
            measured = accepted, _mean(missed[matchable]), _mean(sizes[matchable])
            rows.append(TradeOff(beta, alpha, *measured))
    return OpenSet(n_calibration, n_test, rows)


def _mean(values: NDArray[np.bool_ | np.integer]) -> float | None:
    return float(values.mean()) if len(values) else None
