"""Certified sizes, and what they would be with other queries."""

import time

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidData, InvalidRiskLevel
from rcir.risk import Certified, mean_size
from rcir.risk.certified import Estimate, bootstrap, compare, interval

DELTA = 0.1


def part(seed, n=60, m=40, depth=12):
    """Queries of random hardness; some without a match, some with few candidates."""
    rng = np.random.default_rng(seed)
    scores = rng.gamma(2, size=n).astype(np.float32)
    scores[rng.uniform(size=n) < 0.05] = np.inf
    costs = np.sort(rng.gamma(2, size=(m, depth)).astype(np.float32), axis=1)
    costs[:, 0] = 0
    costs[: m // 4, depth // 2 :] = np.inf
    return Certified(scores, costs)


def counted(scores, costs, alpha):
    """Mean size by trying every kappa there is, the smallest first, and counting ranks."""
    for kappa in np.sort(scores):
        if np.isfinite(kappa) and binom.cdf(np.sum(scores > kappa), len(scores), alpha) <= DELTA:
            return np.mean([sum(price <= kappa for price in row) for row in costs])
    return np.mean([sum(np.isfinite(row)) for row in costs])


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2, 0.5, 0.9])
def test_sizes_are_those_of_the_smallest_kappa_that_is_certified(alpha):
    one = part(0)
    assert one.sizes(alpha, DELTA).mean() == pytest.approx(counted(one.scores, one.costs, alpha))
    assert np.isfinite(one.kappa(alpha, DELTA)) == (alpha > 0.05)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.3, 0.9])
def test_other_queries_are_calibrated_and_measured_anew(alpha):
    """Of each draw alone, as if there were no other."""
    one, rng = part(1), np.random.default_rng(2)
    calibrating, measured = rng.integers(60, size=(25, 60)), rng.integers(40, size=(25, 40))
    found = one.redrawn(calibrating, measured, alpha, DELTA)
    expected = [
        counted(one.scores[first], one.costs[second], alpha)
        for first, second in zip(calibrating, measured, strict=True)
    ]
    assert found == pytest.approx(expected)


def test_the_mean_is_over_all_measured_queries_of_all_parts():
    always = np.zeros((40, 12), np.float32), np.full((120, 12), np.inf, np.float32)
    always[1][:, 0] = 0
    parts = [Certified(np.zeros(60, np.float32), costs) for costs in always]
    expected = (40 * 12 + 120 * 1) / 160
    assert mean_size(parts, 0.2, DELTA) == expected
    np.testing.assert_array_equal(bootstrap([parts], 0.2, DELTA), np.full((1, 1000), expected))


def test_the_spread_is_that_of_a_naive_bootstrap():
    """With other random numbers, calibrated and measured by `counted`."""
    one, rng = part(5), np.random.default_rng(6)
    naive = [
        counted(rng.choice(one.scores, 60), rng.choice(one.costs, 40), 0.2) for _ in range(500)
    ]
    drawn = bootstrap([[one]], 0.2, DELTA, draws=4000)[0]
    for share in (0.1, 0.5, 0.9):
        error = 4 * np.sqrt(share * (1 - share) / 500)
        assert np.mean(naive <= np.quantile(drawn, share)) >= share - error
        assert np.mean(naive < np.quantile(drawn, share)) <= share + error


def test_runs_are_drawn_alike_and_seeds_are_not():
    first, second = [part(7)], [part(8)]
    both = bootstrap([first, first, second], 0.2, DELTA)
    np.testing.assert_array_equal(both[0], both[1])
    np.testing.assert_array_equal(both[2], bootstrap([second], 0.2, DELTA)[0])
    assert (both[0] != bootstrap([first], 0.2, DELTA, seed=1)[0]).any()


def test_the_interval_leaves_as_many_draws_out_on_either_side():
    values = np.random.default_rng(0).permutation(np.arange(1000.0))
    low, high = interval(values)
    assert (np.sum(values < low), np.sum(values > high)) == (25, 25)


def test_differences_hold_together():
    """The more runs, the wider: the share left out is divided among them."""
    runs = [[part(seed, n=200, m=200)] for seed in (9, 10, 11, 12)]
    drawn = bootstrap(runs, 0.2, DELTA)
    sizes, differences = compare(runs, 0.2, DELTA)
    assert [size.value for size in sizes] == [mean_size(run, 0.2, DELTA) for run in runs]
    for row, (size, difference) in enumerate(zip(sizes[1:], differences, strict=True), 1):
        assert (size.low, size.high) == tuple(np.quantile(drawn[row], [0.025, 0.975]))
        assert difference.value == size.value - sizes[0].value
        ends = np.quantile(drawn[row] - drawn[0], [0.025 / 3, 1 - 0.025 / 3])
        assert (difference.low, difference.high) == pytest.approx(tuple(ends))
    alone = compare(runs[:2], 0.2, DELTA)[1][0]
    assert alone.high - alone.low < differences[0].high - differences[0].low


@pytest.mark.parametrize(
    ("low", "high", "beyond"), [(-1, 1, False), (0, 2, False), (0.1, 2, True), (-2, -0.1, True)]
)
def test_a_difference_is_beyond_noise_if_the_interval_leaves_out_zero(low, high, beyond):
    assert Estimate(0.5, low, high).beyond_noise is beyond


def test_one_run_has_an_interval_and_no_difference():
    (size,), differences = compare([[part(0)]], 0.2, DELTA)
    assert size.low < size.value < size.high
    assert differences == []


def test_what_is_not_certified_takes_the_whole_depth_in_every_draw():
    costs = np.tile(np.arange(7, dtype=np.float32), (3, 1))
    one = Certified(np.zeros(5, np.float32), costs)
    assert one.kappa(0.1, DELTA) == np.inf
    assert set(bootstrap([[one]], 0.1, DELTA).ravel().tolist()) == {7.0}


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [[]],
        [[part(0)], [part(0), part(0)]],
        [[part(0)], [part(0, n=59)]],
        [[part(0)], [part(0, m=39)]],
    ],
)
def test_runs_on_other_numbers_of_queries_are_refused(runs):
    with pytest.raises(InvalidData, match="the same for all runs"):
        bootstrap(runs, 0.1, DELTA)


@pytest.mark.parametrize(("alpha", "delta"), [(0, 0.1), (1, 0.1), (0.1, 0), (0.1, 2)])
def test_levels_out_of_range_are_refused(alpha, delta):
    with pytest.raises(InvalidRiskLevel):
        bootstrap([[part(0)]], alpha, delta)


def test_thousands_of_queries_take_a_second_at_most():
    runs = [[part(seed, n=3000, m=3000, depth=200)] for seed in (0, 1)]
    started = time.process_time()
    bootstrap(runs, 0.1, DELTA)
    assert time.process_time() - started < 1
