"""Losses and distances of hedged instance embeddings, against naive forms and quadrature."""

import numpy as np
import pytest
import torch
from scipy import integrate
from scipy.special import expit
from scipy.stats import norm
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from rcir.losses.hedged import (
    match_logits,
    match_nll,
    mismatch_probability,
    mixture_kl_to_normal,
    mixture_samples,
    soft_contrastive_loss,
)

SCALE, SHIFT = 1.3, 2.1


def logits_of(first, second):
    return match_logits(first, second, SCALE, SHIFT)


def samples(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_probabilities(first, second):
    """Match probability of every pair of samples, one by one."""
    rows = [[np.linalg.norm(x - y) for y in second.numpy()] for x in first.numpy()]
    return expit(SHIFT - SCALE * np.array(rows))


def test_loss_and_probabilities_are_means_over_all_sample_pairs():
    first, second = samples(4, 3), samples(5, 3, seed=1)
    p = naive_probabilities(first, second)
    for match, expected in ((True, -np.log(p).mean()), (False, -np.log(1 - p).mean())):
        loss = soft_contrastive_loss(logits_of(first, second), torch.tensor(match))
        assert loss.item() == pytest.approx(expected, rel=1e-12)
    mismatch = mismatch_probability(logits_of(first, second))
    assert mismatch.item() == pytest.approx(1 - p.mean(), rel=1e-12)
    assert match_nll(logits_of(first, second)).item() == pytest.approx(-np.log(p.mean()))


@pytest.mark.parametrize("match", [True, False])
def test_gradients_are_finite_where_a_pair_is_hopeless_or_at_one_place(match):
    for distance in (0.0, 1e-30, 1e4):
        x = torch.zeros(2, 3, requires_grad=True)
        y = torch.full((2, 3), distance, requires_grad=True)
        loss = soft_contrastive_loss(match_logits(x, y, 1.0, 1.0), torch.tensor(match))
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(x.grad).all()
        assert torch.isfinite(y.grad).all()


def test_certain_and_impossible_matches_keep_their_digits_in_single_precision():
    logits = torch.tensor([14.9, 14.89, -399.0, -400.0])
    nll = match_nll(logits[:, None, None])
    np.testing.assert_allclose(nll[:2], torch.log1p((-logits[:2].double()).exp()), rtol=1e-5)
    np.testing.assert_allclose(nll[2:], [399, 400], rtol=1e-6)
    assert 0 <= match_nll(torch.full((8, 8), 200.0)).item() < 1e-6


def test_the_distance_of_an_impossible_match_has_a_gradient():
    """One minus a probability of 0 has no logarithm, in the branch that is not taken."""
    x, y = torch.zeros(3, 2), torch.full((3, 2), 300.0, requires_grad=True)
    match_nll(match_logits(x, y, 1.0, 5.0)).backward()
    torch.testing.assert_close(y.grad, torch.full((3, 2), 0.5**0.5 / 3))


@pytest.mark.parametrize("match", [True, False])
def test_loss_of_two_gaussians_agrees_with_quadrature(match):
    """In one dimension; the difference of two Gaussians is a Gaussian."""
    quantiles = torch.from_numpy(norm.ppf((np.arange(500) + 0.5) / 500))[:, None]
    first = mixture_samples(torch.tensor([[0.4]]), torch.tensor([[0.5]]), quantiles)
    second = mixture_samples(torch.tensor([[-0.9]]), torch.tensor([[0.8]]), quantiles)
    difference = norm(1.3, np.sqrt(0.5 + 0.8))

    def expected(value):
        def density(x):
            return value(expit(SHIFT - SCALE * abs(x))) * difference.pdf(x)

        return integrate.quad(density, -12, 14, points=[0])[0]

    logits = logits_of(first, second)
    loss = soft_contrastive_loss(logits, torch.tensor(match))
    exact = expected(lambda p: -np.log(p if match else 1 - p))
    assert loss.item() == pytest.approx(exact, rel=0.01)
    assert abs(exact - expected(lambda p: -np.log(1 - p if match else p))) > 0.2 * exact
    mismatch = mismatch_probability(logits)
    assert mismatch.item() == pytest.approx(expected(lambda p: 1 - p), rel=0.01)
    if match:  # the mean of the logs lies above the log of the mean (Jensen)
        assert match_nll(logits) < loss


def test_every_component_gets_the_same_number_of_samples():
    means = torch.tensor([[-10.0, 0.0], [10.0, 5.0]], dtype=torch.float64)
    variances = torch.tensor([[1.0, 4.0], [0.25, 1.0]], dtype=torch.float64)
    drawn = mixture_samples(means, variances, samples(20_000, 2))
    for component, part in enumerate(drawn.split(10_000)):
        torch.testing.assert_close(part.mean(0), means[component], rtol=0, atol=0.1)
        torch.testing.assert_close(part.var(0), variances[component], rtol=0.05, atol=0)
    # The same noise for several images, or each its own.
    both = torch.stack([means, means + 1])
    shared = mixture_samples(both, variances, samples(4, 2))
    assert shared.shape == (2, 4, 2)
    torch.testing.assert_close(shared[1], shared[0] + 1)


def test_divergence_of_a_mixture_is_the_difference_of_torch_log_densities():
    means, variances = samples(3, 2, 4), samples(3, 2, 4, seed=1).square() + 0.1
    drawn = mixture_samples(means, variances, samples(3, 6, 4, seed=2))
    components = Independent(Normal(means[:, None], variances[:, None].sqrt()), 1)
    mixture = MixtureSameFamily(Categorical(torch.ones(3, 1, 2)), components)
    prior = Independent(Normal(torch.zeros(4, dtype=torch.float64), 1.0), 1)
    expected = (mixture.log_prob(drawn) - prior.log_prob(drawn)).mean(-1)
    torch.testing.assert_close(mixture_kl_to_normal(drawn, means, variances), expected)
