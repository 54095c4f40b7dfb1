"""Monitors: false alarms are rare enough, and increased risks are detected."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.special import bdtrc, betaincc, betaln

from rcir.risk import (
    RiskMonitor,
    allowed_misses,
    check_exchangeability,
)
from tests.statistical.populations import matched_at

pytestmark = pytest.mark.statistical

STREAMS, ALPHA = 500, 0.1
LENGTHS = {"misses": 1_000, "shares": 1_000, "waves": 1_000}


def streams(source, risk):
    """Yield streams of losses with this mean."""
    rng = np.random.default_rng(0)
    for _ in range(STREAMS):
        if source == "misses":
            yield rng.uniform(size=LENGTHS[source]) < risk
        elif source == "shares":  # losses between 0 and 1, as of recall
            yield rng.binomial(3, risk, LENGTHS[source]) / 3
        else:  # this mean alternates with a lower one, which makes it look like a rise
            yield rng.uniform(size=LENGTHS[source]) < np.repeat([risk / 10, risk], 100)[ROUND]


ROUND = np.arange(LENGTHS["waves"]) % 200


def watched(losses):
    """Return a monitor of each stream, updated with it."""
    monitors = []
    for stream in losses:
        monitors.append(RiskMonitor(ALPHA))
        monitors[-1].update(stream)
    return monitors


@pytest.mark.parametrize("source", LENGTHS)
def test_a_risk_of_alpha_raises_an_alarm_with_probability_at_most_level(excess, source):
    monitors = watched(streams(source, ALPHA))
    for level in (0.01, 0.05, 0.1, 0.3):
        alarms = [replace(monitor, level=level).alarm for monitor in monitors]
        assert excess(alarms, level) <= 3


@pytest.mark.parametrize("source", ["misses", "shares"])
def test_a_risk_above_alpha_raises_the_alarm(source):
    monitors = watched(stream[:500] for stream in streams(source, 0.2))
    assert np.mean([monitor.alarm for monitor in monitors]) > 0.99


def test_a_fixed_sample_test_at_every_query_would_be_noticed(excess):
    n = np.arange(1, LENGTHS["misses"] + 1)
    wrong = []
    for stream in streams("misses", ALPHA):
        p_values = bdtrc(np.cumsum(stream) - 1.0, n, ALPHA)  # P(Binomial(n, alpha) >= misses)
        wrong.append(bool((p_values <= 0.05).any()))
    assert excess(wrong, 0.05) > 3


def test_bets_without_a_stake_would_be_noticed(excess):
    """A bet of 1 that starts at each query has a total wealth of n after n queries."""
    wealth, wrong = np.zeros(STREAMS), np.zeros(STREAMS, bool)
    for missed in np.transpose([stream[:500] for stream in streams("misses", ALPHA)]):
        wealth = np.where(missed, 0.2 / ALPHA, 0.8 / (1 - ALPHA)) * (wealth + 1)
        wrong |= wealth >= 1 / 0.05
    assert excess(wrong, 0.05) > 3


def without_restarts(losses):
    """Return True if one bet, uniform over the risks above alpha, ever has a wealth of 100."""
    n, total = np.arange(1, len(losses) + 1), np.cumsum(losses)
    with np.errstate(divide="ignore"):
        above = np.log(betaincc(total + 1, n - total + 1, ALPHA))
    mean = betaln(total + 1, n - total + 1) + above
    return (mean - total * np.log(ALPHA) - (n - total + 1) * np.log1p(-ALPHA)).max() >= np.log(100)


def test_half_the_rises_after_10_000_good_queries_are_detected_within_75_queries():
    rng, alarms, once = np.random.default_rng(1), [], []
    for _ in range(100):
        losses = np.append(rng.uniform(size=10_000) < 0.05, rng.uniform(size=75) < 0.3)
        monitor = RiskMonitor(ALPHA)
        assert not monitor.update(losses[:-75])
        alarms.append(monitor.update(losses[-75:]))
        once.append(without_restarts(losses))
    assert np.mean(alarms) > 0.5
    assert np.mean(once) < 0.01


def uniform_queries(rng, factor, n):
    """Return queries with scores that are uniform up to a factor and independent uncertainties."""
    return matched_at(factor * rng.uniform(size=n), rng.normal(size=n))


@pytest.fixture(scope="module")
def compared(worlds, draws):
    """For each draw, the test of 150 calibration queries against 80 recent queries."""

    def compared(source):
        smooth = uniform_queries(np.random.default_rng(8), 1.0, 20_000)
        population = worlds["learned"].population if source == "retrieval" else smooth
        pairs = zip(draws(150, seed=6), draws(80, seed=7), strict=True)
        return [check_exchangeability(population[old], population[new]) for old, new in pairs]

    return cache(compared)


@pytest.mark.parametrize("source", ["retrieval", "smooth"])
@pytest.mark.parametrize("level", [0.01, 0.05, 0.2])
def test_queries_of_one_source_are_contradicted_with_probability_at_most_level(
    compared, excess, level, source
):
    assert excess([test.contradicted(level) for test in compared(source)], level) <= 3


def test_the_smaller_of_two_p_values_without_correction_would_be_noticed(compared, excess):
    wrong = [min(test.p_values.values()) <= 0.2 for test in compared("smooth")]
    assert excess(wrong, 0.2) > 3


def test_harder_queries_than_the_calibration_queries_are_detected(worlds, draws):
    population = worlds["learned"].population
    hard = np.flatnonzero(population.uncertainty > np.quantile(population.uncertainty, 0.5))
    contradicted = [
        check_exchangeability(population[old], population[hard[new]]).contradicted()
        for old, new in zip(draws(150)[:200], draws(80, size=len(hard))[:200], strict=True)
    ]
    assert np.mean(contradicted) > 0.99


CERTIFIED, RECENT = 0.1, 200


@pytest.fixture(scope="module")
def checks_of():
    """`checks_of(risk)`: STREAMS checks of 200 recent queries with this risk at the threshold.

    The scores of 1,000 calibration queries are uniform; those of recent queries are too, or larger
    by a factor. Calibrations whose certificate does not hold are left out.
    """

    def checks_of(risk):
        rng, checks = np.random.default_rng(9), []
        allowed = allowed_misses(1000, CERTIFIED, 0.1)
        while len(checks) < STREAMS:
            calibration = uniform_queries(rng, 1.0, 1000)
            threshold = float(np.sort(calibration.match_score)[-1 - allowed])
            if threshold >= 1 - CERTIFIED:
                factor = 1.0 if risk is None else threshold / (1 - risk)
                recent = uniform_queries(rng, factor, RECENT)
                checks.append(
                    check_exchangeability(calibration, recent, certified=(threshold, CERTIFIED))
                )
        return checks

    return cache(checks_of)


@pytest.mark.parametrize("level", [0.01, 0.05, 0.2])
def test_a_valid_certificate_is_seldom_contradicted(checks_of, excess, level):
    checks = checks_of(None)
    assert excess([check.contradicted(level) for check in checks], level) <= 3
    assert excess([check.p_values["risk"] <= level for check in checks], level) <= 3


def test_the_smallest_of_three_p_values_would_be_noticed(checks_of, excess):
    wrong = [min(check.p_values.values()) <= 0.2 for check in checks_of(None)]
    assert excess(wrong, 0.2) > 3


def test_200_queries_detect_twice_the_risk(checks_of):
    checks = checks_of(0.2)
    assert np.mean([check.misses for check in checks]) == pytest.approx(40, abs=0.5)
    assert np.mean([check.contradicted() for check in checks]) >= 0.9
    without = [2 * min(check.p_values["uncertainty"], check.p_values["score"]) for check in checks]
    assert np.mean(np.array(without) <= 0.01) < 0.7
