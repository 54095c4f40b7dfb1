"""Bessel functions and the von Mises-Fisher triplet loss, against mpmath, SciPy and simulation."""

from functools import cache
from itertools import product

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import ive
from scipy.stats import vonmises_fisher
from torch.nn import functional as F

from rcir.losses import (
    TupleRows,
    VonMisesFisherOptions,
    bessel_ratio,
    order_nll,
    vmf_expected_squared_distance,
    vmf_tuple_loss,
)
from rcir.losses.von_mises_fisher import growth_and_ratio, vmf_image_terms, vmf_triplet_moments

DIMS = (2, 3, 4, 16, 129, 2048)
KAPPAS = (1e-3, 0.07, 0.5, 3.0, 40.0, 700.0, 1e6)


@cache
def exact(dim, concentration):
    """Ratio, divergence, and the derivative of each, by mpmath."""
    with mpmath.workdps(30):
        kappa, order = mpmath.mpf(concentration), mpmath.mpf(dim) / 2 - 1
        value = mpmath.besseli(order, kappa)
        ratio = mpmath.besseli(order + 1, kappa) / value
        divergence = kappa * ratio - mpmath.log(value)
        divergence += order * mpmath.log(kappa / 2) - mpmath.loggamma(order + 1)
        slope = 1 - ratio**2 - (dim - 1) * ratio / kappa  # loses half of the digits at 1e6
        values = ratio, divergence, slope, kappa * slope
        return tuple(map(float, values))


def tensor(concentration, dtype=torch.float64):
    return torch.tensor(concentration, dtype=dtype, requires_grad=True)


def derivative(values, concentration):
    return torch.autograd.grad(values.sum(), concentration)[0]


def kl_to_uniform(kappa, dim):
    growth, ratio = growth_and_ratio(kappa, dim)
    return kappa.double() * ratio - growth


def moments(means, concentrations):
    return vmf_triplet_moments(means, vmf_image_terms(concentrations, means[0].shape[-1]))


def triplet_nll(means, concentrations, margin=0.0):
    return order_nll(*moments(means, concentrations), margin)


@pytest.mark.parametrize("dim", DIMS)
def test_values_and_derivatives_agree_with_mpmath(dim):
    # A series is used up to 0.03 times the root of the dimension: just below and above it too.
    points = [*KAPPAS, 0.0299 * dim**0.5, 0.0301 * dim**0.5]
    kappa = tensor(points)
    ratio, divergence = bessel_ratio(kappa, dim), kl_to_uniform(kappa, dim)
    expected = np.array([exact(dim, concentration) for concentration in points]).T
    np.testing.assert_allclose(ratio.detach(), expected[0], rtol=1e-10)
    np.testing.assert_allclose(divergence.detach(), expected[1], rtol=1e-7)
    np.testing.assert_allclose(derivative(ratio, kappa), expected[2], rtol=1e-6)
    np.testing.assert_allclose(derivative(divergence, kappa), expected[3], rtol=1e-6)


def test_uniform_distributions_and_many_dimensions_have_finite_gradients():
    kappa = tensor([[0.0], [1e-12], [1e8]], torch.float32)
    for dim, function in product(DIMS, (bessel_ratio, kl_to_uniform)):
        values = function(kappa, dim)
        assert values.dtype == torch.float64
        assert values[0] == 0
        assert torch.isfinite(values).all()
        assert torch.isfinite(derivative(values, kappa)).all()


# Anchor, positive, negative.
MEANS = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.6, 0.8]], dtype=torch.float64)
CONCENTRATIONS = torch.tensor([[10.0], [20.0], [5.0]], dtype=torch.float64)
DRAWS = 100_000


