"""Coverage of the interval of a difference between two runs."""

from functools import cache

import numpy as np
import pytest

from rcir.risk import Certified, mean_size
from rcir.risk.bootstrap import bootstrap, compare_sizes, interval

pytestmark = [pytest.mark.slow, pytest.mark.statistical]

PAIRS, DRAWS, DEPTH, REPEATED, REPEATED_FEW = 600, 200, 12, 200, 800
ALPHA, DELTA = 0.2, 0.1
QUERIES = {1: 400, 4: 100}  # of a part, by number of parts


def drawn_runs(rng, parts, skills=(1.0, 1.1), n=None, depth=DEPTH, alike=False):
    """Draw runs with the same hard queries and different skills, in rotated parts.

    With several parts, each query is measured in one of them and calibrates in another. With
    `alike`, sizes do not depend on the query, and scores are whole numbers.
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
    """By number of parts: pairs of runs, and the true difference, the mean over many pairs."""

    def pairs(parts):
        rng = np.random.default_rng(0)
        drawn = [drawn_runs(rng, parts) for _ in range(PAIRS)]
        return drawn, np.mean([difference(drawn_runs(rng, parts)) for _ in range(2000)])

    return cache(pairs)


def departure(pairs, interval_of):
    """Return by how many standard errors the coverage of intervals differs from 95%."""
    drawn, truth = pairs
    ends = [interval_of(seed, pair) for seed, pair in enumerate(drawn)]
    coverage = np.mean([low <= truth <= high for low, high in ends])
    return (coverage - 0.95) / np.sqrt(0.95 * 0.05 / len(ends))


def compared(_, pair):
    estimate = compare_sizes(pair, ALPHA, DELTA, DRAWS)[1][0]
    return estimate.low, estimate.high


def with_fixed_threshold(seed, pair):
    first, second = (np.concatenate([part.sizes(ALPHA, DELTA) for part in parts]) for parts in pair)
    rows = np.random.default_rng(seed).integers(len(first), size=(DRAWS, len(first)))
    return interval((second - first)[rows].mean(axis=1))


def drawn_separately(seed, pair):
    one, other = (
        bootstrap([parts], ALPHA, DELTA, DRAWS, 2 * seed + i)[0] for i, parts in enumerate(pair)
    )
    return interval(other - one)


def test_the_coverage_of_the_interval_is_its_level(pairs):
    assert abs(departure(pairs(1), compared)) <= 3


def test_a_threshold_that_is_not_calibrated_anew_would_be_noticed(pairs):
    assert departure(pairs(1), with_fixed_threshold) < -3


def test_runs_that_are_drawn_separately_would_be_noticed(pairs):
    assert departure(pairs(1), drawn_separately) > 3


def test_in_rotated_parts_the_coverage_is_at_least_the_level(pairs):
    assert departure(pairs(4), compared) >= -3
    assert departure(pairs(4), with_fixed_threshold) < -3


@cache
def coverage(n, alpha, parts=1, alike=False):
    """Return the coverage of three intervals; the truth is a mean over many runs.

    The first two are those of `compare_sizes` for the size of a run and for the difference of two,
    NaN if there is none; the third is that of the bootstrap for the size, NaN if there is one.
    """
    rng = np.random.default_rng(n)

    def pair():
        return drawn_runs(rng, parts, n=n, depth=60, alike=alike)

    sizes = [[mean_size(run, alpha, DELTA) for run in pair()] for _ in range(2 * REPEATED_FEW)]
    first, second = np.mean(sizes, axis=0)
    covered = []
    for seed in range(REPEATED_FEW):
        drawn = pair()
        (size, _), (other,) = compare_sizes(drawn, alpha, DELTA, 500)
        ends = [(each.low, each.high) for each in (size, other)]
        if size.low is None:
            rows = bootstrap(drawn, alpha, DELTA, DRAWS, seed)
            plain = np.quantile(rows[0], [0.025, 0.975])
            covered.append((np.nan, np.nan, plain[0] <= first <= plain[1]))
        else:
            truths = first, second - first
            both = [low <= t <= high for (low, high), t in zip(ends, truths, strict=True)]
            covered.append((*both, np.nan))
    return np.mean(covered, axis=0)


@pytest.mark.parametrize(
    ("n", "alpha", "alike"),
    [(45, 0.2, False), (60, 0.2, True), (100, 0.1, True), (250, 0.05, False)],
)
def test_the_coverage_of_an_interval_does_not_depend_on_the_number_of_queries(n, alpha, alike):
    size, difference, _ = coverage(n, alpha, alike=alike)
    assert size >= 0.93
    assert difference >= 0.93


def test_in_rotated_parts_of_few_queries_the_coverage_is_the_same():
    assert (coverage(45, 0.2, parts=4)[:2] >= 0.93).all()


@pytest.mark.parametrize(
    ("n", "alpha", "parts"),
    [(45, 0.05, 1), (45, 0.05, 4), (60, 0.05, 1), (100, 0.05, 1)],
)
def test_there_is_no_interval_where_the_coverage_of_the_bootstrap_is_too_small(n, alpha, parts):
    size, difference, plain = coverage(n, alpha, parts)
    assert np.isnan([size, difference]).all()
    assert plain < 0.93 - 3 * np.sqrt(0.93 * 0.07 / REPEATED_FEW)


def test_equal_runs_rarely_seem_to_differ():
    """The level holds for three comparisons together, but not for three separate ones."""
    rng = np.random.default_rng(1)
    together, separate = [], []
    for _ in range(PAIRS):
        first, *others = runs = drawn_runs(rng, 1, skills=(1.0,) * 4)
        comparisons = compare_sizes(runs, ALPHA, DELTA, DRAWS)[1]
        together.append(any(one.beyond_noise for one in comparisons))
        pairs = [compare_sizes([first, other], ALPHA, DELTA, DRAWS)[1][0] for other in others]
        separate.append(any(one.beyond_noise for one in pairs))
    noise = 3 * np.sqrt(0.05 * 0.95 / PAIRS)
    assert np.mean(together) <= 0.05 + noise < np.mean(separate)


def test_the_best_of_equal_runs_rarely_seems_better():
    """One of twelve runs was chosen; the intervals of all pairs correct for that."""
    rng = np.random.default_rng(2)
    wrong = {True: [], False: []}
    for _ in range(REPEATED):
        runs = drawn_runs(rng, 1, skills=(1.0,) * 12)
        runs.sort(key=lambda parts: mean_size(parts, ALPHA, DELTA))
        for corrected, failures in wrong.items():
            others = compare_sizes(runs, ALPHA, DELTA, DRAWS, first_is_best=corrected)[1]
            failures.append(any(one.beyond_noise for one in others))
    noise = 3 * np.sqrt(0.05 * 0.95 / REPEATED)
    assert np.mean(wrong[True]) <= 0.05 + noise < np.mean(wrong[False])
