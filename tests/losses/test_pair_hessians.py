"""Closed forms of Hessians against golden values, and against autograd in float64."""

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F

from rcir.errors import InvalidConfig
from rcir.losses import pair_hessian_blocks, pair_hessian_diagonal

LAYER = torch.tensor([[1.0, 0.5, 0.1], [0.0, 2.0, -0.2]], dtype=torch.float64)  # W, and b
PAIR = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)

# By W11, W12, W21, W22, b1, b2.
GOLDEN = {
    ("arccos", True): (
        *(-0.1239080773, 0.0828640531, 0.2959548975, -0.0370007433),
        *(-0.0212121225, 0.0414109895),
    ),
    ("arccos", False): (
        *(0.0061250994, 0.2128972298, 0.3997533105, 0.0667976697),
        *(0.0438044659, 0.0933101961),
    ),
    ("euclidean", True): (
        *(0.0402059609, 0.0649233740, 0.1790128472, 0.0134466277),
        *(0.0080225493, 0.0281120537),
    ),
    ("euclidean", False): (
        *(0.1702391377, 0.1949565507, 0.2828112602, 0.1172450408),
        *(0.0730391377, 0.0800112602),
    ),
}
N, FEATURES, DIM = 7, 5, 4


def outputs(layer, features):
    return features @ layer[:, :-1].T + layer[:, -1]


@pytest.mark.parametrize(("geometry", "cross"), GOLDEN)
def test_golden_values(geometry, cross):
    found = pair_hessian_diagonal(
        *(PAIR, outputs(LAYER, PAIR), torch.tensor([[0, 1]]), torch.ones(1).double()),
        geometry,
        cross,
    )
    ordered = torch.cat([found[:, :2].flatten(), found[:, 2]])
    np.testing.assert_allclose(ordered, GOLDEN[geometry, cross], atol=1e-9)


@pytest.fixture
def network():
    """A layer, features, pairs (one of them twice), weights of either sign."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.randn(DIM, FEATURES + 1, generator=generator, dtype=torch.float64)
    features = torch.randn(N, FEATURES, generator=generator, dtype=torch.float64)
    pairs = torch.cat([torch.triu_indices(N, N, 1).T, torch.tensor([[3, 1]])])
    weights = torch.randn(len(pairs), generator=generator, dtype=torch.float64)
    return layer, features, pairs, weights


def loss(layer, features, pairs, weights, constant=None):
    """The weighted sum; with `constant`, units that the second sum takes as they are."""
    units = F.normalize(outputs(layer, features))
    first, second = pairs.T
    if constant is None:
        return (weights * (units[first] - units[second]).square().sum(1)).sum() / 2
    return (
        weights
        * (
            (units[first] - constant[second]).square().sum(1)
            + (constant[first] - units[second]).square().sum(1)
        )
    ).sum() / 2


def diagonal(square):
    return square.reshape(DIM * (FEATURES + 1), -1).diagonal().view(DIM, FEATURES + 1)


@pytest.mark.parametrize("cross", [True, False])
def test_arccos_is_the_hessian(network, cross):
    layer, features, pairs, weights = network
    constant = None if cross else F.normalize(outputs(layer, features))
    exact = diagonal(hessian(lambda given: loss(given, features, pairs, weights, constant), layer))
    found = pair_hessian_diagonal(
        features, outputs(layer, features), pairs, weights, "arccos", cross
    )
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)
    if cross:  # a cross term of the other sign is far off
        fixed = pair_hessian_diagonal(
            features, outputs(layer, features), pairs, weights, "arccos", False
        )
        assert ((2 * fixed - found) - exact).norm() > 0.2 * exact.norm()


@pytest.mark.parametrize("cross", [True, False])
def test_euclidean_is_generalised_gauss_newton(network, cross):
    layer, features, pairs, weights = network
    first, second = pairs.T

    def units(layer):
        return F.normalize(outputs(layer, features))

    by_layer = jacobian(units, layer)  # (n, dim, dim, features + 1)
    if cross:  # of half the squared length of a difference
        squared = (by_layer[first] - by_layer[second]).square().sum(1)
    else:
        squared = by_layer[first].square().sum(1) + by_layer[second].square().sum(1)
    expected = (weights[:, None, None] * squared).sum(0)
    found = pair_hessian_diagonal(
        features, outputs(layer, features), pairs, weights, "euclidean", cross
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_products_of_features_are_made_in_blocks(network, monkeypatch):
    layer, features, pairs, weights = network
    whole = pair_hessian_diagonal(features, outputs(layer, features), pairs, weights)
    monkeypatch.setattr("rcir.losses.pair_hessians.VALUES", 4 * (FEATURES + 1))
    blocks = pair_hessian_diagonal(features, outputs(layer, features), pairs, weights)
    torch.testing.assert_close(blocks, whole)


def test_an_unknown_geometry_is_refused():
    with pytest.raises(InvalidConfig, match="euclidean, arccos"):
        pair_hessian_blocks(PAIR, PAIR, "cosine")
