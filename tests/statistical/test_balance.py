"""The risk holds in each quarter of the uncertainty, all together."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import certify, make_request
from rcir.risk.balance import bins_of, quarters, thresholds_of
from rcir.risk.results import widen
from tests.risk.test_balance import draw

pytestmark = pytest.mark.statistical

N, DRAWS, ALPHA, DELTA, POPULATION = 400, 500, 0.2, 0.1, 40_000


@pytest.fixture(scope="module")
def population():
    return draw(POPULATION, 0)


def violated(population, certify_draw):
    """(DRAWS,) whether the exact risk of any quarter of the population exceeds alpha."""
    tuning, rng, found = draw(200, 1), np.random.default_rng(2), []
    in_bin = bins_of(population.uncertainty, quarters(tuning.uncertainty))
    for _ in range(DRAWS):
        calibration = population[rng.integers(POPULATION, size=N)]
        try:
            limits = certify_draw(calibration, tuning)
        except RiskUnattainable:
            found.append(False)
            continue
        missed = population.match_score > widen(limits)
        found.append(max(missed[in_bin == b].mean() for b in range(4)) > ALPHA)
    return np.array(found)


def test_no_quarter_exceeds_alpha_with_more_than_probability_delta(population, excess):
    request = make_request(ALPHA, DELTA, balance="uncertainty")
    exceeded = violated(
        population,
        lambda *splits: thresholds_of(certify(request, *splits), population.uncertainty),
    )
    assert excess(exceeded, DELTA) <= 3
    assert exceeded.mean() > 0.02


def test_one_threshold_for_all_and_bins_without_their_share_of_delta_would_be_noticed(
    population, excess
):
    plain = make_request(ALPHA, DELTA)
    exceeded = violated(population, lambda *splits: certify(plain, *splits).threshold)
    assert excess(exceeded, DELTA) > 3
    greedy = make_request(ALPHA, 0.39, balance="uncertainty")
    exceeded = violated(
        population,
        lambda *splits: thresholds_of(certify(greedy, *splits), population.uncertainty),
    )
    assert excess(exceeded, DELTA) > 3
