"""Open sets: galleries that hold no match of some queries, which then get no set.

Two error rates are certified together, each at half of delta (Learn then Test, Angelopoulos et al.,
2021, gives the frame; both bounds are exact for independent queries):

- the acceptance rate, P(set not empty | no match in the gallery), at most beta;
- the miss rate, P(no match in the set | a match in the gallery), at most alpha.

A query gets a set if its estimated odds of a match exceed a threshold. This threshold depends on
the calibration queries without a match alone. Given how many queries there are of either kind, it
is independent of those with a match, so that these certify the miss rate as if it were fixed: the
set of a query that is rejected misses its match.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk.bounds import Bound, Certificate
from rcir.risk.groups import certify_groups
from rcir.risk.losses import MISS
from rcir.risk.refusals import refused, rounded_up
from rcir.risk.request import Request
from rcir.risk.results import ScoredResults, widen

BETA_STEPS = 1000  # the smallest attainable beta is reported in these steps


def matchable_queries(request: Request, calibration: ScoredResults) -> ScoredResults:
    """Return the queries that have a match in the gallery.

    Raises:
        InvalidData: none has.
        InvalidConfig: some cluster holds queries of both kinds, or a group of a mix lacks one.
    """
    matchable = calibration.matchable
    if not matchable.any():
        raise InvalidData("none of the queries has a match in the gallery")
    population = calibration.population
    units = population.units
    both = np.intersect1d(units[matchable], units[~matchable])
    if population.clusters is not None and len(both):
        raise InvalidConfig(
            f"{len(both)} of {population.n_units} {population.unit_word} hold queries with and "
            "without a match in the gallery: calibrate on clusters of either kind"
        )
    if request.groups == "any mix":
        kinds = [(matchable, "with")] + [(~matchable, "without")] * (request.beta is not None)
        for rows, kind in kinds:
            lacking = set(population.group_names) - set(population[rows].group_names)
            if lacking:
                raise InvalidConfig(
                    f"no calibration query of group {', '.join(map(repr, sorted(lacking)))} is one "
                    f"{kind} a match in the gallery: any mix needs some of each group"
                )
    return calibration[matchable]


def certify_open_set(request: Request, calibration: ScoredResults, bound: Bound) -> Certificate:
    """Certify a request with beta, see `rcir.risk.certify`."""
    assert request.beta is not None
    if request.group is not None:
        try:
            with refused(f"group {request.group!r}"):
                group = calibration.of_group(request.group)
                return certify_open_set(replace(request, groups="all"), group, bound)
        except InvalidData as error:
            raise InvalidData(f"group {request.group!r}: {error}") from None
    matched = matchable_queries(request, calibration)
    alpha_request = _with_half_of_delta(request)
    limit = acceptance_threshold(request, calibration, bound)
    with refused("queries with a match in the gallery, at delta / 2"):
        certify_groups(alpha_request, matched, None, bound)  # without rejecting any
    served = reject(matched, limit)
    try:
        certificate = certify_groups(alpha_request, served, None, bound)
    except RiskUnattainable as error:
        raise _refusal(request, calibration, bound, limit, error) from None
    return replace(certificate, acceptance_threshold=limit)


def acceptance_threshold(request: Request, calibration: ScoredResults, bound: Bound) -> float:
    """Return the smallest threshold of the odds of a match that certifies beta at delta / 2.

    That a query without a match is accepted is a miss of its "match score", the odds, at this
    threshold: the procedures for misses certify it.

    Raises:
        InvalidData: every query has a match.
        RiskUnattainable: there are too few queries without one.
    """
    assert request.beta is not None
    if calibration.matchable.all():
        raise InvalidData(
            "every calibration query has a match in the gallery: beta needs queries without one, "
            "such as photographs of individuals that are left out of the gallery"
        )
    unmatchable = calibration[~calibration.matchable]
    odds = unmatchable.require("acceptance").astype(np.float32)
    accepted = ScoredResults.from_scores(
        odds[:, None], np.ones((len(odds), 1), bool), population=unmatchable.population
    )
    beta_request = replace(_with_half_of_delta(request), levels={MISS.name: request.beta})
    try:
        return certify_groups(beta_request, accepted, None, bound).threshold
    except RiskUnattainable as error:
        smallest = rounded_up(error.minimum_alpha or 1.0)
        advice = f"request beta >= {smallest:g}, or calibrate" if smallest < 1 else "calibrate"
        raise RiskUnattainable(
            f"beta = {request.beta:g} cannot be certified with {len(odds)} calibration queries "
            f"without a match in the gallery: {advice} on more of them",
            minimum_alpha=None,
            required_calibration=None,
        ) from None


def is_accepted(acceptance: NDArray[np.float64], limit: float) -> NDArray[np.bool_]:
    """(n,) True for queries whose odds are above a limit, by more than the tolerance of scores."""
    return np.asarray(acceptance > widen(limit))


def reject(queries: ScoredResults, limit: float) -> ScoredResults:
    """Return queries of which those that are not accepted get an empty set, a miss."""
    rejected = ~is_accepted(queries.require("acceptance"), limit)
    match_score = np.where(rejected, np.float32(np.inf), queries.match_score)
    changed: dict[str, NDArray[Any]] = {"match_score": match_score}
    if queries.match_rank is not None:
        changed["match_rank"] = np.where(rejected, np.inf, queries.match_rank)
    if queries.scores is not None:
        changed["scores"] = np.where(rejected[:, None], np.float32(np.inf), queries.scores)
    if queries.relevant is not None:
        changed["relevant"] = queries.relevant & ~rejected[:, None]
    return replace(queries, **changed)  # type: ignore[arg-type]


def trade_off(
    request: Request,
    betas: Sequence[float],
    calibration: ScoredResults,
    bound: Bound = "binomial",
) -> list[tuple[float, float | None]]:
    """Return the smallest alpha that is certified together with each beta, each pair by itself.

    None stands for an alpha of 1 and for a beta that the queries do not certify. To choose a pair
    after looking, calibrate on other queries.
    """
    matched, pairs = matchable_queries(request, calibration), []
    for beta in betas:
        with_beta = replace(request, beta=beta)
        try:
            limit = acceptance_threshold(with_beta, calibration, bound)
            smallest = _smallest_alpha(with_beta, reject(matched, limit), bound)
        except RiskUnattainable:
            smallest = None
        pairs.append((float(beta), smallest))
    return pairs


def _with_half_of_delta(request: Request) -> Request:
    assert request.delta is not None
    return replace(request, delta=request.delta / 2, beta=None, counted="all")


def _smallest_alpha(request: Request, served: ScoredResults, bound: Bound) -> float | None:
    """Return the smallest alpha that is certified of queries some of which are rejected."""
    (name,) = request.levels
    impossible = replace(_with_half_of_delta(request), levels={name: 1e-9})
    try:
        certify_groups(impossible, served, None, bound)
    except RiskUnattainable as error:
        return error.minimum_alpha
    return None


def _refusal(
    request: Request,
    calibration: ScoredResults,
    bound: Bound,
    limit: float,
    error: RiskUnattainable,
) -> RiskUnattainable:
    """Return the error of an alpha that is not attainable because too many are rejected."""
    matched = matchable_queries(request, calibration)

    def attainable(step: int) -> bool:
        beta_request = replace(request, beta=step / BETA_STEPS)
        try:
            limit = acceptance_threshold(beta_request, calibration, bound)
            certify_groups(_with_half_of_delta(request), reject(matched, limit), None, bound)
        except RiskUnattainable:
            return False
        return True

    steps = range(1, BETA_STEPS)
    place = bisect_left(steps, True, key=attainable)
    advice = []
    if error.minimum_alpha is not None and rounded_up(error.minimum_alpha) < 1:
        advice.append(f"alpha >= {rounded_up(error.minimum_alpha):.4f} with this beta")
    if place < len(steps):
        advice.append(f"beta >= {steps[place] / BETA_STEPS:g} with this alpha")
    rejected = np.count_nonzero(~is_accepted(matched.require("acceptance"), limit))
    (alpha,) = request.levels.values()
    return RiskUnattainable(
        f"alpha = {alpha:g} and beta = {request.beta:g} cannot be certified together at delta = "
        f"{request.delta:g}: this beta rejects {rejected} of {len(matched)} calibration queries "
        f"with a match. Request {' or '.join(advice) or 'larger levels'} (on new queries, as it is "
        "chosen after looking), or calibrate on more queries",
        minimum_alpha=error.minimum_alpha,
        required_calibration=None,
    )
