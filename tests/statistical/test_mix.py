"""Groups whose shares among the queries change after calibration."""

import numpy as np
import pytest

from rcir.risk import RISKS, certify, make_request
from tests.populations import in_population
from tests.statistical.populations import matched_at, scored_queries

pytestmark = [pytest.mark.slow, pytest.mark.statistical]

DRAWS, N, DELTA, POPULATION = 500, 600, 0.1, 6_000
GROUPS = {"day": 0.6, "dusk": 0.25, "night": 0.15}  # shares in calibration
HARD = {"day": 0.5, "dusk": 1.0, "night": 1.6}  # mean spacing of the scores
IN_USE = {"day": 0.2, "dusk": 0.3, "night": 0.5}


@pytest.fixture(scope="module")
def populations():
    """By group: queries with one or more matches and continuous scores."""
    rng = np.random.default_rng(0)

    def population(hardness):
        scores = np.sort(rng.exponential(hardness, (POPULATION, 6)), axis=1).cumsum(axis=1)
        scores[:, 0] = 0
        relevant = rng.uniform(size=scores.shape) < 0.4
        relevant[:, -1] |= ~relevant.any(axis=1)
        return scored_queries(scores, relevant)

    return {group: population(HARD[group]) for group in GROUPS}


@pytest.fixture(scope="module")
def everybody(populations):
    """The queries of all groups, one after the other."""
    first, *others = populations.values()
    return first.joined(*others)


@pytest.fixture(scope="module")
def risks(populations, true_risk):
    """`risks(thresholds, risk)`: (3, ...) exact risks of the groups."""
    exact = {
        risk: [true_risk(part, risk) for part in populations.values()]
        for risk in ("miss", "recall")
    }
    return lambda thresholds, risk: np.array([of(thresholds) for of in exact[risk]])


@pytest.fixture(scope="module")
def thresholds(everybody, thresholds_of):
    """`thresholds(requests)`: (requests, DRAWS) certified thresholds, NaN if unattainable."""

    def thresholds(requests, shares=GROUPS):
        rng = np.random.default_rng(1)
        names = np.array(list(GROUPS))
        tuning = everybody[rng.integers(len(everybody), size=300)]

        def calibrations():
            for _ in range(DRAWS):
                which = rng.choice(len(names), N, p=list(shares.values()))
                rows = which * POPULATION + rng.integers(POPULATION, size=N)
                calibration = in_population(everybody[rows], groups=names[which])
                yield from ((request, calibration) for request in requests)

        certified = thresholds_of(
            lambda pair: certify(*pair, tuning).threshold, calibrations(), met=0.9
        )
        return certified.reshape(DRAWS, len(requests)).T

    return thresholds


@pytest.mark.parametrize(("risk", "alpha"), [("miss", 0.2), ("recall", 0.35)])
def test_in_every_mix_the_risk_exceeds_alpha_in_at_most_delta_of_the_calibrations(
    thresholds, risks, excess, risk, alpha
):
    """The risk of a mix is a mean of the risks of the groups, hence at most the largest of them."""
    requests = [
        make_request(alpha, DELTA, risk=risk, mix="any"),
        make_request(alpha, DELTA, risk=risk),
    ]
    any_mix, as_calibrated = risks(thresholds(requests), risk).max(axis=0) > alpha
    assert excess(any_mix, DELTA) <= 3
    assert excess(as_calibrated, DELTA) > 3


def test_in_every_mix_the_risk_holds_for_all_alphas_at_once(thresholds, risks, excess):
    alphas = np.linspace(0.15, 0.3, 4)
    requests = [
        make_request(float(alpha), DELTA, simultaneous=True, mix=mix)
        for mix in ("any", None)
        for alpha in alphas
    ]
    worst = risks(thresholds(requests), "miss").max(axis=0).reshape(2, len(alphas), -1)
    any_mix, as_calibrated = (worst > alphas[:, None]).any(axis=1)
    assert excess(any_mix, DELTA) <= 3
    assert excess(as_calibrated, DELTA) > 3


@pytest.mark.parametrize(
    ("risk", "alpha", "mix"),
    [("miss", 0.2, IN_USE), ("miss", 0.2, {"dusk": 0.4, "night": 0.6}), ("recall", 0.35, IN_USE)],
    ids=["misses", "misses of two groups", "recall"],
)
def test_in_the_mix_of_given_shares_the_risk_holds(thresholds, risks, excess, risk, alpha, mix):
    requests = [
        make_request(alpha, DELTA, risk=risk, mix=mix),
        make_request(alpha, DELTA, risk=risk),
    ]
    shares = np.array([mix.get(group, 0.0) for group in GROUPS])
    weighted, unweighted = np.einsum("g,grd->rd", shares, risks(thresholds(requests), risk)) > alpha
    assert excess(weighted, DELTA) <= 3
    assert excess(unweighted, DELTA) > 3


def test_a_bound_that_ignores_the_range_of_weighted_losses_would_be_noticed(
    everybody, risks, excess
):
    """Weighted losses exceed 1: the weight of a night query, rare in calibration, is 11."""
    rng, alpha = np.random.default_rng(2), 0.2
    rare = np.array([0.95, 0.0, 0.05])
    mix = np.array([0.45, 0.0, 0.55])
    failed = []
    candidates = np.unique(everybody.match_score)[::50]
    for _ in range(DRAWS):
        which = rng.choice(3, 60, p=rare)
        rows = which * POPULATION + rng.integers(POPULATION, size=60)
        weights = np.array([0.45 / 0.95, 0.0, 11.0])[which]
        losses = RISKS["miss"].losses(everybody[rows], candidates) * weights[:, None]
        bounds = losses.mean(axis=0) + np.sqrt(np.log(1 / DELTA) / 120)
        certified = np.flatnonzero(bounds <= alpha)
        threshold = candidates[certified[0]] if len(certified) else np.nan
        failed.append(mix @ risks(threshold, "miss") > alpha)
    assert excess(np.array(failed), DELTA) > 3


@pytest.mark.parametrize(("mix", "holds"), [("any", True), (None, False)], ids=["any", "broken"])
def test_in_every_mix_of_groups_in_clusters_the_risk_holds(thresholds_of, excess, mix, holds):
    """The risk of the hard group, that of a quarter of the clusters, is 1 - threshold."""
    rng, alpha, number, size = np.random.default_rng(8), 0.3, 100, 10
    request = make_request(alpha, DELTA, mix=mix)

    def drawn():
        is_hard = rng.uniform(size=(number, 1)) < 0.25
        scores = rng.uniform(size=(number, 1)) * np.where(is_hard, 1, 0.3)
        return in_population(
            matched_at(np.repeat(scores, size)),
            groups=np.repeat(np.where(is_hard, "b", "a"), size),
            clusters=np.repeat(np.arange(number), size),
            cluster_word="video",
        )

    tuning = drawn()
    samples = (drawn() for _ in range(DRAWS))
    thresholds = thresholds_of(lambda sample: certify(request, sample, tuning).threshold, samples)
    assert (excess(1 - thresholds > alpha, DELTA) <= 3) == holds
