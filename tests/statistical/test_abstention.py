"""Abstention: misses among the queries that are answered."""

import numpy as np
import pytest

from rcir.risk import p_value, selective
from tests.statistical.populations import answered

pytestmark = pytest.mark.statistical

N, DELTA, POPULATION = 300, 0.1, 20_000


def true_miss_rates(population, thresholds):
    """(m,) exact miss rates among the answers to the population at (m,) thresholds."""
    order = np.argsort(population.selection_score)
    misses = np.concatenate([[0], np.cumsum(~population.relevant[order, 0])])
    counts = np.searchsorted(population.selection_score[order], thresholds, side="right")
    return np.where(np.isnan(thresholds), np.nan, misses[counts] / np.maximum(counts, 1))


@pytest.fixture(scope="module")
def uninformative():
    """A tuning split and a population whose selection score is independent of misses."""
    rng = np.random.default_rng(5)
    return [answered(rng.uniform(size=n), rng.uniform(size=n) < 0.2) for n in (400, POPULATION)]


@pytest.fixture(scope="module")
def failures(draws, thresholds_of):
    """For each draw of calibration queries, True if answers are missed more often than alpha."""

    def failures(population, certify, alpha, met=0.5):
        thresholds = thresholds_of(certify, (population[row] for row in draws(N)), met)
        return true_miss_rates(population, thresholds) > alpha

    return failures


@pytest.mark.parametrize("alpha", [0.15, 0.2])
# With the other score functions, the order of the queries is that of `constant`.
@pytest.mark.parametrize("name", ["constant", "learned"])
def test_misses_among_answers_exceed_alpha_in_at_most_delta_of_the_calibrations(
    worlds, failures, excess, name, alpha
):
    tuning, population = worlds[name].tuning, worlds[name].population

    def certify(calibration):
        return selective(alpha, DELTA, calibration, tuning).selection_threshold

    assert excess(failures(population, certify, alpha), DELTA) <= 3


def test_an_uninformative_selection_score_seldom_seems_informative(uninformative, failures, excess):
    tuning, population = uninformative

    def certify(calibration):
        return selective(0.19, DELTA, calibration, tuning).selection_threshold

    assert excess(failures(population, certify, 0.19, met=0), DELTA) <= 3


def test_the_best_of_all_thresholds_without_correction_would_be_noticed(
    uninformative, failures, excess
):
    _, population = uninformative

    def certify(calibration):
        order = np.argsort(calibration.selection_score)
        misses = np.cumsum(~calibration.relevant[order, 0])
        values = [p_value(int(count), n, 0.19) for n, count in enumerate(misses, start=1)]
        certified = np.flatnonzero(np.array(values) <= DELTA)
        return calibration.selection_score[order][certified[-1]] if len(certified) else np.nan

    assert excess(failures(population, certify, 0.19, met=0), DELTA) > 3


def test_a_sequence_that_starts_where_the_calibration_queries_look_safest_would_be_noticed(
    uninformative, failures, excess
):
    _, population = uninformative

    def certify(calibration):
        return selective(0.19, DELTA, calibration, calibration).selection_threshold

    assert excess(failures(population, certify, 0.19, met=0), DELTA) > 3
