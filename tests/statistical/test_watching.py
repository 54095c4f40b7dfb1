"""What is watched in use: false alarms are as rare as promised, true ones come."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.special import bdtrc

from rcir.risk import Outcomes, RiskMonitor, check_exchangeability

pytestmark = pytest.mark.statistical

STREAMS, ALPHA = 2_000, 0.1
LENGTHS = {"misses": 2_000, "shares": 1_000}


def streams(source, risk):
    """Losses of this mean, one stream of queries after the other."""
    rng = np.random.default_rng(0)
    for _ in range(STREAMS):
        if source == "misses":
            yield rng.uniform(size=LENGTHS[source]) < risk
        else:  # losses in between, as of recall
            yield rng.binomial(3, risk, LENGTHS[source]) / 3


def watched(losses):
    """The monitors that have seen the streams."""
    monitors = []
    for stream in losses:
        monitors.append(RiskMonitor(ALPHA))
        monitors[-1].update(stream)
    return monitors


@pytest.mark.parametrize("source", LENGTHS)
def test_a_kept_promise_raises_an_alarm_with_probability_level_at_most(excess, source):
    monitors = watched(streams(source, ALPHA))
    for level in (0.01, 0.05, 0.1, 0.3):
        alarms = [replace(monitor, level=level).alarm for monitor in monitors]
        assert excess(alarms, level) <= 3


@pytest.mark.parametrize("source", LENGTHS)
def test_a_broken_promise_raises_the_alarm(source):
    seen = watched(stream[:500] for stream in streams(source, 0.2))
    assert np.mean([monitor.alarm for monitor in seen]) > 0.99


def test_a_fixed_sample_test_at_every_query_would_be_noticed(excess):
    n = np.arange(1, LENGTHS["misses"] + 1)
    wrong = []
    for stream in streams("misses", ALPHA):
        p_values = bdtrc(np.cumsum(stream) - 1.0, n, ALPHA)  # P(Binomial(n, alpha) >= misses)
        wrong.append(bool((p_values <= 0.05).any()))
    assert excess(wrong, 0.05) > 3


def smooth(n):
    """Queries whose uncertainties and scores are continuous and have nothing in common."""
    rng = np.random.default_rng(8)
    costs = np.stack([np.zeros(n), rng.uniform(size=n)], axis=1).astype(np.float32)
    relevant = np.tile([False, True], (n, 1))
    return Outcomes(costs, relevant, np.ones(n, np.int64), rng.normal(size=n), np.zeros(n))


@pytest.fixture(scope="module")
def compared(worlds, draws):
    """For each draw, the test of 150 calibration against 80 recent queries."""

    def compared(source):
        population = worlds["learned"].population if source == "retrieval" else smooth(20_000)
        pairs = zip(draws(150, seed=6), draws(80, seed=7), strict=True)
        return [
            check_exchangeability(population.subset(old), population.subset(new))
            for old, new in pairs
        ]

    return cache(compared)


@pytest.mark.parametrize("source", ["retrieval", "smooth"])
@pytest.mark.parametrize("level", [0.01, 0.05, 0.2])
def test_queries_of_one_source_are_told_apart_with_probability_level_at_most(
    compared, excess, level, source
):
    assert excess([test.contradicted(level) for test in compared(source)], level) <= 3


def test_the_smaller_of_two_p_values_without_correction_would_be_noticed(compared, excess):
    wrong = [min(test.p_values.values()) <= 0.2 for test in compared("smooth")]
    assert excess(wrong, 0.2) > 3


def test_harder_queries_than_the_calibration_queries_are_told_apart(worlds, draws):
    population = worlds["learned"].population
    hard = np.flatnonzero(population.uncertainty > np.quantile(population.uncertainty, 0.5))
    found = [
        check_exchangeability(population.subset(old), population.subset(hard[new])).contradicted()
        for old, new in zip(draws(150)[:200], draws(80, size=len(hard))[:200], strict=True)
    ]
    assert np.mean(found) > 0.99
