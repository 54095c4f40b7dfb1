"""Bayesian triplet loss, against worked examples, simulation, SciPy and mpmath."""

import importlib
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, norm
from torch.distributions import MultivariateNormal, kl_divergence

from rcir.losses import (
    BayesianTripletOptions,
    TupleRows,
    bayesian_tuple_loss,
    expected_squared_distance,
    kl_to_prior,
    order_nll,
    triplet_moments,
)


def triplet_nll(means, variances, margin=0.0):
    return order_nll(*triplet_moments(means, variances), margin)


def random_triplets(n, dim, variance_dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(3, n, dim, generator=generator, dtype=torch.float64)
    spread = torch.rand(3, n, variance_dim, generator=generator, dtype=torch.float64)
    return tuple(means), tuple(0.05 + spread)


@pytest.mark.parametrize("variance_dim", [1, 4])
def test_moments_and_distance_agree_with_simulation(variance_dim):
    means, variances = random_triplets(1, 4, variance_dim, seed=3)
    rng = np.random.default_rng(0)
    draws = 400_000
    a, p, n = (
        m.numpy() + np.sqrt(v.numpy()) * rng.standard_normal((draws, 4))
        for m, v in zip(means, variances, strict=True)
    )
    to_positive = ((a - p) ** 2).sum(1)
    tau = to_positive - ((a - n) ** 2).sum(1)
    mean, variance = (moment.item() for moment in triplet_moments(means, variances))
    assert mean == pytest.approx(tau.mean(), abs=5 * tau.std() / draws**0.5)
    fourth = ((tau - tau.mean()) ** 4).mean()
    error = np.sqrt((fourth - tau.var() ** 2) / draws)
    assert variance == pytest.approx(tau.var(), abs=5 * error)
    distance = expected_squared_distance(means[0], variances[0], means[1], variances[1]).item()
    assert distance == pytest.approx(to_positive.mean(), abs=5 * to_positive.std() / draws**0.5)


def draws_of_tau(means, variances, draws):
    """Draw tau (draws,) from the distributions of anchor, positive and negative."""
    rng = np.random.default_rng(0)
    a, p, n = (
        mean + np.sqrt(variance) * rng.standard_normal((draws, len(mean)))
        for mean, variance in zip(means, variances, strict=True)
    )
    return ((a - p) ** 2).sum(1) - ((a - n) ** 2).sum(1)


@pytest.mark.parametrize(("dim", "error"), [(16, 0.03), (256, 0.01)])
def test_likelihood_agrees_with_simulation_in_many_dimensions(dim, error):
    """Warburg et al. (ICCV 2021), supplement: the normal approximation errs in few dimensions."""
    means, variances = random_triplets(1, dim, 1)
    draws = 20_000
    tau = draws_of_tau([mean[0].numpy() for mean in means], [v.item() for v in variances], draws)
    for margin in np.quantile(-tau, np.linspace(0.05, 0.95, 19)).clip(min=0):
        likelihood = triplet_nll(means, variances, margin).neg().exp().item()
        assert likelihood == pytest.approx((tau < -margin).mean(), abs=error + 2 / draws**0.5)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_the_benchmark_draws_tau_from_its_distribution(dim, monkeypatch):
    papers = Path(__file__).parents[2] / "benchmarks" / "papers"
    monkeypatch.syspath_prepend(str(papers))
    benchmark = importlib.import_module("warburg2021")
    rng = np.random.default_rng(1)
    means, variances = rng.normal(size=(3, dim)), rng.uniform(0.1, 2, 3)
    drawn = benchmark.draw_tau(means, variances, 100_000, rng)
    assert ks_2samp(drawn, draws_of_tau(means, variances, 100_000)).pvalue > 1e-4


@pytest.mark.parametrize("variance_dim", [1, 6])
@pytest.mark.parametrize("prior", [None, 0.7])
def test_divergence_agrees_with_torch_distributions(variance_dim, prior):
    means, variances = random_triplets(7, 6, variance_dim)
    covariance = torch.diag_embed(variances[0].expand(7, 6))
    around = torch.eye(6, dtype=torch.float64) * (1 / 6 if prior is None else prior)
    expected = kl_divergence(
        MultivariateNormal(means[0], covariance),
        MultivariateNormal(torch.zeros(6, dtype=torch.float64), around),
    )
    torch.testing.assert_close(kl_to_prior(means[0], variances[0], prior), expected)


def triplet_of_z(z):
    """Means and variances of a triplet whose ``-E tau / sd(tau)`` is z, in one dimension."""
    # a = p = 0, n = x, no variance but the anchor's: E tau = -x^2, Var tau = 4 v x^2.
    x = 2 * abs(z) * 0.01
    zero, far = torch.zeros(1, dtype=torch.float64), torch.full((1,), x, dtype=torch.float64)
    means = (zero, far, zero) if z < 0 else (zero, zero, far)
    return means, (torch.full((1,), 1e-4, dtype=torch.float64), zero, zero)


@pytest.mark.parametrize("margin", [0.0, 0.3])
@pytest.mark.parametrize("z", [-40.0, -10.0, -6.0, -1.0, 0.5, 3.0, 8.0])
def test_likelihood_is_the_normal_log_cdf_and_does_not_saturate(z, margin):
    mean, variance = triplet_moments(*triplet_of_z(z))
    loss = order_nll(mean - margin, variance, margin)
    assert loss.item() == pytest.approx(-norm.logcdf(z), rel=1e-9)


def test_the_published_epsilon_bounds_the_loss():
    z = torch.tensor([-1e6, -10.0, -3.0, 0.0, 3.0], requires_grad=True)
    losses = order_nll(-z, torch.ones(5), epsilon=1e-8)
    np.testing.assert_allclose(
        losses.detach(), -np.log(norm.cdf(z.detach().double()) + 1e-8), rtol=1e-5
    )
    losses.sum().backward()
    density = norm.pdf(z.detach().double()) / (norm.cdf(z.detach().double()) + 1e-8)
    np.testing.assert_allclose(z.grad, -density, rtol=1e-4, atol=1e-12)
    valid = torch.ones(1, 1, dtype=torch.bool)
    mean = TupleRows.split(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]), valid)
    variance = TupleRows.split(torch.full((3, 1), 1e-6), valid)
    options = BayesianTripletOptions(kl_scale=0.0, epsilon=1e-8)
    loss = bayesian_tuple_loss(mean, variance, valid, options)
    assert loss.item() == pytest.approx(8 * np.log(10), rel=1e-6)


