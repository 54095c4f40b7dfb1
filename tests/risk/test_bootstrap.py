"""Certified set sizes: their bootstrap intervals, and certificates after a choice among several."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom, norm

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk import (
    Certified,
    Constant,
    SetRule,
    corrected,
    make_request,
    mean_size,
    smallest_certified,
)
from rcir.risk.bootstrap import Estimate, bootstrap, compare_sizes, interval, why_no_interval
from tests.populations import in_population
from tests.risk.conftest import naive_allowed_misses

DELTA = 0.1


def draw_part(seed, n=60, m=40, depth=12):
    """Queries of random difficulty; some without a match, some with few candidates."""
    rng = np.random.default_rng(seed)
    scores = rng.gamma(2, size=n).astype(np.float32)
    scores[rng.uniform(size=n) < 0.05] = np.inf
    candidate_scores = np.sort(rng.gamma(2, size=(m, depth)).astype(np.float32), axis=1)
    candidate_scores[:, 0] = 0
    candidate_scores[: m // 4, depth // 2 :] = np.inf
    return Certified(scores, candidate_scores)


def naive_mean_size(scores, candidate_scores, alpha):
    """The mean size at the first of all thresholds, in ascending order, that is certified.

    Sets include scores up to a thousandth above the threshold.
    """
    for threshold in np.sort(scores[np.isfinite(scores)]):
        if binom.cdf(np.sum(scores > threshold), len(scores), alpha) <= DELTA:
            return (candidate_scores <= threshold * (1 + 1e-3)).sum(axis=1).mean()
    return np.isfinite(candidate_scores).sum(axis=1).mean()


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2, 0.5, 0.9])
def test_sizes_are_those_of_the_smallest_certified_threshold(alpha):
    part = draw_part(0)
    expected = naive_mean_size(part.scores, part.candidate_scores, alpha)
    assert part.sizes(alpha, DELTA).mean() == pytest.approx(expected)
    assert np.isfinite(part.threshold(alpha, DELTA)) == (alpha > 0.05)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.3, 0.9])
def test_every_draw_is_calibrated_and_measured_anew(alpha):
    part, rng = draw_part(1), np.random.default_rng(2)
    calibrating, measured = rng.integers(60, size=(25, 60)), rng.integers(40, size=(25, 40))
    expected = [
        naive_mean_size(part.scores[first], part.candidate_scores[second], alpha)
        for first, second in zip(calibrating, measured, strict=True)
    ]
    assert part.redrawn(calibrating, measured, alpha, DELTA) == pytest.approx(expected)


def test_the_mean_is_over_all_measured_queries_of_all_parts():
    tables = np.zeros((40, 12), np.float32), np.full((120, 12), np.inf, np.float32)
    tables[1][:, 0] = 0
    parts = [Certified(np.zeros(60, np.float32), table) for table in tables]
    expected = (40 * 12 + 120 * 1) / 160
    assert mean_size(parts, 0.2, DELTA) == expected
    np.testing.assert_array_equal(bootstrap([parts], 0.2, DELTA), np.full((1, 1000), expected))


def test_the_spread_is_that_of_a_naive_bootstrap():
    """With other random numbers."""
    part, rng = draw_part(5), np.random.default_rng(6)
    naive = [
        naive_mean_size(rng.choice(part.scores, 60), rng.choice(part.candidate_scores, 40), 0.2)
        for _ in range(300)
    ]
    draws = bootstrap([[part]], 0.2, DELTA, draws=4000)[0]
    for share in (0.1, 0.5, 0.9):
        error = 4 * np.sqrt(share * (1 - share) / 300)
        assert np.mean(naive <= np.quantile(draws, share)) >= share - error
        assert np.mean(naive < np.quantile(draws, share)) <= share + error


def test_all_runs_use_the_same_draws_of_a_seed():
    first, second = [draw_part(7)], [draw_part(8)]
    both = bootstrap([first, first, second], 0.2, DELTA)
    np.testing.assert_array_equal(both[0], both[1])
    np.testing.assert_array_equal(both[2], bootstrap([second], 0.2, DELTA)[0])
    assert (both[0] != bootstrap([first], 0.2, DELTA, seed=1)[0]).any()


def test_an_interval_excludes_as_many_draws_on_either_side():
    values = np.random.default_rng(0).permutation(np.arange(1000.0))
    low, high = interval(values)
    assert (np.sum(values < low), np.sum(values > high)) == (25, 25)


def test_a_widened_interval_is_at_each_end_the_wider_of_percentile_and_normal():
    skewed = np.random.default_rng(0).exponential(size=4000)
    low, high = interval(skewed, widened=True)
    assert low == pytest.approx(skewed.mean() - norm.ppf(0.975) * skewed.std())
    assert np.sum(skewed > high) == 100
    assert interval(-skewed, widened=True) == pytest.approx((-high, -low))
    draws = np.repeat([4.0, 5.0], [980, 20])
    assert interval(draws) == (4, 4)
    low, high = interval(draws, widened=True)
    few = skewed[:100]
    reach = norm.ppf(0.995) * few.std()
    assert interval(few, 0.99) == pytest.approx((few.mean() - reach, few.mean() + reach))
    assert low < 4
    assert high == pytest.approx(4.02 + norm.ppf(0.975) * np.sqrt(0.02 * 0.98))


def test_intervals_of_several_differences_hold_simultaneously():
    runs = [[draw_part(seed, n=200, m=200)] for seed in (9, 10, 11, 12)]
    draws = bootstrap(runs, 0.2, DELTA)
    sizes, differences = compare_sizes(runs, 0.2, DELTA)
    assert [size.value for size in sizes] == [mean_size(run, 0.2, DELTA) for run in runs]
    for row, (size, difference) in enumerate(zip(sizes[1:], differences, strict=True), 1):
        assert (size.low, size.high) == interval(draws[row], 0.95, widened=True)
        assert difference.value == size.value - sizes[0].value
        ends = np.quantile(draws[row] - draws[0], [0.025 / 3, 1 - 0.025 / 3])
        assert (difference.low, difference.high) == pytest.approx(tuple(ends))
    alone = compare_sizes(runs[:2], 0.2, DELTA)[1][0]
    assert alone.high - alone.low < differences[0].high - differences[0].low
    assert compare_sizes(runs[:1], 0.2, DELTA)[1] == []


@pytest.mark.parametrize(
    ("low", "high", "beyond"),
    [(-1, 1, False), (0, 2, False), (0.1, 2, True), (-2, -0.1, True), (None, None, False)],
)
def test_a_difference_is_beyond_noise_if_its_interval_excludes_zero(low, high, beyond):
    assert Estimate(0.5, low, high).beyond_noise is beyond


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("n", [15, 45, 60, 100, 250])
def test_sizes_have_an_interval_if_at_least_five_misses_are_allowed(n, alpha):
    runs = [[draw_part(seed, n=n)] for seed in (0, 1)]
    sizes, differences = compare_sizes(runs, alpha, DELTA)
    reason = why_no_interval(runs[0], alpha, DELTA)
    assert [size.value for size in sizes] == [mean_size(run, alpha, DELTA) for run in runs]
    assert differences[0].value == sizes[1].value - sizes[0].value
    if naive_allowed_misses(n, alpha) >= 5:
        assert reason is None
        assert all(each.low < each.high for each in sizes + differences)
    else:
        assert all(each.low is each.high is None for each in sizes + differences)
        enough = next(m for m in range(n, 1000) if naive_allowed_misses(m, alpha) >= 5)
        assert str(enough) in reason


def test_the_smallest_part_decides_whether_there_is_an_interval():
    parts = [draw_part(0, n=100), draw_part(1, n=45)]
    assert why_no_interval(parts[:1], 0.1, DELTA) is None
    assert "45" in why_no_interval(parts, 0.1, DELTA)
    assert compare_sizes([parts], 0.1, DELTA)[0][0].low is None
    assert "billion" in why_no_interval(parts, 1e-9, DELTA)


def test_an_uncertified_level_takes_the_whole_depth_in_every_draw():
    table = np.tile(np.arange(7, dtype=np.float32), (3, 1))
    part = Certified(np.zeros(5, np.float32), table)
    assert part.threshold(0.1, DELTA) == np.inf
    assert set(bootstrap([[part]], 0.1, DELTA).ravel().tolist()) == {7.0}


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [[]],
        [[draw_part(0)], [draw_part(0), draw_part(0)]],
        [[draw_part(0)], [draw_part(0, n=59)]],
        [[draw_part(0)], [draw_part(0, m=39)]],
    ],
)
def test_runs_on_different_numbers_of_queries_are_refused(runs):
    for call in (bootstrap, compare_sizes):
        with pytest.raises(InvalidData, match="same"):
            call(runs, 0.1, DELTA)


@pytest.fixture(scope="module")
def rule(labelled):
    groups = np.repeat(["a", "b"], 300)
    tuning, calibration = labelled(200, 1, matches=0.5), labelled(600, 0, matches=0.5)
    return SetRule(Constant(), tuning, in_population(calibration, groups=groups))


@pytest.mark.parametrize("among", [1, 2, 12])
def test_misses_of_a_chosen_retriever_are_allowed_at_delta_over_k(rule, among):
    allowed = naive_allowed_misses(600, 0.3, 0.1 / among)
    guarantee = rule.guarantee(make_request(0.3, 0.1), among)
    assert guarantee.threshold == np.sort(rule.evidence.match_score)[::-1][allowed]
    assert guarantee.n_calibration == 600


@pytest.mark.parametrize(
    ("alpha", "options"),
    [
        (0.8, {"risk": "recall"}),
        (0.8, {"risk": "false-discovery"}),
        (0.45, {"abstain": True}),
        (0.45, {"group": "a"}),
        (0.45, {"simultaneous": True}),
        ({"miss": 0.4, "false-discovery": 0.9}, {}),
    ],
    ids=str,
)
def test_every_request_of_a_chosen_retriever_is_certified_at_delta_over_k(rule, alpha, options):
    guarantee = rule.guarantee(make_request(alpha, 0.1, **options), 4)
    assert (guarantee.delta, guarantee.chosen_among) == (0.1, 4)
    alone = rule.guarantee(make_request(alpha, 0.025, **options))
    assert replace(guarantee, request=alone.request, chosen_among=1) == alone
    assert (guarantee.delta, alone.delta) == (0.1, 0.025)


def test_a_marginal_guarantee_does_not_survive_a_choice(rule):
    request = make_request(0.3, None)
    assert rule.guarantee(request, 1) == rule.guarantee(request)
    with pytest.raises(InvalidConfig, match="chosen"):
        rule.guarantee(request, 2)


def test_the_refusal_after_a_choice_reports_an_attainable_alpha(rule):
    with pytest.raises(RiskUnattainable) as caught:
        rule.guarantee(make_request(1e-4, 0.1))
    alpha = caught.value.minimum_alpha
    assert rule.guarantee(make_request(alpha, 0.1)).threshold >= 0
    with pytest.raises(RiskUnattainable, match="12") as caught:
        rule.guarantee(make_request(alpha, 0.1), 12)
    assert caught.value.required_calibration is None or caught.value.required_calibration > 600
    minimum = caught.value.minimum_alpha
    assert rule.guarantee(make_request(minimum, 0.1), 12).threshold >= 0


def need_rank(rank, lost=0):
    """100 queries that need this rank, except for some that no set serves."""
    scores = np.full(100, rank - 1, np.float32)
    scores[:lost] = np.inf
    return [Certified(scores, np.tile(np.arange(20, dtype=np.float32), (7, 1)))]


def test_the_smallest_certified_run_is_chosen_and_the_first_of_equal_ones():
    runs = [need_rank(5), need_rank(3), need_rank(9), need_rank(3)]
    assert smallest_certified(runs, 0.1, 0.1, 4) == 1
    assert smallest_certified(runs[2:], 0.1, 0.1, 4) == 1


def test_a_run_that_is_certified_at_delta_but_not_at_delta_over_k_is_not_chosen():
    """With 100 queries, 5 misses are allowed at delta 0.1 and 3 at 0.1 / 5."""
    assert [binom.cdf(m, 100, 0.1) <= 0.1 for m in (5, 6)] == [True, False]
    assert [binom.cdf(m, 100, 0.1) <= 0.02 for m in (3, 4)] == [True, False]
    runs = [need_rank(2, lost=4), need_rank(8)]
    assert smallest_certified(runs, 0.1, 0.1, 1) == 0
    assert smallest_certified(runs, 0.1, 0.1, 5) == 1
    assert smallest_certified(runs[:1], 0.1, 0.1, 5) is None
    assert smallest_certified([], 0.1, 0.1, 5) is None


@pytest.mark.parametrize("among", [0, -1, 1.5, True, None, "2"])
def test_the_number_of_retrievers_is_a_positive_integer(rule, among):
    for call in (
        lambda: corrected(0.1, among),
        lambda: rule.guarantee(make_request(0.3, 0.1), among),
    ):
        with pytest.raises(InvalidConfig, match="at least 1"):
            call()
