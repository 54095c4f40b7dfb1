"""Coverage of the interval of a difference between two runs."""

from functools import cache

import numpy as np
import pytest

from rcir.risk import Certified, mean_size
from rcir.risk.certified import bootstrap, compare_sizes, interval

pytestmark = [pytest.mark.slow, pytest.mark.statistical]

PAIRS, DRAWS, DEPTH, REPEATED, REPEATED_FEW = 600, 200, 12, 200, 800
ALPHA, DELTA = 0.2, 0.1
QUERIES = {1: 400, 4: 100}  # of a part, by number of parts


def drawn_runs(rng, parts, skills=(1.0, 1.1), n=None, depth=DEPTH, alike=False):
    """Runs that find the same queries hard, each at its skill; in parts, as rotated.

    With several parts, each query is measured in one of them and calibrates in another. Where all
    queries are treated alike, scores are whole numbers.
    """
    n = n or QUERIES[parts]
    queries = n * max(2, parts)
    hardness, luck = rng.gamma(2.0, size=queries), rng.exponential(size=queries)
    runs = []
    for skill in skills:
        rank = np.floor(hardness * luck * skill * rng.lognormal(sigma=0.8, size=queries))
        seen = hardness * rng.lognormal(sigma=0.2, size=queries)
        scale = (np.clip(seen / 8, 0.02, 1) ** (not alike)).astype(np.float32)
        scores = np.where(rank < depth, rank / scale, np.inf).astype(np.float32).reshape(-1, n)
        candidate_scores = (
            (np.arange(depth) / scale[:, None]).astype(np.float32).reshape(-1, n, depth)
        )
        runs.append([Certified(scores[i - 1], candidate_scores[i]) for i in range(parts)])
    return runs


def difference(pair):
    first, second = (mean_size(parts, ALPHA, DELTA) for parts in pair)
    return second - first


@pytest.fixture(scope="module")
def pairs():
    """By number of parts: pairs of runs, and the true difference, a mean over many like these."""

    def pairs(parts):
        rng = np.random.default_rng(0)
        drawn = [drawn_runs(rng, parts) for _ in range(PAIRS)]
        return drawn, np.mean([difference(drawn_runs(rng, parts)) for _ in range(2000)])

    return cache(pairs)


def departure(pairs, interval_of):
    """By how many standard errors the share of intervals that hold the truth is off 95%."""
    drawn, truth = pairs
    ends = [interval_of(seed, pair) for seed, pair in enumerate(drawn)]
    held = np.mean([low <= truth <= high for low, high in ends])
    return (held - 0.95) / np.sqrt(0.95 * 0.05 / len(ends))


def compared(_, pair):
    found = compare_sizes(pair, ALPHA, DELTA, DRAWS)[1][0]
    return found.low, found.high


def with_threshold_as_it_is(seed, pair):
    first, second = (np.concatenate([part.sizes(ALPHA, DELTA) for part in parts]) for parts in pair)
    rows = np.random.default_rng(seed).integers(len(first), size=(DRAWS, len(first)))
    return interval((second - first)[rows].mean(axis=1))


def drawn_apart(seed, pair):
    one, other = (
        bootstrap([parts], ALPHA, DELTA, DRAWS, 2 * seed + i)[0] for i, parts in enumerate(pair)
    )
    return interval(other - one)


def test_the_interval_holds_the_true_difference_as_often_as_it_says(pairs):
    assert abs(departure(pairs(1), compared)) <= 3


def test_a_threshold_that_is_not_calibrated_anew_would_be_noticed(pairs):
    assert departure(pairs(1), with_threshold_as_it_is) < -3


def test_runs_that_are_drawn_apart_would_be_noticed(pairs):
    assert departure(pairs(1), drawn_apart) > 3


def test_in_rotated_parts_it_holds_the_difference_at_least_as_often(pairs):
    assert departure(pairs(4), compared) >= -3
    assert departure(pairs(4), with_threshold_as_it_is) < -3