def test_float32_keeps_its_digits_at_tiny_variances():
    means, _ = random_triplets(20, 2047, 1)
    unit = tuple(torch.nn.functional.normalize(m) for m in means)
    tiny = tuple(torch.full((20, 1), 1e-9, dtype=torch.float64) * k for k in (1, 2, 3))
    exact = triplet_moments(unit, tiny)[1]
    single = triplet_moments(tuple(m.float() for m in unit), tuple(v.float() for v in tiny))[1]
    assert (single > 0).all()
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("variance", [1e-10, 1e-6, 1e-2, 1.0])
def test_gradients_in_single_precision_agree_with_mpmath(variance):
    # An anchor on its negative, `gap` away from its positive, all equally certain.
    def nll(x):
        total = 12 * mpmath.mpf(variance) ** 2 * 2 + 4 * mpmath.mpf(variance) * 2 * x**2
        return -mpmath.log(mpmath.ncdf(-(x**2) / mpmath.sqrt(total)))

    for gap in (1e-4, 1e-3, 1e-2, 0.1, 1.0, 2.0):
        offset = torch.tensor(gap, requires_grad=True)
        anchor, zero = torch.tensor([0.0, 1.0]), torch.zeros(())
        positive = anchor + torch.stack([offset, zero])
        spread = torch.full((1,), variance)
        triplet_nll((anchor, positive, anchor), (spread,) * 3).backward()
        with mpmath.workdps(60):
            expected = float(mpmath.diff(nll, mpmath.mpf(offset.item())))
        assert offset.grad.item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sides", [(0, 1, 2), (0, 2, 1), (0, 0, 1), (1, 1, 1)], ids=str)
def test_gradients_are_finite_without_any_variance(dtype, sides):
    """Triplets that are right, wrong, and undecided."""
    points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=dtype)
    means = [points[side].clone().requires_grad_() for side in sides]
    variances = [torch.zeros(1, dtype=dtype, requires_grad=True) for _ in sides]
    loss = triplet_nll(tuple(means), tuple(variances))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(leaf.grad).all() for leaf in (*means, *variances))
    if sides == (0, 2, 1):
        assert (means[1].grad @ (points[2] - points[0])).item() > 0  # pulled to the anchor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("z", [-1.0, np.nextafter(-1.0, 0), np.nextafter(-1.0, -2)])
def test_the_gradient_of_the_log_cdf_has_no_gap_at_minus_1(z, dtype):
    mean = torch.tensor(-z, dtype=dtype, requires_grad=True)
    order_nll(mean, torch.ones((), dtype=dtype)).backward()
    at = -mean.item()
    expected = np.exp(norm.logpdf(at) - norm.logcdf(at))
    assert mean.grad.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-9)


TUPLES, NEGATIVES, DIM = 4, 3, 5
VALID = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.bool)


@pytest.fixture
def rows():
    """Means and variances of tuples: anchors, positives, negatives anchor by anchor."""
    generator = torch.Generator().manual_seed(0)
    n = TUPLES * (2 + NEGATIVES)
    mean = torch.randn(n, DIM, generator=generator, dtype=torch.float64)
    return mean, 0.1 + torch.rand(n, 1, generator=generator, dtype=torch.float64)


def test_a_tuple_is_the_likelihood_of_its_triplets_plus_divergences(rows):
    by_role = (TupleRows.split(each, VALID) for each in rows)
    losses = bayesian_tuple_loss(*by_role, VALID, BayesianTripletOptions(0.2, kl_scale=0.01))
    for i, loss in enumerate(losses):
        negatives = [2 * TUPLES + i * NEGATIVES + j for j in range(NEGATIVES) if VALID[i, j]]
        nlls, divergences = [], []
        for n in negatives:
            means, variances = (each[[i, TUPLES + i, n]] for each in rows)
            nlls.append(triplet_nll(tuple(means), tuple(variances), 0.2).item())
            divergences.append(kl_to_prior(means[2], variances[2]).item())
        total = kl_to_prior(means[:2], variances[:2]).sum().item() + np.mean(divergences)
        assert loss.item() == pytest.approx(np.mean(nlls) + 0.01 * total)


def test_invalid_negatives_get_no_gradient(rows):
    leaves = [each.requires_grad_() for each in rows]
    by_role = (TupleRows.split(each, VALID) for each in leaves)
    bayesian_tuple_loss(*by_role, VALID, BayesianTripletOptions()).sum().backward()
    untouched = torch.cat([torch.zeros(2 * TUPLES, dtype=torch.bool), ~VALID.flatten()])
    for leaf in leaves:
        assert (leaf.grad[untouched] == 0).all()
        assert (leaf.grad[~untouched].abs().sum(1) > 0).all()
