"""Abstention: misses among the queries that are answered."""

import numpy as np
import pytest

from rcir.risk import ADAPTERS, AbstentionController, Answered, p_value

pytestmark = pytest.mark.statistical

N, DELTA = 300, 0.1


def answered(outcomes, rows=slice(None)):
    """The queries, were they answered with their first candidate."""
    return Answered(outcomes.doubt[rows], ~outcomes.relevant[rows, 0])


def true_miss_rates(population, thresholds):
    """(m,) the exact miss rate among the population's answers at (m,) thresholds."""
    order = np.argsort(population.doubt)
    misses = np.concatenate([[0], np.cumsum(population.missed[order])])
    counts = np.searchsorted(population.doubt[order], thresholds, side="right")
    rates = misses[counts] / np.maximum(counts, 1)
    return np.where(np.isnan(thresholds), np.nan, rates)


@pytest.fixture(scope="module")
def uninformative(everybody):
    """Two samples of queries whose doubt says nothing, and the one miss rate of all thresholds."""
    rng = np.random.default_rng(5)
    sizes = (len(everybody.totals), 400)
    return [Answered(rng.uniform(size=n), rng.uniform(size=n) < 0.2) for n in sizes]


@pytest.mark.parametrize("alpha", [0.1, 0.2])
@pytest.mark.parametrize("name", ADAPTERS)
def test_misses_among_answers_exceed_alpha_in_at_most_delta_of_the_calibrations(
    worlds, draws, answers, excess, name, alpha
):
    tuning, population = answered(worlds[name].tuning), answered(worlds[name].population)
    controllers = (
        AbstentionController(Answered(population.doubt[row], population.missed[row]), tuning)
        for row in draws(N)
    )
    thresholds = answers(lambda controller: controller.threshold(alpha, DELTA), controllers)
    assert excess(true_miss_rates(population, thresholds) > alpha, DELTA) <= 3
