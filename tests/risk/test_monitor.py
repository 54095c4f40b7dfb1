import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from scipy.special import betaincc, betaln

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import ChangeDetector, RiskMonitor


def factor(loss, risk, against):
    """The likelihood ratio of a risk against another, linear between losses 0 and 1."""
    return loss * risk / against + (1 - loss) * (1 - risk) / (1 - against)


def kept(n):
    """The share of the first wealth that is bet after n queries."""
    return 1.0 if n == 0 else 0.25 / (1 + math.log(n))


def forecasts(losses, alpha):
    """The forecast of each loss from those before: Bayes' rule over all times of one change."""
    risks = [alpha ** (1 - (j / 12) ** 2) for j in range(12)]
    risen, usual, given = [], [], []  # risen: (start, risk, odds)
    for n in range(len(losses) + 1):
        aged = [(1 - alpha / 100) ** (n - 1 - s) for s in range(n)]
        usual.append(
            min(
                alpha,
                (0.5 + sum(a * x for a, x in zip(aged, losses, strict=False)))
                / (1 / alpha + sum(aged)),
            )
        )
        odds = 0.3 if n == 0 else 1 / (5000 + n)
        risen += [(n, risk, odds / 12) for risk in risks]
        weights = [
            odds * math.prod(factor(losses[s], risk, usual[s]) for s in range(start, n))
            for start, risk, odds in risen
        ]
        mean = sum(weight * risk for weight, (_, risk, _) in zip(weights, risen, strict=True))
        given.append((usual[n] + mean) / (1 + sum(weights)))
    return given


def wealths(losses, alpha):
    """The wealth after 0, 1, ..., n losses, as a sum over the queries from which bets were made."""
    losses = [float(loss) for loss in losses]
    given = forecasts(losses[:-1], alpha)
    factors = [
        factor(loss, max(risk, alpha), alpha) for loss, risk in zip(losses, given, strict=True)
    ]
    return [
        sum((kept(t) - kept(t + 1)) * math.prod(factors[t:n]) for t in range(n)) + kept(n)
        for n in range(len(losses) + 1)
    ]


STREAMS = {
    "all missed": np.ones(12),
    "none missed": np.zeros(30),
    "mixed": (np.random.default_rng(0).uniform(size=50) < 0.3).astype(float),
    "early": np.repeat([1.0, 0.0], [5, 40]),
    "late": np.repeat([0.0, 1.0], [40, 8]),
    "fractions": np.random.default_rng(1).beta(2, 3, size=40),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.6])
def test_the_evidence_is_the_largest_sum_over_all_bets(name, alpha):
    monitor, expected = RiskMonitor(alpha), wealths(STREAMS[name], alpha)
    for n, loss in enumerate(STREAMS[name], 1):
        monitor.update(loss)
        assert monitor.evidence == pytest.approx(max(expected[: n + 1]), rel=1e-9)
        now = math.exp(monitor.staked) + kept(n + 1)
        assert now == pytest.approx(expected[n], rel=1e-9)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.6])
def test_no_risk_up_to_alpha_lets_the_wealth_grow_on_average(name, alpha):
    for n in range(0, len(STREAMS[name]), 4):
        before = list(STREAMS[name][:n])
        known, missed = wealths([*before, 1.0], alpha)[-2:]
        served = wealths([*before, 0.0], alpha)[-1]
        for risk in (0.0, alpha / 2, alpha):
            assert risk * missed + (1 - risk) * served <= known * (1 + 1e-12)


@pytest.mark.parametrize("level", [0.5, 0.05, 1e-4])
def test_the_alarm_is_raised_when_the_wealth_is_one_over_the_level(level):
    losses = (np.random.default_rng(2).uniform(size=70) < 0.6).astype(float)
    monitor, expected = RiskMonitor(0.1, level), wealths(losses, 0.1)
    for n, loss in enumerate(losses, 1):
        due = max(expected[: n + 1]) >= 1 / level
        assert monitor.update(loss) == due
        assert monitor.alarm == due
        if due:
            break
    assert monitor.alarm


def without_restarts(losses, alpha):
    """Log of the wealth bet once, on all risks above alpha alike."""
    n, total = np.arange(1, len(losses) + 1), np.cumsum(losses)
    with np.errstate(divide="ignore"):
        above = np.log(betaincc(total + 1, n - total + 1, alpha))
    return (
        betaln(total + 1, n - total + 1)
        + above
        - total * np.log(alpha)
        - (n - total + 1) * np.log1p(-alpha)
    )


@pytest.mark.parametrize("before", [0, 100, 10_000, 100_000])
def test_a_late_rise_of_the_risk_is_told_about_as_soon_as_an_early_one(before):
    rng = np.random.default_rng(3)
    soon = {0: 60, 100: 90, 10_000: 90, 100_000: 130}[before]
    alarms, missed = [], []
    for _ in range(40 if before < 100_000 else 10):
        losses = np.append(rng.uniform(size=before) < 0.05, rng.uniform(size=soon) < 0.3)
        monitor = RiskMonitor(0.1)
        assert not monitor.update(losses[:before])
        alarms.append(monitor.update(losses[before:]))
        missed.append(without_restarts(losses, 0.1).max() < math.log(100))
    assert np.mean(alarms) > 0.7
    assert np.mean(missed) > 0.9 or before <= 100


@pytest.mark.parametrize("make", [RiskMonitor, lambda alpha: ChangeDetector(alpha, 1e4)])
@pytest.mark.parametrize("name", STREAMS)
def test_one_by_one_in_parts_and_all_at_once_are_the_same(name, make):
    losses = STREAMS[name]
    single, parts, batch = (make(0.1) for _ in range(3))
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


