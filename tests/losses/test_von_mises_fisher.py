import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import vonmises_fisher
from torch.nn import functional as F

from rcir.errors import InvalidConfig
from rcir.losses import (
    VonMisesFisherOptions,
    kl_to_uniform,
    vmf_expected_squared_distance,
    vmf_triplet_moments,
    vmf_triplet_nll,
    vmf_tuple_loss,
)
from rcir.losses.von_mises_fisher import _spread

# Anchor, positive, negative.
MEANS = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, 0.6, 0.8]], dtype=torch.float64)
CONCENTRATIONS = torch.tensor([[10.0], [20.0], [5.0]], dtype=torch.float64)
DRAWS = 100_000


def random_triplet(dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(3, dim, generator=generator, dtype=torch.float64)
    return F.normalize(means)


def test_golden_moments():
    mean, variance = vmf_triplet_moments(tuple(MEANS), tuple(CONCENTRATIONS))
    assert mean.item() == pytest.approx(-1.3680000063, rel=1e-9)
    assert variance.item() == pytest.approx(0.8600106515, rel=1e-9)


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


CASES = [(2, (3, 1, 0.5)), (3, (10, 20, 5)), (8, (10, 30, 4)), (8, (2, 0.7, 40)), (40, (60, 9, 25))]


@pytest.mark.parametrize(("dim", "concentrations"), CASES)
def test_moments_and_distance_agree_with_simulation(dim, concentrations):
    means = random_triplet(dim, seed=dim)
    given = torch.tensor(concentrations, dtype=torch.float64)[:, None]
    tau, near = simulated(means, given)
    mean, variance = (moment.item() for moment in vmf_triplet_moments(tuple(means), tuple(given)))
    assert mean == pytest.approx(tau.mean(), abs=5 * tau.std() / DRAWS**0.5)
    assert variance_fits(variance, tau)
    distance = vmf_expected_squared_distance(means[0], given[0], means[1], given[1]).item()
    assert distance == pytest.approx(near.mean(), abs=5 * near.std() / DRAWS**0.5)


def terms_of_the_variance(means, concentrations):
    """The parts that `vmf_triplet_moments` adds up, one by one."""
    a, p, n = means
    dim = len(a)
    (la, lp, ln), (ea, ep, en), (ba, bp, bn) = zip(
        *(_spread(concentration, dim) for concentration in concentrations), strict=True
    )
    between = ln * n - lp * p
    parts = [ea * between @ between, ba * (a @ between) ** 2]
    for other, e, b in ((p, ep, bp), (n, en, bn)):
        along = b * (a @ other) ** 2
        parts += [la**2 * e, la**2 * along, dim * ea * e, ea * b, ba * e, ba * along]
    return 4 * torch.stack(parts)


def test_the_simulation_tells_a_wrong_sign_of_every_term():
    means = F.normalize(torch.tensor([[1.0, 0.2, 0.0], [1.0, 0.5, 0.1], [-1.0, 0.3, 0.4]]).double())
    concentrations = torch.tensor([[4.0], [2.5], [3.0]], dtype=torch.float64)
    tau, _ = simulated(means, concentrations, seed=1)
    parts = terms_of_the_variance(means, concentrations)
    assert len(parts) == 14
    _, variance = vmf_triplet_moments(tuple(means), tuple(concentrations))
    assert parts.sum().item() == pytest.approx(variance.item(), rel=1e-12)
    assert variance_fits(variance.item(), tau)
    for part in parts:
        assert not variance_fits((variance - 2 * part).item(), tau)


def test_the_moments_of_gaussians_are_far_off():
    """Those of the published listing, of variance 1 / kappa."""
    means = random_triplet(8, seed=2)
    concentrations = torch.tensor([[10.0], [30.0], [4.0]], dtype=torch.float64)
    tau, _ = simulated(means, concentrations)
    a, p, n = means
    gaussian = (a - p).square().sum() - (a - n).square().sum() + 8 * (1 / 30 - 1 / 4)
    assert abs(gaussian.item() - tau.mean()) > 100 * tau.std() / DRAWS**0.5


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
    loss = vmf_triplet_nll(tuple(means), tuple(concentrations), margin=0.1)
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
        assert (means[1].grad @ (MEANS[0] - means[1])).item() < 0  # drawn to the anchor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("concentration", [1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("dim", [2, 16, 2048])
def test_gradients_are_finite_also_where_triplets_are_hopeless(dim, concentration, dtype):
    means = random_triplet(dim).to(dtype)
    for order in ([0, 0, 1], [0, 1, 0], [0, 0, 0]):
        leaves = [means[i].clone().requires_grad_() for i in order]
        spread = [torch.full((1,), concentration, dtype=dtype, requires_grad=True) for _ in order]
        loss = vmf_triplet_nll(tuple(leaves), tuple(spread))
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(leaf.grad).all() for leaf in (*leaves, *spread))


def test_a_tuple_is_the_mean_of_its_triplets_and_its_divergences():
    generator = torch.Generator().manual_seed(5)
    mean = F.normalize(torch.randn(2 + 2 + 6, 4, generator=generator))
    concentration = 1 + 9 * torch.rand(10, 1, generator=generator)
    valid = torch.tensor([[True, False, True], [False, True, False]])
    options = VonMisesFisherOptions(margin=0.2, kl_scale=0.3)
    found = vmf_tuple_loss(mean, concentration, valid, options)
    assert found.dtype == torch.float32
    for row, columns in enumerate(([0, 2], [1])):
        rows = [[row, 2 + row, 4 + 3 * row + column] for column in columns]
        nll = [vmf_triplet_nll(tuple(mean[r]), tuple(concentration[r]), 0.2) for r in rows]
        kl = [kl_to_uniform(concentration[r, 0], 4) for r in rows]
        expected = sum(x + 0.3 * y.sum() for x, y in zip(nll, kl, strict=True)) / len(rows)
        assert found[row].item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_expected_distance_of_certain_vectors_is_their_distance():
    a, p, _ = random_triplet(16)
    certain = torch.full((1,), 1e9, dtype=torch.float64)
    found = vmf_expected_squared_distance(a, certain, p, certain)
    torch.testing.assert_close(found, (a - p).square().sum(), rtol=1e-6, atol=0)
    assert vmf_expected_squared_distance(a * 1.0001, certain, a, certain) == 0


@pytest.mark.parametrize("options", [{"margin": -1.0}, {"kl_scale": float("nan")}], ids=str)
def test_options_below_0_are_refused(options):
    with pytest.raises(InvalidConfig):
        VonMisesFisherOptions(**options)