@cache
def held(n, alpha, parts=1, alike=False):
    """Return the coverage of three intervals; the truth is a mean over many runs.

    Those of `compare` for the size of a run and for the difference between two, NaN where it gives
    none; and the percentiles of the bootstrap for the size, NaN where `compare` gives an interval.
    """
    rng = np.random.default_rng(n)

    def pair():
        return drawn_runs(rng, parts, n=n, depth=60, alike=alike)

    sizes = [[mean_size(run, alpha, DELTA) for run in pair()] for _ in range(2 * REPEATED_FEW)]
    first, second = np.mean(sizes, axis=0)
    found = []
    for seed in range(REPEATED_FEW):
        drawn = pair()
        (size, _), (other,) = compare_sizes(drawn, alpha, DELTA, 500)
        ends = [(each.low, each.high) for each in (size, other)]
        if size.low is None:
            rows = bootstrap(drawn, alpha, DELTA, DRAWS, seed)
            plain = np.quantile(rows[0], [0.025, 0.975])
            found.append((np.nan, np.nan, plain[0] <= first <= plain[1]))
        else:
            truths = first, second - first
            hold = [low <= t <= high for (low, high), t in zip(ends, truths, strict=True)]
            found.append((*hold, np.nan))
    return np.mean(found, axis=0)


@pytest.mark.parametrize(
    ("n", "alpha", "alike"),
    [
        *((45, 0.2, False), (60, 0.2, True), (100, 0.1, True), (250, 0.05, False)),
    ],
)
def test_where_there_is_an_interval_it_holds_the_truth_however_few_the_queries(n, alpha, alike):
    size, difference, _ = held(n, alpha, alike=alike)
    assert size >= 0.93
    assert difference >= 0.93


def test_in_rotated_parts_of_few_queries_it_holds_the_truth_too():
    assert (held(45, 0.2, parts=4)[:2] >= 0.93).all()


@pytest.mark.parametrize(
    ("n", "alpha", "parts"),
    [(45, 0.05, 1), (45, 0.05, 4), (60, 0.05, 1), (100, 0.05, 1)],
)
def test_there_is_none_where_that_of_the_bootstrap_would_hold_the_truth_too_rarely(n, alpha, parts):
    size, difference, plain = held(n, alpha, parts)
    assert np.isnan([size, difference]).all()
    assert plain < 0.93 - 3 * np.sqrt(0.93 * 0.07 / REPEATED_FEW)


def test_runs_that_do_not_differ_rarely_seem_to():
    """The level holds for three comparisons together, not if each is made without the others."""
    rng = np.random.default_rng(1)
    together, alone = [], []
    for _ in range(PAIRS):
        first, *others = runs = drawn_runs(rng, 1, skills=(1.0,) * 4)
        comparisons = compare_sizes(runs, ALPHA, DELTA, DRAWS)[1]
        together.append(any(one.beyond_noise for one in comparisons))
        pairs = [compare_sizes([first, other], ALPHA, DELTA, DRAWS)[1][0] for other in others]
        alone.append(any(one.beyond_noise for one in pairs))
    noise = 3 * np.sqrt(0.05 * 0.95 / PAIRS)
    assert np.mean(together) <= 0.05 + noise < np.mean(alone)


def test_a_run_that_is_first_for_its_size_rarely_seems_better_than_those_it_is_like():
    """The best of twelve like ones: it was chosen, which the intervals of all pairs allow for."""
    rng = np.random.default_rng(2)
    wrong = {True: [], False: []}
    for _ in range(REPEATED):
        runs = drawn_runs(rng, 1, skills=(1.0,) * 12)
        runs.sort(key=lambda parts: mean_size(parts, ALPHA, DELTA))
        for allowed, found in wrong.items():
            others = compare_sizes(runs, ALPHA, DELTA, DRAWS, first_is_best=allowed)[1]
            found.append(any(one.beyond_noise for one in others))
    noise = 3 * np.sqrt(0.05 * 0.95 / REPEATED)
    assert np.mean(wrong[True]) <= 0.05 + noise < np.mean(wrong[False])
