"""Certified sizes, and what they would be with other queries."""

import time

import numpy as np
import pytest
from scipy.stats import binom, norm

from rcir.errors import InvalidData, InvalidRiskLevel
from rcir.risk import Certified, mean_size
from rcir.risk.certified import Estimate, bootstrap, compare_sizes, interval, why_no_interval

DELTA = 0.1


def part(seed, n=60, m=40, depth=12):
    """Queries of random hardness; some without a match, some with few candidates."""
    rng = np.random.default_rng(seed)
    scores = rng.gamma(2, size=n).astype(np.float32)
    scores[rng.uniform(size=n) < 0.05] = np.inf
    candidate_scores = np.sort(rng.gamma(2, size=(m, depth)).astype(np.float32), axis=1)
    candidate_scores[:, 0] = 0
    candidate_scores[: m // 4, depth // 2 :] = np.inf
    return Certified(scores, candidate_scores)


def counted(scores, candidate_scores, alpha):
    """Mean size by trying every threshold there is, the smallest first, and counting ranks.

    The ranks of a set may score a thousandth more than threshold.
    """
    for threshold in np.sort(scores):
        if (
            np.isfinite(threshold)
            and binom.cdf(np.sum(scores > threshold), len(scores), alpha) <= DELTA
        ):
            return np.mean(
                [sum(score <= threshold * (1 + 1e-3) for score in row) for row in candidate_scores]
            )
    return np.mean([sum(np.isfinite(row)) for row in candidate_scores])


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2, 0.5, 0.9])
def test_sizes_are_those_of_the_smallest_threshold_that_is_certified(alpha):
    one = part(0)
    assert one.sizes(alpha, DELTA).mean() == pytest.approx(
        counted(one.scores, one.candidate_scores, alpha)
    )
    assert np.isfinite(one.threshold(alpha, DELTA)) == (alpha > 0.05)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.3, 0.9])
def test_other_queries_are_calibrated_and_measured_anew(alpha):
    """Of each draw alone, as if there were no other."""
    one, rng = part(1), np.random.default_rng(2)
    calibrating, measured = rng.integers(60, size=(25, 60)), rng.integers(40, size=(25, 40))
    found = one.redrawn(calibrating, measured, alpha, DELTA)
    expected = [
        counted(one.scores[first], one.candidate_scores[second], alpha)
        for first, second in zip(calibrating, measured, strict=True)
    ]
    assert found == pytest.approx(expected)


def test_the_mean_is_over_all_measured_queries_of_all_parts():
    always = np.zeros((40, 12), np.float32), np.full((120, 12), np.inf, np.float32)
    always[1][:, 0] = 0
    parts = [Certified(np.zeros(60, np.float32), candidate_scores) for candidate_scores in always]
    expected = (40 * 12 + 120 * 1) / 160
    assert mean_size(parts, 0.2, DELTA) == expected
    np.testing.assert_array_equal(bootstrap([parts], 0.2, DELTA), np.full((1, 1000), expected))


