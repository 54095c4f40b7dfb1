"""The size rule of Cai et al. in the benchmarks, against its definition query by query."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import ScoredResults, certify, make_request
from rcir.risk.results import widen

FILE = Path(__file__).parents[2] / "benchmarks" / "cai_rule.py"


@pytest.fixture(scope="module")
def rule():
    """The module, which is in no package."""
    spec = importlib.util.spec_from_file_location("cai_rule", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def naive_misses(uncertainty, ranks, kappa, depth):
    low, high = min(uncertainty), max(uncertainty)
    missed = 0
    for u, rank in zip(uncertainty, ranks, strict=True):
        candidates = list(range(1, depth + 1))[: math.ceil((u - low) / (high - low) * kappa)]
        missed += rank not in candidates
    return missed


def naive_kappa(uncertainty, ranks, depth, alpha, delta):
    n, kappa, bound = len(ranks), 1, 1
    while bound > alpha and kappa <= depth:
        kappa += 0.2
        rate = naive_misses(uncertainty, ranks, kappa, depth) / n
        bound = rate + math.sqrt(math.log(1 / delta) / (2 * n))
    return kappa, bound <= alpha


def test_kappa_is_that_of_a_search_step_by_step(rule):
    rng, certified = np.random.default_rng(2), []
    for alpha in np.repeat([0.2, 0.3, 0.5, 0.9], 5):
        uncertainty = rng.gamma(2, size=60)
        ranks = 1 + np.floor(rng.exponential(uncertainty))
        ranks = np.where(ranks > 8, np.inf, ranks)
        expected = naive_kappa(uncertainty.tolist(), ranks.tolist(), 8, alpha, 0.1)
        assert rule.calibrate_kappa(uncertainty, ranks, 8, alpha, 0.1) == expected
        sizes = rule.rule_sizes(uncertainty, expected[0], 8)
        misses = naive_misses(uncertainty.tolist(), ranks.tolist(), expected[0], 8)
        assert np.sum(ranks > sizes) == misses
        certified.append(expected[1])
    assert set(certified) == {True, False}


def test_the_range_is_of_the_batch_and_its_least_uncertain_query_gets_an_empty_set(rule):
    assert rule.rule_sizes(np.array([1.0, 2.0, 3.0]), 4.2, 50).tolist() == [0, 3, 5]
    assert rule.rule_sizes(np.array([1.0, 2.0, 3.0, 9.0]), 4.2, 50).tolist() == [0, 1, 2, 5]
    assert rule.rule_sizes(np.array([1.0, 3.0]), 50.2, 50).tolist() == [0, 50]


def test_with_a_heavy_tail_kappa_is_never_certified_and_the_risk_is_always_exceeded(rule):
    """One query of 2,962 sets the range: the others get few candidates even with the last kappa.

    Given the uncertainty u, the rank of the match is 1 + floor(X) with X exponential of mean 2 u,
    so that a set of k candidates misses it with probability exp(-k / 2 u).
    """
    rng, risks = np.random.default_rng(0), []
    for _ in range(40):
        calibration, test = rng.lognormal(size=(2, 2_962))
        ranks = 1 + np.floor(rng.exponential(2 * calibration))
        kappa, certified = rule.calibrate_kappa(calibration, ranks, 50, 0.1, 0.1)
        assert not certified
        assert kappa == pytest.approx(50)  # sums of 0.2 exceed it by rounding
        risks.append(np.exp(-rule.rule_sizes(test, kappa, 50) / (2 * test)).mean())
    assert min(risks) > 0.1
    # 0.344 by another program with other draws; each batch has another largest uncertainty.
    assert np.mean(risks) == pytest.approx(0.344, abs=4 * np.std(risks) * np.sqrt(2 / 40))


def test_the_heuristic_keeps_candidates_of_which_the_mean_uncertainty_is_low(rule):
    sets = rule.heuristic_sets(
        np.array([0.0, 4.0]), np.array([[0.0, 2.0, 9.0], [0.0, 1.0, -5.0]]), (0.0, 4.0), 0.5
    )
    assert sets.tolist() == [[True, True, False], [False, False, True]]


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["binomial", "hoeffding"])
def test_limits_of_the_figures_are_thresholds_that_are_certified(bound, monkeypatch):
    for folder in (FILE.parent, FILE.parent / "papers"):
        monkeypatch.syspath_prepend(folder)
    figures = importlib.import_module("cai2025")
    rng = np.random.default_rng(4)
    scores = np.where(rng.random((2, 200)) < 0.1, np.inf, rng.exponential(size=(2, 200)))
    limits = figures.limits(scores.astype(np.float32), bound)
    uncertified = 0
    for row, one in zip(scores, limits, strict=True):
        calibration = ScoredResults(row.astype(np.float32), depth=50)
        for (delta, alpha), limit in zip(figures.PLACES, one, strict=True):
            try:
                threshold = certify(make_request(alpha, delta), calibration, bound=bound).threshold
            except RiskUnattainable:
                uncertified += 1
                assert limit == np.inf
            else:
                assert limit == np.float32(widen(threshold))
    assert 0 < uncertified < limits.size