def random_triplet(dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(3, dim, generator=generator, dtype=torch.float64)
    return F.normalize(means)


def simulated(means, concentrations, seed=0):
    """tau, |a-p|^2 of draws by scipy."""
    rng = np.random.default_rng(seed)
    a, p, n = (
        vonmises_fisher(mu.numpy(), kappa.item()).rvs(DRAWS, random_state=rng)
        for mu, kappa in zip(means, concentrations, strict=True)
    )
    near = ((a - p) ** 2).sum(1)
    return near - ((a - n) ** 2).sum(1), near


def variance_fits(variance, tau):
    fourth = ((tau - tau.mean()) ** 4).mean()
    return abs(variance - tau.var()) < 5 * np.sqrt((fourth - tau.var() ** 2) / len(tau))


CASES = [(2, (3, 1, 0.5)), (3, (10, 20, 5)), (8, (2, 0.7, 40))]


@pytest.mark.parametrize(("dim", "concentrations"), CASES, ids=str)
def test_moments_and_distance_agree_with_simulation(dim, concentrations):
    means = random_triplet(dim, seed=dim)
    kappa = torch.tensor(concentrations, dtype=torch.float64)[:, None]
    tau, near = simulated(means, kappa)
    mean, variance = (moment.item() for moment in moments(tuple(means), tuple(kappa)))
    assert mean == pytest.approx(tau.mean(), abs=5 * tau.std() / DRAWS**0.5)
    assert variance_fits(variance, tau)
    distance = vmf_expected_squared_distance(means[0], kappa[0], means[1], kappa[1]).item()
    assert distance == pytest.approx(near.mean(), abs=5 * near.std() / DRAWS**0.5)


def terms_of_the_variance(means, concentrations):
    """The parts that `vmf_triplet_moments` adds up, one by one."""
    a, p, n = means
    dim = len(a)
    kappa = concentrations[:, 0].numpy()
    length = torch.from_numpy(ive(dim / 2, kappa) / ive(dim / 2 - 1, kappa))
    alpha = length / concentrations[:, 0]
    (la, lp, ln), (ea, ep, en) = length, alpha
    ba, bp, bn = 1 - length**2 - dim * alpha
    between = ln * n - lp * p
    parts = [ea * between @ between, ba * (a @ between) ** 2]
    for other, e, b in ((p, ep, bp), (n, en, bn)):
        along = b * (a @ other) ** 2
        parts += [la**2 * e, la**2 * along, dim * ea * e, ea * b, ba * e, ba * along]
    return 4 * torch.stack(parts)


def test_the_simulation_detects_a_wrong_sign_of_any_term():
    means = F.normalize(torch.tensor([[1.0, 0.2, 0.0], [1.0, 0.5, 0.1], [-1.0, 0.3, 0.4]]).double())
    concentrations = torch.tensor([[4.0], [2.5], [3.0]], dtype=torch.float64)
    tau, _ = simulated(means, concentrations, seed=1)
    parts = terms_of_the_variance(means, concentrations)
    assert len(parts) == 14
    _, variance = moments(tuple(means), tuple(concentrations))
    assert parts.sum().item() == pytest.approx(variance.item(), rel=1e-9)
    assert variance_fits(variance.item(), tau)
    for part in parts:
        assert not variance_fits((variance - 2 * part).item(), tau)


def naive_nll(a, p, n, concentrations, margin):
    """By mpmath, of three vectors and concentrations, from A and the covariance matrices."""
    dim = len(a)
    firsts, seconds = [], []
    for mu, kappa in zip((a, p, n), concentrations, strict=True):
        order = mpmath.mpf(dim) / 2 - 1
        length = mpmath.besseli(order + 1, kappa) / mpmath.besseli(order, kappa)
        alpha = length / kappa
        mu = mpmath.matrix(mu)
        first = length * mu
        covariance = mpmath.eye(dim) * alpha + (1 - length**2 - dim * alpha) * (mu * mu.T)
        firsts.append(first)
        seconds.append(covariance + first * first.T)
    between = firsts[2] - firsts[1]
    # E (a . (n - p))^2 = trace(E aa^T E (n-p)(n-p)^T)
    moment = seconds[1] + seconds[2] - firsts[1] * firsts[2].T - firsts[2] * firsts[1].T
    product = seconds[0] * moment
    mean = 2 * (firsts[0].T * between)[0]
    variance = 4 * sum(product[i, i] for i in range(dim)) - mean**2
    return -mpmath.log(mpmath.ncdf((-margin - mean) / mpmath.sqrt(variance)))


@pytest.mark.parametrize("swap", [False, True])
def test_the_likelihood_and_its_gradients_are_those_of_mpmath(swap):
    order = [0, 2, 1] if swap else [0, 1, 2]
    means = [MEANS[i].clone().requires_grad_() for i in order]
    concentrations = [CONCENTRATIONS[i].clone().requires_grad_() for i in order]
    loss = triplet_nll(tuple(means), tuple(concentrations), margin=0.1)
    loss.backward()
    vectors = [mean.tolist() for mean in means]
    kappas = [each.item() for each in concentrations]
    with mpmath.workdps(30):
        expected = naive_nll(*vectors, kappas, 0.1)
        assert loss.item() == pytest.approx(float(expected), rel=1e-9)
        for row in range(3):

            def of_kappa(kappa, row=row):
                return naive_nll(*vectors, [*kappas[:row], kappa, *kappas[row + 1 :]], 0.1)

            slope = float(mpmath.diff(of_kappa, kappas[row]))
            assert concentrations[row].grad.item() == pytest.approx(slope, rel=1e-7)
    if swap:
        assert (means[1].grad @ (MEANS[0] - means[1])).item() < 0  # pulled to the anchor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [2, 16, 2048])
def test_gradients_are_finite_even_where_triplets_are_hopeless(dim, dtype):
    means = random_triplet(dim).to(dtype)
    for concentration, order in product((1e-3, 1.0, 1e3, 1e6), ([0, 0, 1], [0, 1, 0], [0, 0, 0])):
        leaves = [means[i].clone().requires_grad_() for i in order]
        spread = [torch.full((1,), concentration, dtype=dtype, requires_grad=True) for _ in order]
        loss = triplet_nll(tuple(leaves), tuple(spread))
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(leaf.grad).all() for leaf in (*leaves, *spread))


