"""Monitoring after calibration: test martingales and exchangeability."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from scipy.special import betaincc, betaln
from scipy.stats import binom, binomtest, ks_2samp

from rcir.errors import InvalidData, InvalidRiskLevel
from rcir.risk import (
    Constant,
    LabelledResults,
    RiskMonitor,
    SearchResults,
    check_exchangeability,
    score,
)


def factor(loss, risk, against):
    """The likelihood ratio of a risk against another, linear between losses 0 and 1."""
    return loss * risk / against + (1 - loss) * (1 - risk) / (1 - against)


def reserve(n):
    """The share of the initial wealth that is bet after n queries."""
    return 1.0 if n == 0 else 0.25 / (1 + math.log(n))


def forecasts(losses, alpha):
    """The forecast of each loss from those before: Bayes' rule over all times of one change."""
    risks = [alpha ** (1 - (j / 12) ** 2) for j in range(12)]
    risen, usual, means = [], [], []  # risen: (start, risk, odds)
    for n in range(len(losses) + 1):
        aged = [(1 - alpha / 100) ** (n - 1 - s) for s in range(n)]
        total = 0.5 + sum(a * x for a, x in zip(aged, losses, strict=False))
        usual.append(min(alpha, total / (1 / alpha + sum(aged))))
        odds = 0.3 if n == 0 else 1 / (5000 + n)
        risen += [(n, risk, odds / 12) for risk in risks]
        weights = [
            odds * math.prod(factor(losses[s], risk, usual[s]) for s in range(start, n))
            for start, risk, odds in risen
        ]
        mean = sum(weight * risk for weight, (_, risk, _) in zip(weights, risen, strict=True))
        means.append((usual[n] + mean) / (1 + sum(weights)))
    return means


def wealths(losses, alpha):
    """The wealth after 0, 1, ..., n losses, as a sum over the queries from which bets were made."""
    losses = [float(loss) for loss in losses]
    pairs = zip(losses, forecasts(losses[:-1], alpha), strict=True)
    factors = [factor(loss, max(risk, alpha), alpha) for loss, risk in pairs]
    return [
        sum((reserve(t) - reserve(t + 1)) * math.prod(factors[t:n]) for t in range(n)) + reserve(n)
        for n in range(len(losses) + 1)
    ]


STREAMS = {
    "all missed": np.ones(12),
    "none missed": np.zeros(30),
    "mixed": (np.random.default_rng(0).uniform(size=40) < 0.3).astype(float),
    "early": np.repeat([1.0, 0.0], [5, 30]),
    "late": np.repeat([0.0, 1.0], [30, 8]),
    "fractions": np.random.default_rng(1).beta(2, 3, size=30),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.6])
def test_evidence_is_the_largest_sum_over_all_bets(name, alpha):
    monitor, expected = RiskMonitor(alpha), wealths(STREAMS[name], alpha)
    for n, loss in enumerate(STREAMS[name], 1):
        monitor.update(loss)
        assert monitor.evidence == pytest.approx(max(expected[: n + 1]), rel=1e-9)
        wealth = math.exp(monitor.staked) + reserve(n + 1)
        assert wealth == pytest.approx(expected[n], rel=1e-9)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.6])
def test_wealth_does_not_grow_on_average_at_any_risk_up_to_alpha(name, alpha):
    for n in range(0, len(STREAMS[name]), 7):
        before = list(STREAMS[name][:n])
        wealth, missed = wealths([*before, 1.0], alpha)[-2:]
        served = wealths([*before, 0.0], alpha)[-1]
        for risk in (0.0, alpha / 2, alpha):
            assert risk * missed + (1 - risk) * served <= wealth * (1 + 1e-12)


@pytest.mark.parametrize("level", [0.5, 0.05, 1e-4])
def test_the_alarm_is_raised_when_the_wealth_is_one_over_the_level(level):
    losses = (np.random.default_rng(2).uniform(size=40) < 0.6).astype(float)
    monitor, expected = RiskMonitor(0.1, level), wealths(losses, 0.1)
    for n, loss in enumerate(losses, 1):
        due = max(expected[: n + 1]) >= 1 / level
        assert monitor.update(loss) == monitor.alarm == due
        if due:
            break
    assert monitor.alarm


def log_wealth_without_restarts(losses, alpha):
    """Log of the wealth bet once, on all risks above alpha alike."""
    n, total = np.arange(1, len(losses) + 1), np.cumsum(losses)
    with np.errstate(divide="ignore"):
        above = np.log(betaincc(total + 1, n - total + 1, alpha))
    risks = total * np.log(alpha) + (n - total + 1) * np.log1p(-alpha)
    return betaln(total + 1, n - total + 1) + above - risks


