"""Mutual likelihood score and fusion of Gaussians, against SciPy and numerical integration."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm

from rcir.losses.mutual_likelihood import (
    fuse_gaussians,
    mutual_likelihood_loss,
    mutual_likelihood_score,
)


def gaussians(n, dim, variance_dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return mean, 0.05 + torch.rand(n, variance_dim, generator=generator, dtype=torch.float64)


def score(mean, variance, first=0, second=1):
    return mutual_likelihood_score(mean[first], variance[first], mean[second], variance[second])


@pytest.mark.parametrize("variance_dim", [1, 6])
def test_the_score_is_the_log_density_of_the_difference_in_scipy(variance_dim):
    mean, variance = gaussians(2, 6, variance_dim, seed=1)
    total = (variance[0] + variance[1]).expand(6).numpy()
    expected = multivariate_normal.logpdf(mean[0] - mean[1], cov=np.diag(total))
    assert score(mean, variance).item() == pytest.approx(expected, rel=1e-9)


def test_the_loss_is_the_mean_over_genuine_pairs_and_has_naive_gradients():
    mean, variance = gaussians(5, 4, 4, seed=2)
    pairs = [(0, 1), (1, 2), (4, 3)]
    leaves = [mean.requires_grad_(), variance.requires_grad_()]
    loss = mutual_likelihood_loss(mean, variance, torch.tensor(pairs).T)
    naive = 0.0
    for i, j in pairs:
        for d in range(4):
            total = variance[i, d] + variance[j, d]
            density = torch.exp(-((mean[i, d] - mean[j, d]) ** 2) / (2 * total))
            naive = naive - torch.log(density / torch.sqrt(2 * torch.pi * total)) / len(pairs)
    assert loss.item() == pytest.approx(naive.item(), rel=1e-9)
    for found, expected in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(naive, leaves), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_single_precision_keeps_its_digits_at_the_smallest_variances():
    mean, _ = gaussians(2, 512, 1, seed=3)
    mean = torch.nn.functional.normalize(mean)
    mean[1] = mean[0] + 1e-4
    variance = torch.full((2, 512), 1e-6, dtype=torch.float64)
    exact = score(mean.float().double(), variance)
    assert score(mean.float(), variance.float()).item() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize("variance_dim", [1, 2])
def test_fused_gaussians_are_the_products_of_their_densities(variance_dim):
    mean, variance = gaussians(5, 2, variance_dim, seed=4)
    group = torch.tensor([1, 0, 1, 0, 1])
    fused_mean, fused_variance = fuse_gaussians(mean, variance, group, groups=2)
    assert fused_variance.shape == (2, variance_dim)
    grid = np.linspace(-12, 12, 48_001)
    for number, d in np.ndindex(2, 2):
        spread = variance.expand(5, 2)[:, d] ** 0.5
        rows = np.flatnonzero(group.numpy() == number)
        log = sum(norm.logpdf(grid, mean[i, d], spread[i]) for i in rows)
        density = np.exp(log - log.max())
        density /= density.sum()
        centre = density @ grid
        assert fused_mean[number, d].item() == pytest.approx(centre, abs=1e-8)
        expected = density @ (grid - centre) ** 2
        assert fused_variance.expand(2, 2)[number, d].item() == pytest.approx(expected, rel=1e-6)


def test_a_gaussian_without_variance_decides_the_fused_mean():
    mean, variance = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.5]])
    fused, spread = fuse_gaussians(mean, variance, torch.tensor([0, 0]), 1)
    torch.testing.assert_close(fused, torch.tensor([[1.0]]))
    assert 0 <= spread.item() < 1e-15