@pytest.mark.parametrize("concentration", [1e6, 1e8])
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_certain_triplets_in_the_opposite_order_keep_the_digits_of_their_variance(
    dim, concentration
):
    """All 200, in float32: the positive is opposite to the anchor, the negative is at its place."""
    generator = torch.Generator().manual_seed(0)
    anchor = F.normalize(torch.randn(200, dim, generator=generator))
    means = [sign * anchor.clone() for sign in (1, -1, 1)]
    spread = [torch.full((200, 1), concentration) for _ in means]
    leaves = [each.requires_grad_() for each in (*means, *spread)]
    losses = triplet_nll(tuple(leaves[:3]), tuple(leaves[3:]))
    losses.sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
    axis = [1.0] + [0.0] * (dim - 1)
    with mpmath.workdps(60):
        expected = naive_nll(axis, [-1.0, *axis[1:]], axis, [mpmath.mpf(concentration)] * 3, 0)
    np.testing.assert_allclose(losses.detach(), float(expected), rtol=1e-5)


@pytest.mark.parametrize("dim", [2, 16, 2048])
def test_the_variance_along_the_mean_agrees_with_mpmath(dim):
    """That of tau for certain anchors and negatives, as the positive is on the line of both."""
    axis = torch.eye(1, dim, dtype=torch.float64)
    kappa = tensor([[1e2], [99.0 + 16 * dim], [101.0 + 16 * dim], [1e5], [1e7]])
    sure = torch.full_like(kappa, 1e30)
    _, variance = moments((axis, axis, axis), (sure, kappa, sure))
    slopes = derivative(variance, kappa)
    with mpmath.workdps(60):
        for row, value in enumerate(kappa[:, 0].tolist()):
            k, order = mpmath.mpf(value), mpmath.mpf(dim) / 2 - 1
            a = mpmath.besseli(order + 1, k) / mpmath.besseli(order, k)
            along = 1 - a**2 - (dim - 1) * a / k
            slope = (dim - 1) * (a / k - along) / k - 2 * a * along
            assert variance[row].item() == pytest.approx(4 * float(along), rel=1e-8, abs=0)
            assert slopes[row].item() == pytest.approx(4 * float(slope), rel=1e-6, abs=0)


def test_a_tuple_is_the_mean_of_its_triplets_and_its_divergences():
    generator = torch.Generator().manual_seed(5)
    mean = F.normalize(torch.randn(2 + 2 + 6, 4, generator=generator, dtype=torch.float64))
    concentration = 1 + 9 * torch.rand(10, 1, generator=generator)
    valid = torch.tensor([[True, False, True], [False, True, False]])
    options = VonMisesFisherOptions(margin=0.2, kl_scale=0.3)
    means, concentrations = (TupleRows.split(each, valid) for each in (mean, concentration))
    losses = vmf_tuple_loss(means, concentrations, valid, options)
    single = TupleRows.split(mean.float(), valid)
    assert vmf_tuple_loss(single, concentrations, valid, options).dtype == torch.float32
    for row, columns in enumerate(([0, 2], [1])):
        rows = [[row, 2 + row, 4 + 3 * row + column] for column in columns]
        nll = [triplet_nll(tuple(mean[r]), tuple(concentration[r]), 0.2) for r in rows]
        kl = [kl_to_uniform(concentration[r, 0], 4) for r in rows]
        expected = sum(x + 0.3 * y.sum() for x, y in zip(nll, kl, strict=True)) / len(rows)
        assert losses[row].item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_expected_distance_of_certain_vectors_is_their_distance():
    a, p, _ = random_triplet(16)
    certain = torch.full((1,), 1e9, dtype=torch.float64)
    found = vmf_expected_squared_distance(a, certain, p, certain)
    torch.testing.assert_close(found, (a - p).square().sum(), rtol=1e-6, atol=0)
    assert vmf_expected_squared_distance(a * 1.0001, certain, a, certain) == 0