@pytest.mark.parametrize(
    ("before", "soon", "repetitions"),
    [
        (0, 60, 40),
        (100, 90, 40),
        (10_000, 90, 15),
        pytest.param(100_000, 130, 10, marks=pytest.mark.slow),
    ],
)
def test_a_long_low_risk_period_does_not_delay_detection(before, soon, repetitions):
    rng = np.random.default_rng(3)
    alarms, missed = [], []
    for _ in range(repetitions):
        losses = np.append(rng.uniform(size=before) < 0.05, rng.uniform(size=soon) < 0.3)
        monitor = RiskMonitor(0.1)
        assert not monitor.update(losses[:before])
        alarms.append(monitor.update(losses[before:]))
        missed.append(log_wealth_without_restarts(losses, 0.1).max() < math.log(100))
    assert np.mean(alarms) > 0.7
    assert np.mean(missed) > 0.9 or before <= 100


@pytest.mark.parametrize("name", STREAMS)
def test_losses_may_come_one_by_one_in_parts_or_all_at_once(name):
    losses = STREAMS[name]
    single, parts, batch = (RiskMonitor(0.1) for _ in range(3))
    for loss in losses:
        single.update(float(loss))
    for part in np.array_split(losses, 4):
        parts.update(part)
    batch.update(losses)
    expected = asdict(single)
    for other in (parts, batch):
        assert (other.n, other.total) == (len(losses), pytest.approx(math.fsum(losses)))
        for key, value in asdict(other).items():
            assert value == pytest.approx(expected[key], rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize("n", [0, 25])
def test_a_state_stored_as_json_continues_where_it_stopped(n):
    losses = STREAMS["mixed"]
    whole, first = RiskMonitor(0.1, 0.05), RiskMonitor(0.1, 0.05)
    whole.update(losses)
    first.update(losses[:n])
    second = RiskMonitor(**json.loads(json.dumps(asdict(first), allow_nan=False)))
    assert second == first
    assert second.update(losses[n:]) == whole.alarm
    assert second.peak == pytest.approx(whole.peak, rel=1e-9)


def test_an_alarm_of_a_monitor_stays():
    monitor = RiskMonitor(0.1)
    assert monitor.update(np.ones(10))
    evidence = monitor.evidence
    assert monitor.update(np.zeros(5000))
    assert monitor.alarm
    assert monitor.evidence == evidence
    assert RiskMonitor(**asdict(monitor)).alarm


@pytest.mark.parametrize(
    "losses", [[0, 1, 1.5], [0, -0.1], [1, math.nan], [math.inf], np.zeros((2, 2)), 2.0, ["no"]]
)
def test_invalid_losses_are_refused_and_change_nothing(losses):
    watch = RiskMonitor(0.1)
    watch.update([1, 0, 1])
    before = asdict(watch)
    with pytest.raises(InvalidData, match="losses"):
        watch.update(losses)
    assert asdict(watch) == before


def test_no_losses_change_nothing_and_booleans_count():
    monitor = RiskMonitor(0.1)
    assert not monitor.update([])
    assert asdict(monitor) == asdict(RiskMonitor(0.1))
    monitor.update([True, False, True])
    assert (monitor.n, monitor.total) == (3, 2.0)


@pytest.mark.parametrize("alpha", [1e-300, 0.1, math.nextafter(1, 0)])
@pytest.mark.parametrize("loss", [0.0, 0.5, 1.0])
def test_long_streams_of_one_loss_stay_finite(alpha, loss):
    monitor = RiskMonitor(alpha)
    monitor.update(np.full(20_000, loss))
    json.dumps(asdict(monitor), allow_nan=False)  # refuses what is not finite
    assert monitor.peak >= 0
    if loss == 0:  # no evidence
        assert monitor.evidence == pytest.approx(1.0, rel=1e-9)


@pytest.mark.slow
def test_a_million_queries_neither_exhaust_the_wealth_nor_raise_it():
    losses = np.random.default_rng(5).uniform(size=10**6) < np.repeat([0.0, 0.05], 500_000)
    monitor = RiskMonitor(0.1)
    assert not monitor.update(losses)
    # 0.05 has to become 100 or more, at a factor of nearly 10 each.
    assert not monitor.update(np.ones(3))
    assert monitor.update(np.ones(13))


def test_repeated_rises_within_alpha_raise_no_alarm_and_hide_none():
    rng = np.random.default_rng(6)
    monitor = RiskMonitor(0.1)
    for risk in (0.01, 0.09) * 8:
        assert not monitor.update(rng.uniform(size=1000) < risk)
    assert monitor.update(rng.uniform(size=250) < 0.3)


def draw(n, seed, shift=0.0, later=0.0, depth=8):
    """Queries with normal uncertainty, whose first match is later the larger `later` is."""
    rng = np.random.default_rng(seed)
    first = np.minimum(rng.poisson(1 + later, n), depth)  # no match at all if it is the depth
    relevant = np.arange(depth) == first[:, None]
    results = SearchResults(rng.normal(shift, size=n), depth)
    return score(Constant(), LabelledResults(results, relevant, np.ones(n, int)))


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("later", [0.0, 0.5])
def test_p_values_of_exchangeability_are_those_of_scipy(shift, later):
    calibration, recent = draw(300, 0), draw(80, 1, shift, later)
    result = check_exchangeability(calibration, recent)
    ranks = [
        [row.index(True) if True in row else np.inf for row in labelled.relevant.tolist()]
        for labelled in (calibration, recent)
    ]
    expected = {
        "uncertainty": ks_2samp(calibration.uncertainty, recent.uncertainty).pvalue,
        "score": ks_2samp(*ranks).pvalue,  # constant scores are ranks
    }
    assert result.p_values == pytest.approx(expected)
    assert result.p_value == pytest.approx(min(1.0, 2 * min(expected.values())))
    assert (result.n_calibration, result.n_recent) == (300, 80)


@pytest.mark.parametrize(("shift", "later"), [(1.0, 0.0), (0.0, 2.0)])
def test_a_shift_of_uncertainty_or_score_contradicts_exchangeability(shift, later):
    result = check_exchangeability(draw(500, 0), draw(200, 1, shift, later))
    assert result.contradicted()
    assert result.contradicted(result.p_value)
    assert not result.contradicted(result.p_value * (1 - 1e-9))
    shifted = "uncertainty" if shift else "score"
    assert min(result.p_values, key=result.p_values.get) == shifted


@pytest.mark.parametrize("level", [0.05, 0.2])
def test_exchangeable_queries_are_contradicted_about_as_rarely_as_the_level(level):
    rejections = sum(
        check_exchangeability(draw(100, seed), draw(40, seed + 1000)).contradicted(level)
        for seed in range(200)
    )
    assert rejections <= binom.ppf(0.999, 200, level)


@pytest.mark.parametrize("later", [0.0, 0.7])
@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_a_certified_risk_is_tested_by_scipys_binomial_test(later, alpha):
    calibration, recent = draw(300, 0), draw(80, 1, later=later)
    threshold = float(np.sort(calibration.match_score)[-20])
    plain = check_exchangeability(calibration, recent)
    result = check_exchangeability(calibration, recent, certified=(threshold, alpha))
    # The threshold of a constant score function is a number of ranks, counted from 0.
    misses = sum(not any(row[: int(threshold) + 1]) for row in recent.relevant.tolist())
    expected = binomtest(misses, 80, alpha, alternative="greater").pvalue
    assert 0 < misses < 80
    assert result.p_values == pytest.approx({**plain.p_values, "risk": expected})
    assert result.p_value == pytest.approx(min(1.0, 3 * min(result.p_values.values())))
    assert (result.misses, result.alpha) == (misses, alpha)
    assert (plain.misses, plain.alpha) == (None, None)
    assert str(misses) in str(result)
    none = check_exchangeability(calibration, draw(80, 1), certified=(7.0, 0.1))
    assert (none.misses, none.p_values["risk"]) == (0, 1.0)


def test_queries_without_a_match_have_the_largest_score_and_are_always_missed():
    none, results = np.zeros((100, 8), bool), SearchResults(draw(100, 5).uncertainty, 8)
    lost = score(Constant(), LabelledResults(results, none, np.zeros(100, int)))
    assert check_exchangeability(draw(300, 0), lost).p_values["score"] < 1e-10
    assert check_exchangeability(lost, lost).p_values["score"] == 1.0
    assert check_exchangeability(lost, lost, certified=(7.0, 0.5)).misses == 100


@pytest.mark.parametrize("alpha", [0, 1, -0.1, None, math.nan])
def test_an_invalid_certified_risk_and_a_single_query_are_refused(alpha):
    with pytest.raises(InvalidRiskLevel, match="alpha"):
        check_exchangeability(draw(50, 0), draw(20, 1), certified=(1.0, alpha))
    with pytest.raises(InvalidData, match="at least 2"):
        check_exchangeability(draw(50, 0), draw(1, 1))
