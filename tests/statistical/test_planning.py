"""Planned intervals of mean sizes hold what new calibrations need."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import certify, make_request, plan_calibration
from rcir.risk.planning import LEVEL

pytestmark = pytest.mark.statistical

PLANS, PILOT = 500, 60


def certified_size(request, calibration, population):
    """The exact mean size over a population, infinite if nothing is certified."""
    try:
        return population.sizes(certify(request, calibration).threshold).mean()
    except RiskUnattainable:
        return np.inf


def planned(request, pilot, n, seed):
    (row,) = plan_calibration(request, pilot, [n], seed=seed).rows
    return row.low, row.high


def as_if_the_pilot_were_the_population(request, pilot, n, seed):
    rng = np.random.default_rng(seed)
    draws = [certified_size(request, pilot[rng.integers(PILOT, size=n)], pilot) for _ in range(40)]
    return np.quantile(draws, [0.05, 0.95], method="inverted_cdf")


def missed(interval, request, n, population):
    """(PLANS,) whether the size after a new calibration is outside the interval of a new pilot."""
    rng, outside = np.random.default_rng(4), []
    for seed in range(PLANS):
        pilot, new = (population[rng.integers(len(population), size=k)] for k in (PILOT, n))
        low, high = interval(request, pilot, n, seed)
        size = certified_size(request, new, population)
        outside.append(not low * (1 - 1e-9) <= size <= high * (1 + 1e-9))
    return np.array(outside)


@pytest.mark.parametrize("name", ["quantile", "learned"])
@pytest.mark.parametrize(("n", "alpha"), [(50, 0.2), (300, 0.15)])
def test_the_size_is_within_the_interval(worlds, excess, name, n, alpha):
    population = worlds[name].population
    outside = missed(planned, make_request(alpha, 0.1), n, population)
    assert excess(outside, 1 - LEVEL) <= 3


def test_a_plan_that_takes_the_pilot_for_the_population_would_be_noticed(worlds, excess):
    population = worlds["quantile"].population
    request = make_request(0.15, 0.1)
    outside = missed(as_if_the_pilot_were_the_population, request, 300, population)
    assert excess(outside, 1 - LEVEL) > 3


def test_unattainable_draws_are_as_frequent_as_planned(worlds):
    population, request = worlds["quantile"].population, make_request(0.1, 0.1)
    rng, n, shares = np.random.default_rng(5), 100, []
    for seed in range(PLANS):
        pilot = population[rng.integers(len(population), size=PILOT)]
        (row,) = plan_calibration(request, pilot, [n], seed=seed).rows
        shares.append((row.unattainable, row.unattainable + row.beyond))
    new = [population[rng.integers(len(population), size=n)] for _ in range(PLANS)]
    failed = np.mean([np.isinf(certified_size(request, each, population)) for each in new])
    error = 3 * np.sqrt(0.25 / PLANS)
    low, high = np.mean(shares, axis=0)
    assert failed > 0.05
    assert low - error <= failed <= high + error
