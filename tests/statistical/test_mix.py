"""Groups whose shares among the queries change after calibration."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import RISKS, Constant, Request, RiskController
from tests.statistical.populations import labelled

pytestmark = [pytest.mark.slow, pytest.mark.statistical]

DRAWS, N, DELTA, POPULATION = 2_000, 600, 0.1, 6_000
GROUPS = {"day": 0.6, "dusk": 0.25, "night": 0.15}  # and their shares in calibration
HARD = {"day": 0.5, "dusk": 1.0, "night": 1.6}  # how far down first matches are, on average
IN_USE = {"day": 0.2, "dusk": 0.3, "night": 0.5}


@pytest.fixture(scope="module")
def populations():
    """By group: queries with one to three matches, the scores of which are continuous."""
    rng = np.random.default_rng(0)

    def population(hardness):
        candidate_scores = np.sort(rng.exponential(hardness, (POPULATION, 6)), axis=1).cumsum(
            axis=1
        )
        candidate_scores[:, 0] = 0
        relevant = rng.uniform(size=candidate_scores.shape) < 0.4
        relevant[:, -1] |= ~relevant.any(axis=1)
        return labelled(candidate_scores, relevant)

    return {group: population(HARD[group]) for group in GROUPS}


@pytest.fixture(scope="module")
def everybody(populations):
    """The queries of all groups, one after the other."""
    parts = list(populations.values())
    return parts[0].joined(parts[1]).joined(parts[2])


@pytest.fixture(scope="module")
def risks(populations, true_risk):
    """(3, ...) exact risks of the groups at thresholds."""
    exact = {
        risk: [true_risk(part, risk) for part in populations.values()]
        for risk in ("miss", "recall")
    }
    return lambda thresholds, risk: np.array([of(thresholds) for of in exact[risk]])


@pytest.fixture(scope="module")
def thresholds(everybody):
    """(requests, DRAWS) what each of the requests gets; NaN if it is refused."""

    def thresholds(requests, shares=GROUPS):
        rng = np.random.default_rng(1)
        names = np.array(list(GROUPS))
        tuning = everybody[rng.integers(len(everybody), size=300)]
        found = np.full((len(requests), DRAWS), np.nan)
        for draw in range(DRAWS):
            which = rng.choice(len(names), N, p=list(shares.values()))
            rows = which * POPULATION + rng.integers(POPULATION, size=N)
            control = RiskController(
                Constant(), tuning, replace(everybody[rows], groups=names[which])
            )
            for number, request in enumerate(requests):
                with suppress(RiskUnattainable):
                    found[number, draw] = control.decide(request).threshold
        assert np.isfinite(found).mean() > 0.9, "too few requests are met to show anything"
        return found

    return thresholds


@pytest.mark.parametrize(("risk", "alpha"), [("miss", 0.2), ("recall", 0.35)])
def test_in_every_mix_the_risk_exceeds_alpha_in_at_most_delta_of_the_calibrations(
    thresholds, risks, excess, risk, alpha
):
    """That of a mix is a mean of those of the groups, hence largest where all are of one."""
    asked = [Request(alpha, DELTA, risk, mix="any"), Request(alpha, DELTA, risk)]
    any_mix, as_calibrated = risks(thresholds(asked), risk).max(axis=0) > alpha
    assert excess(any_mix, DELTA) <= 3
    assert excess(as_calibrated, DELTA) > 3


def test_in_every_mix_it_holds_for_all_alpha_at_once_too(thresholds, risks, excess):
    alphas = np.linspace(0.15, 0.3, 4)
    asked = [
        Request(float(alpha), DELTA, simultaneous=True, mix=mix)
        for mix in ("any", None)
        for alpha in alphas
    ]
    worst = risks(thresholds(asked), "miss").max(axis=0).reshape(2, len(alphas), -1)
    any_mix, as_calibrated = (worst > alphas[:, None]).any(axis=1)
    assert excess(any_mix, DELTA) <= 3
    assert excess(as_calibrated, DELTA) > 3


@pytest.mark.parametrize(
    ("risk", "alpha", "mix"),
    [
        ("miss", 0.2, IN_USE),
        ("miss", 0.2, {"dusk": 0.4, "night": 0.6}),
        ("recall", 0.35, IN_USE),
    ],
    ids=["misses", "misses of two groups", "recall"],
)
def test_in_the_mix_of_given_shares_the_risk_holds(thresholds, risks, excess, risk, alpha, mix):
    asked = [Request(alpha, DELTA, risk, mix=mix), Request(alpha, DELTA, risk)]
    shares = np.array([mix.get(group, 0.0) for group in GROUPS])
    weighted, unweighted = np.einsum("g,grd->rd", shares, risks(thresholds(asked), risk)) > alpha
    assert excess(weighted, DELTA) <= 3
    assert excess(unweighted, DELTA) > 3


def test_a_bound_for_losses_up_to_one_of_weighted_losses_would_be_noticed(everybody, risks, excess):
    """Weighted losses exceed 1: a night query, rare in calibration, counts eleven times."""
    rng, alpha = np.random.default_rng(2), 0.2
    rare = np.array([0.95, 0.0, 0.05])
    mix = np.array([0.45, 0.0, 0.55])
    failed = []
    thresholds_there = np.unique(everybody.scores)[::50]
    for _ in range(DRAWS):
        which = rng.choice(3, 60, p=rare)
        rows = which * POPULATION + rng.integers(POPULATION, size=60)
        weights = np.array([0.45 / 0.95, 0.0, 11.0])[which]
        losses = RISKS["miss"].losses(everybody[rows], thresholds_there) * weights[:, None]
        bounds = losses.mean(axis=0) + np.sqrt(np.log(1 / DELTA) / 120)
        certified = np.flatnonzero(bounds <= alpha)
        threshold = thresholds_there[certified[0]] if len(certified) else np.nan
        failed.append(mix @ risks(threshold, "miss") > alpha)
    assert excess(np.array(failed), DELTA) > 3
