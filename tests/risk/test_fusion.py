"""Temperatures and weights of a fusion, against a minimisation without gradients."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax, logsumexp, softmax

from rcir.risk.fusion import Fusion, fit_temperature


def make_experts(n=80, k=6, seed=0, several=False):
    rng = np.random.default_rng(seed)
    right = np.arange(k) == rng.integers(k, size=n)[:, None]
    if several:
        right |= rng.uniform(size=(n, k)) < 0.2
    scales = np.array([0.01, 3.0, 40.0])
    noise = np.array([0.6, 1.0, 30.0])
    experts = right + noise[:, None, None] * rng.normal(size=(3, n, k))
    return scales[:, None, None] * experts, right


def expert_logs(fusion, experts):
    """Log probabilities of each expert, with a share of .002 for any candidate."""
    shares = softmax(fusion.temperatures[:, None, None] * experts, axis=2)
    return np.log(0.998 * shares + 0.002 / experts.shape[2])


def loss(logits, right):
    """Negative log likelihood of right candidates together, smoothed by one query of any."""
    logs, n = log_softmax(logits, axis=1), len(right)
    of_right = logsumexp(np.where(right, logs, -np.inf), axis=1).sum()
    return -n / (n + 1) * (of_right + logs.mean(axis=1).mean())


@pytest.mark.parametrize("several", [False, True])
def test_fit_minimises_the_penalised_likelihood(several):
    experts, right = make_experts(several=several)
    fusion = Fusion.fit(experts, right, ridge=7)
    grid = np.exp(np.linspace(-9, 9, 1001))
    for expert, b in zip(experts, fusion.temperatures, strict=True):
        values = [loss(x * expert, right) for x in grid]
        assert loss(b * expert, right) <= min(values) + 1e-3
    logs = expert_logs(fusion, experts)
    common = fit_temperature(logs.sum(axis=0), right)

    def penalised(roots):
        return loss(np.tensordot(roots**2, logs, 1), right) + 7 * ((roots**2 - common) ** 2).sum()

    best = minimize(penalised, np.full(3, 0.5), method="Nelder-Mead", options={"xatol": 1e-8})
    assert penalised(np.sqrt(fusion.weights)) <= best.fun + 1e-4
    np.testing.assert_allclose(fusion.weights, best.x**2, atol=2e-3)


def test_log_probabilities_are_the_weighted_product_of_the_experts():
    experts, _ = make_experts(n=5)
    fusion = Fusion(np.array([50.0, 0.5, 0.0]), np.array([0.3, 0.7, 2.0]))
    logs = expert_logs(fusion, experts)
    expected = log_softmax(np.tensordot(fusion.weights, logs, 1), axis=1)
    np.testing.assert_allclose(fusion.log_probabilities(experts), expected, atol=1e-12)


def test_missing_candidates_get_no_probability_and_change_nothing():
    experts, right = make_experts()
    wider = np.pad(experts, ((0, 0), (0, 5), (0, 2)), constant_values=-np.inf)
    more = np.pad(right, ((0, 5), (0, 2)))  # queries without a right candidate do not count
    wider[:, len(right) :, 0] = 0
    fusion, padded = Fusion.fit(experts, right), Fusion.fit(wider, more)
    np.testing.assert_allclose(padded.temperatures, fusion.temperatures, rtol=1e-6)
    np.testing.assert_allclose(padded.weights, fusion.weights, rtol=1e-4)
    logs = fusion.log_probabilities(wider)[: len(right)]
    np.testing.assert_allclose(logs[:, :6], fusion.log_probabilities(experts), atol=1e-12)
    assert np.isneginf(logs[:, 6:]).all()


def test_experts_without_information_and_perfect_ones():
    right = np.eye(4, dtype=bool)[np.arange(40) % 4]
    experts = np.stack([right.astype(float), np.zeros(right.shape)])
    fusion = Fusion.fit(experts, right)
    assert fusion.temperatures[1] == 0
    assert np.isfinite(fusion.weights).all()
    probability = np.exp(fusion.log_probabilities(experts))
    assert 0.9 < probability[right].min() < 0.999  # not certain after 40 queries
    np.testing.assert_allclose(probability.sum(axis=1), 1)


def test_experts_without_mistakes_on_clean_items_cannot_overrule_others_on_worse_queries():
    rng = np.random.default_rng(0)
    right = np.arange(30) == rng.integers(30, size=500)[:, None]
    clean = right + 0.02 * rng.normal(size=(6, 500, 30))  # no expert makes a mistake
    fusion = Fusion.fit(clean, right)
    query = np.full((6, 1, 30), 0.3)  # of a worse kind, with wider gaps
    query[:5, 0, 0], query[5, 0, 1] = 1, 4  # the last expert is certain of a wrong one
    assert np.exp(fusion.log_probabilities(query))[0, 0] > 0.8