def test_the_spread_is_that_of_a_naive_bootstrap():
    """With other random numbers, calibrated and measured by `counted`."""
    one, rng = part(5), np.random.default_rng(6)
    naive = [
        counted(rng.choice(one.scores, 60), rng.choice(one.candidate_scores, 40), 0.2)
        for _ in range(500)
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


def test_a_widened_interval_is_at_each_end_the_wider_of_percentile_and_normal_distribution():
    skewed = np.random.default_rng(0).exponential(size=4000)
    low, high = interval(skewed, widened=True)
    assert low == pytest.approx(skewed.mean() - norm.ppf(0.975) * skewed.std())
    assert np.sum(skewed > high) == 100
    assert interval(-skewed, widened=True) == pytest.approx((-high, -low))


def test_draws_of_whole_sizes_that_nearly_all_agree_leave_room_for_the_mean():
    draws = np.repeat([4.0, 5.0], [980, 20])
    assert interval(draws) == (4, 4)
    low, high = interval(draws, widened=True)
    assert low < 4
    assert high == pytest.approx(4.02 + norm.ppf(0.975) * np.sqrt(0.02 * 0.98))


def test_few_draws_are_taken_for_those_of_a_normal_distribution():
    draws = np.random.default_rng(0).exponential(size=100)
    reach = norm.ppf(0.995) * draws.std()
    assert interval(draws, 0.99) == pytest.approx((draws.mean() - reach, draws.mean() + reach))


def test_differences_hold_together():
    """The more runs, the wider: the share left out is divided among them."""
    runs = [[part(seed, n=200, m=200)] for seed in (9, 10, 11, 12)]
    drawn = bootstrap(runs, 0.2, DELTA)
    sizes, differences = compare_sizes(runs, 0.2, DELTA)
    assert [size.value for size in sizes] == [mean_size(run, 0.2, DELTA) for run in runs]
    for row, (size, difference) in enumerate(zip(sizes[1:], differences, strict=True), 1):
        assert (size.low, size.high) == interval(drawn[row], 0.95, widened=True)
        assert difference.value == size.value - sizes[0].value
        ends = np.quantile(drawn[row] - drawn[0], [0.025 / 3, 1 - 0.025 / 3])
        assert (difference.low, difference.high) == pytest.approx(tuple(ends))
    alone = compare_sizes(runs[:2], 0.2, DELTA)[1][0]
    assert alone.high - alone.low < differences[0].high - differences[0].low


@pytest.mark.parametrize(
    ("low", "high", "beyond"), [(-1, 1, False), (0, 2, False), (0.1, 2, True), (-2, -0.1, True)]
)
def test_a_difference_is_beyond_noise_if_the_interval_leaves_out_zero(low, high, beyond):
    assert Estimate(0.5, low, high).beyond_noise is beyond


def test_without_an_interval_nothing_is_beyond_noise():
    assert not Estimate(9.5, None, None).beyond_noise


def binomial_allows(n, alpha):
    """The most misses of n that probability DELTA has at most, -1 if none has."""
    return int(np.count_nonzero(binom.cdf(np.arange(n), n, alpha) <= DELTA)) - 1


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("n", [15, 45, 60, 100, 250])
def test_sizes_have_an_interval_where_at_least_five_misses_are_allowed(n, alpha):
    runs = [[part(seed, n=n)] for seed in (0, 1)]
    sizes, differences = compare_sizes(runs, alpha, DELTA)
    reason, allowed = why_no_interval(runs[0], alpha, DELTA), binomial_allows(n, alpha)
    assert [size.value for size in sizes] == [mean_size(run, alpha, DELTA) for run in runs]
    assert differences[0].value == sizes[1].value - sizes[0].value
    if allowed >= 5:
        assert reason is None
        assert all(each.low < each.high for each in sizes + differences)
        return
    assert all(each.low is each.high is None for each in sizes + differences)
    misses, queries = {
        **dict.fromkeys((-1, 0), ("no miss", "one query decides")),
        1: ("1 miss", "2 queries decide"),
        2: ("2 misses", "3 queries decide"),
    }[allowed]
    enough = next(m for m in range(n, 1000) if binomial_allows(m, alpha) >= 5)
    assert reason == (
        f"no interval: {n} calibration queries allow {misses} at alpha {alpha:g}, so that {queries}"
        f" the size ({enough} would give an interval)"
    )


def test_the_part_of_the_fewest_calibration_queries_decides_whether_there_is_an_interval():
    parts = [part(0, n=100), part(1, n=45)]
    assert why_no_interval(parts[:1], 0.1, DELTA) is None
    assert "45 calibration queries of a part allow 1 miss" in why_no_interval(parts, 0.1, DELTA)
    assert compare_sizes([parts], 0.1, DELTA)[0][0].low is None


def test_one_run_has_an_interval_and_no_difference():
    (size,), differences = compare_sizes([[part(0)]], 0.2, DELTA)
    assert size.low < size.value < size.high
    assert differences == []


def test_what_is_not_certified_takes_the_whole_depth_in_every_draw():
    candidate_scores = np.tile(np.arange(7, dtype=np.float32), (3, 1))
    one = Certified(np.zeros(5, np.float32), candidate_scores)
    assert one.threshold(0.1, DELTA) == np.inf
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
    for call in (bootstrap, compare_sizes):
        with pytest.raises(InvalidData, match="the same for all runs"):
            call(runs, 0.1, DELTA)


@pytest.mark.parametrize(("alpha", "delta"), [(0, 0.1), (1, 0.1), (0.1, 0), (0.1, 2)])
def test_levels_out_of_range_are_refused(alpha, delta):
    with pytest.raises(InvalidRiskLevel):
        bootstrap([[part(0)]], alpha, delta)


def test_thousands_of_queries_take_a_second_at_most():
    runs = [[part(seed, n=3000, m=3000, depth=200)] for seed in (0, 1)]
    started = time.process_time()
    bootstrap(runs, 0.1, DELTA)
    assert time.process_time() - started < 1


def test_of_a_level_that_takes_more_queries_than_anyone_has_it_says_so():
    one = Certified(np.zeros(45, np.float32), np.zeros((9, 5), np.float32))
    assert "more than a billion would" in why_no_interval([one], alpha=1e-9, delta=0.1)
