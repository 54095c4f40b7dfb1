"""Bessel functions, against 30 digits of mpmath and against scipy."""

from functools import cache
from itertools import product

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import ive

from rcir.losses import bessel_ratio, kl_to_uniform, log_bessel

DIMS = (2, 3, 4, 16, 129, 2048)
CONCENTRATIONS = (1e-3, 0.07, 0.5, 3.0, 40.0, 700.0, 1e6)


@cache
def exact(dim, concentration):
    """Ratio, log I_v, divergence, and derivatives of the first and last, by mpmath."""
    with mpmath.workdps(30):
        kappa, order = mpmath.mpf(concentration), mpmath.mpf(dim) / 2 - 1
        value = mpmath.besseli(order, kappa)
        ratio = mpmath.besseli(order + 1, kappa) / value
        divergence = kappa * ratio - mpmath.log(value)
        divergence += order * mpmath.log(kappa / 2) - mpmath.loggamma(order + 1)
        slope = 1 - ratio**2 - (dim - 1) * ratio / kappa  # loses half of the digits at 1e6
        found = ratio, mpmath.log(value), divergence, slope, kappa * slope
        return tuple(map(float, found))


def of(concentration, dtype=torch.float64):
    return torch.tensor(concentration, dtype=dtype, requires_grad=True)


def derivative(values, concentration):
    return torch.autograd.grad(values.sum(), concentration)[0]


@pytest.mark.parametrize(
    ("dim", "concentration", "ratio", "log_value", "divergence", "slope"),
    [
        (2, 5.0, 0.8933831370, 3.30468178, 1.16223391, 0.1159497152),
        (3, 5.0, 0.8000908040, 3.27629711, 1.30308451, 0.1990919189),
        (16, 20.0, 0.6870922089, 16.34625649, 4.98852198, 0.2517027940),
        (512, 300.0, 0.4614735653, 193.15991827, 61.28205018, 0.2996527255),
        (2048, 500.0, 0.2311118530, -363.47801572, 56.20804825, 0.2076926007),
        (2048, 5000.0, 0.8160200178, 4890.51990891, 1122.29883605, 0.1636767101),
    ],
)
def test_golden_values(dim, concentration, ratio, log_value, divergence, slope):
    kappa = of(concentration)
    found = kl_to_uniform(kappa, dim)
    assert bessel_ratio(kappa, dim).item() == pytest.approx(ratio, rel=1e-9)
    assert log_bessel(kappa, dim).item() == pytest.approx(log_value, rel=1e-8)
    assert found.item() == pytest.approx(divergence, rel=1e-8)
    assert derivative(found, kappa).item() == pytest.approx(slope, rel=1e-8)


@pytest.mark.parametrize("dim", DIMS)
def test_values_and_derivatives_are_those_of_mpmath(dim):
    kappa = of(CONCENTRATIONS)
    ratio, divergence = bessel_ratio(kappa, dim), kl_to_uniform(kappa, dim)
    known = np.array([exact(dim, concentration) for concentration in CONCENTRATIONS]).T
    np.testing.assert_allclose(ratio.detach(), known[0], rtol=1e-11)
    np.testing.assert_allclose(log_bessel(kappa, dim).detach(), known[1], rtol=1e-9, atol=1e-8)
    np.testing.assert_allclose(divergence.detach(), known[2], rtol=1e-6)
    np.testing.assert_allclose(derivative(ratio, kappa), known[3], rtol=1e-6)
    np.testing.assert_allclose(derivative(divergence, kappa), known[4], rtol=1e-6)


@pytest.mark.parametrize("dim", [2, 3, 16, 200])
def test_values_are_those_of_scipy_where_it_neither_overflows_nor_underflows(dim):
    kappa = np.geomspace(dim / 10, 1e5, 200)
    order = dim / 2 - 1
    scaled, above = ive(order, kappa), ive(order + 1, kappa)
    assert (above > 0).all()
    given = torch.from_numpy(kappa)
    np.testing.assert_allclose(bessel_ratio(given, dim), above / scaled, rtol=1e-11)
    np.testing.assert_allclose(log_bessel(given, dim), np.log(scaled) + kappa, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("dim", DIMS)
def test_series_and_recurrence_meet(dim):
    bound = 0.03 * dim**0.5
    kappa = of([bound * (1 - 1e-9), bound * (1 + 1e-9)])
    for values in (bessel_ratio(kappa, dim), kl_to_uniform(kappa, dim)):
        below, above = values.detach()
        assert above > 0
        assert below.item() == pytest.approx(above.item(), rel=2e-7)
        slopes = derivative(values, kappa)
        assert slopes[0].item() == pytest.approx(slopes[1].item(), rel=1e-6)


def test_uniform_distributions_and_many_dimensions_have_finite_gradients():
    kappa = of([[0.0], [1e-12], [1e8]], torch.float32)
    for dim, function in product(DIMS, (bessel_ratio, kl_to_uniform)):
        values = function(kappa, dim)
        assert values.dtype == torch.float64
        assert values[0] == 0
        assert torch.isfinite(values).all()
        assert torch.isfinite(derivative(values, kappa)).all()


def test_the_divergence_grows_as_the_logarithm_of_a_large_concentration():
    low, high = kl_to_uniform(torch.tensor([1e5, 1e6], dtype=torch.float64), 16)
    assert (high - low).item() == pytest.approx(15 / 2 * np.log(10), rel=1e-4)
