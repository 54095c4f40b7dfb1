"""All alphas at once: the probability that any is certified wrongly is delta, and not less."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import beta

from rcir.risk import ScoredResults, allowed_misses, local_level, order_statistic

pytestmark = pytest.mark.statistical

DRAWS, N, DELTA = 5_000, 300, 0.1


def certified(n, level):
    """(n,) smallest alphas that 0, ..., n - 1 misses certify, each tested at this level."""
    m = np.arange(n)
    alphas = beta.isf(level, m + 1, n - m)
    for misses in (0, n // 20, n // 2, n - 1):  # consistent with the allowed misses
        assert allowed_misses(n, min(alphas[misses] * (1 + 1e-9), 1 - 1e-16), level) == misses
        assert allowed_misses(n, alphas[misses] * (1 - 1e-9), level) == misses - 1
    return alphas


def risks(n, draws=DRAWS):
    """(draws, n) risks at the largest, second largest, ... of n scores, uniform on (0, 1)."""
    rng = np.random.default_rng(n)
    return np.sort(1 - rng.uniform(size=(draws, n)), axis=1)


@pytest.mark.parametrize("delta", [0.01, 0.1, 0.6])
@pytest.mark.parametrize("n", [1, 20, 300])
def test_any_alpha_is_certified_wrongly_with_probability_delta(excess, n, delta):
    wrong = (risks(n) > certified(n, local_level(n, delta))).any(axis=1)
    assert abs(excess(wrong, delta)) <= 3


def test_scores_that_tie_only_help(excess):
    tied = np.floor(risks(N) * 25) / 25  # scores rounded up to one of 25
    wrong = (tied > certified(N, local_level(N, DELTA))).any(axis=1)
    assert excess(wrong, DELTA) < -3


def test_a_band_of_only_some_numbers_of_misses_holds(excess):
    wrong = (risks(12_000, 2_000) > certified(12_000, local_level(12_000, DELTA))).any(axis=1)
    assert excess(wrong, DELTA) <= 3
    assert wrong.mean() > DELTA / 2


@pytest.mark.parametrize("delta", [0.1, 0.7])
def test_alpha_may_be_chosen_after_looking(excess, delta):
    alphas = beta.isf(local_level(60, delta), np.arange(1, 61), 60 - np.arange(60)) * (1 + 1e-9)
    wrong = []
    for row in 1 - risks(60, 2_000):  # scores; the risk of a threshold is 1 - threshold
        scored = ScoredResults(row, depth=5)
        certify = partial(order_statistic, delta=delta, calibration=scored, holds="for all alphas")
        thresholds = np.array([certify(alpha).threshold for alpha in alphas[::3]])
        wrong.append(bool((1 - thresholds > alphas[::3]).any()))
    assert excess(wrong, delta) <= 3


def test_one_level_for_each_alpha_alone_would_be_noticed(excess):
    assert excess((risks(N) > certified(N, DELTA)).any(axis=1), DELTA) > 3


def test_a_level_a_quarter_too_large_would_be_noticed(excess):
    generous = certified(N, 1.25 * local_level(N, DELTA))
    assert excess((risks(N) > generous).any(axis=1), DELTA) > 3
