import math
from dataclasses import asdict

import numpy as np
import pytest
from scipy.integrate import quad

from rcir.errors import InvalidData
from rcir.risk import RiskMonitor


def owned(losses, alpha):
    """The likelihood ratio against alpha, averaged over all risks from alpha to 1."""
    total, n = math.fsum(losses), len(losses)

    def ratio(risk):
        return (risk / alpha) ** total * ((1 - risk) / (1 - alpha)) ** (n - total)

    area, _ = quad(ratio, alpha, 1, points=[max(alpha, total / n)], epsabs=0, epsrel=1e-9)
    return area / (1 - alpha)


def most(losses, alpha):
    return max(1.0, *(owned(losses[: k + 1], alpha) for k in range(len(losses))))


STREAMS = {
    "all missed": np.ones(12),
    "none missed": np.zeros(30),
    "mixed": (np.random.default_rng(0).uniform(size=60) < 0.3).astype(float),
    "early": np.repeat([1.0, 0.0], [5, 60]),
    "fractions": np.random.default_rng(1).beta(2, 3, size=50),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.6])
def test_the_evidence_is_the_most_that_numerical_integration_gives(name, alpha):
    monitor = RiskMonitor(alpha)
    for k, loss in enumerate(STREAMS[name]):
        monitor.update(loss)
        expected = most(STREAMS[name][: k + 1], alpha) if k % 10 == 0 else None
        assert expected is None or monitor.evidence == pytest.approx(expected, rel=1e-6)
    assert monitor.evidence == pytest.approx(most(STREAMS[name], alpha), rel=1e-6)


@pytest.mark.parametrize("level", [0.5, 0.05, 1e-4])
def test_the_alarm_is_raised_when_one_over_the_level_is_owned(level):
    losses = (np.random.default_rng(2).uniform(size=120) < 0.35).astype(float)
    monitor, alpha = RiskMonitor(0.1, level), 0.1
    for k in range(len(losses)):
        due = most(losses[: k + 1], alpha) >= 1 / level
        assert monitor.update(losses[k]) == due
        assert monitor.alarm == due
        if due:
            break
    assert monitor.alarm


@pytest.mark.parametrize("name", STREAMS)
def test_one_by_one_in_parts_and_all_at_once_are_the_same(name):
    losses = STREAMS[name]
    single, parts, batch = (RiskMonitor(0.1) for _ in range(3))
    for loss in losses:
        single.update(float(loss))
    for part in np.array_split(losses, 4):
        parts.update(part)
    batch.update(losses)
    for other in (parts, batch):
        assert (other.n, other.total) == (len(losses), pytest.approx(math.fsum(losses)))
        assert other.peak == pytest.approx(single.peak, rel=1e-9, abs=1e-12)
    assert batch.n == single.n == len(losses)


def test_a_stored_monitor_goes_on_where_it_was():
    losses = STREAMS["mixed"]
    whole, first = RiskMonitor(0.1, 0.05), RiskMonitor(0.1, 0.05)
    whole.update(losses)
    first.update(losses[:25])
    second = RiskMonitor(**asdict(first))
    assert second.update(losses[25:]) == whole.alarm
    assert asdict(second) == pytest.approx(asdict(whole))


def test_an_alarm_stays_whatever_follows():
    monitor = RiskMonitor(0.1)
    assert monitor.update(np.ones(10))
    evidence = monitor.evidence
    assert monitor.update(np.zeros(5000))
    assert monitor.alarm
    assert monitor.evidence == evidence
    assert RiskMonitor(**asdict(monitor)).alarm


@pytest.mark.parametrize(
    "losses", [[0, 1, 1.5], [0, -0.1], [1, math.nan], [math.inf], np.zeros((2, 2)), 2.0]
)
def test_of_losses_that_make_no_sense_none_is_taken(losses):
    monitor = RiskMonitor(0.1)
    monitor.update([1, 0, 1])
    before = asdict(monitor)
    with pytest.raises(InvalidData, match=r"in \[0, 1\]"):
        monitor.update(losses)
    assert asdict(monitor) == before


def test_no_losses_change_nothing_and_booleans_count():
    monitor = RiskMonitor(0.1)
    assert not monitor.update([])
    assert asdict(monitor) == asdict(RiskMonitor(0.1))
    monitor.update([True, False, True])
    assert (monitor.n, monitor.total) == (3, 2.0)


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 0.999999])
def test_long_streams_of_one_kind_stay_finite(alpha):
    for loss in (0.0, 1.0):
        monitor = RiskMonitor(alpha)
        monitor.update(np.full(10**5, loss))
        assert math.isfinite(monitor.evidence)
        assert monitor.evidence >= 1
    # All missed: the mean over q of (q / alpha)^n; here more than any float holds, but alpha = 1.
    assert RiskMonitor(0.5).update(np.ones(10**5))


def test_nothing_missed_is_no_evidence():
    monitor = RiskMonitor(0.3)
    monitor.update(np.zeros(10**5))
    assert monitor.evidence == 1.0