@pytest.mark.parametrize("make", [RiskMonitor, lambda alpha: ChangeDetector(alpha, 1e4)])
def test_long_streams_are_the_same_in_any_parts(make, monkeypatch):
    losses = np.random.default_rng(4).uniform(size=3000) < np.repeat([0.05, 0.1, 0.2], 1000)
    whole, small = make(0.1), make(0.1)
    whole.update(losses)
    monkeypatch.setattr("rcir.risk.monitor.LOSSES_TOGETHER", 7)
    small.update(losses)
    assert small.peak == pytest.approx(whole.peak, rel=1e-9)
    assert small.staked == pytest.approx(whole.staked, rel=1e-9)


@pytest.mark.parametrize("first", [RiskMonitor(0.1, 0.05), ChangeDetector(0.1, 500)])
@pytest.mark.parametrize("known", [0, 25])
def test_what_was_stored_as_json_goes_on_where_it_was(first, known):
    losses = STREAMS["mixed"]
    first = replace(first)
    whole = type(first)(**asdict(first))
    whole.update(losses)
    first.update(losses[:known])
    second = type(first)(**json.loads(json.dumps(asdict(first), allow_nan=False)))
    assert second == first
    assert second.update(losses[known:]) == whole.alarm
    assert second.peak == pytest.approx(whole.peak, rel=1e-9)


def test_an_alarm_stays_whatever_follows():
    monitor = RiskMonitor(0.1)
    assert monitor.update(np.ones(10))
    evidence = monitor.evidence
    assert monitor.update(np.zeros(5000))
    assert monitor.alarm
    assert monitor.evidence == evidence
    assert RiskMonitor(**asdict(monitor)).alarm


@pytest.mark.parametrize("make", [RiskMonitor, lambda alpha: ChangeDetector(alpha, 1e4)])
@pytest.mark.parametrize(
    "losses", [[0, 1, 1.5], [0, -0.1], [1, math.nan], [math.inf], np.zeros((2, 2)), 2.0, ["no"]]
)
def test_of_losses_that_make_no_sense_none_is_taken(losses, make):
    watch = make(0.1)
    watch.update([1, 0, 1])
    before = asdict(watch)
    with pytest.raises(InvalidData, match=r"in \[0, 1\]"):
        watch.update(losses)
    assert asdict(watch) == before


def test_no_losses_change_nothing_and_booleans_count():
    monitor = RiskMonitor(0.1)
    assert not monitor.update([])
    assert asdict(monitor) == asdict(RiskMonitor(0.1))
    monitor.update([True, False, True])
    assert (monitor.n, monitor.total) == (3, 2.0)


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 0.1, 0.999999, math.nextafter(1, 0)])
@pytest.mark.parametrize("loss", [0.0, 0.5, 1.0])
def test_long_streams_of_one_kind_stay_finite(alpha, loss):
    for watch in (RiskMonitor(alpha), ChangeDetector(alpha, 1e6)):
        watch.update(np.full(10**5, loss))
        json.dumps(asdict(watch), allow_nan=False)  # refuses what is not finite
        assert watch.peak >= 0


def test_a_million_queries_neither_wear_the_wealth_out_nor_raise_it():
    losses = np.random.default_rng(5).uniform(size=10**6) < np.repeat([0.0, 0.05], 500_000)
    monitor, detector = RiskMonitor(0.1), ChangeDetector(0.1, 1e9)
    assert not monitor.update(losses)
    assert not detector.update(losses[-100_000:])
    # 0.05 has to become 100 or more, and 1 / 11 more than 1e9, at a factor of nearly 10 each.
    for watch in (monitor, detector):
        assert not watch.update(np.ones(3))
        assert watch.update(np.ones(13))


def test_a_risk_that_rises_within_alpha_again_and_again_is_no_alarm_and_hides_none():
    rng = np.random.default_rng(6)
    monitor = RiskMonitor(0.1)
    for risk in (0.01, 0.09) * 8:
        assert not monitor.update(rng.uniform(size=1000) < risk)
    assert monitor.update(rng.uniform(size=250) < 0.3)


def test_nothing_missed_is_no_evidence():
    monitor = RiskMonitor(0.3)
    monitor.update(np.zeros(10**5))
    assert monitor.evidence == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.6])
def test_what_the_detector_adds_up_is_one_bet_per_query_and_risk(name, alpha):
    losses = [float(loss) for loss in STREAMS[name]]
    risks = [alpha ** (1 - (j / 12) ** 2) for j in range(1, 12)]
    detector, most = ChangeDetector(alpha, 1e9), 1.0
    for n in range(1, len(losses) + 1):
        detector.update(losses[n - 1])
        wealth = [
            math.prod(factor(loss, risk, alpha) for loss in losses[start:n])
            for risk in risks
            for start in range(n)
        ]
        most = max(most, sum(wealth) / 11)
        assert math.exp(detector.peak) == pytest.approx(most, rel=1e-9)


def test_a_detector_begins_again_after_an_alarm():
    detector = ChangeDetector(0.1, 1000)
    assert detector.update(np.ones(10))
    assert detector.update(np.zeros(500))
    detector.reset()
    assert detector == ChangeDetector(0.1, 1000)
    assert not detector.update(np.zeros(500))
    assert detector.update(np.ones(10))


@pytest.mark.parametrize("mean_time", [1, 0, -5, math.inf, math.nan, None, "many"])
def test_a_mean_time_that_is_none_is_refused(mean_time):
    with pytest.raises(InvalidConfig, match=r"mean_time is .*number of queries above 1"):
        ChangeDetector(0.1, mean_time)
