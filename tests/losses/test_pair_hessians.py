"""Closed forms of Hessians of pairs, against autograd in float64."""

import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F

from rcir.errors import InvalidConfig
from rcir.losses.pairs import pair_hessian_blocks, pair_hessian_diagonal

N, FEATURES, DIM = 7, 5, 4


def outputs(layer, features):
    return features @ layer[:, :-1].T + layer[:, -1]


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
    outcome = outputs(layer, features)
    found = pair_hessian_diagonal(features, outcome, pairs, weights, "arccos", cross)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-11)


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


def test_an_unknown_geometry_is_refused():
    with pytest.raises(InvalidConfig, match="cosine"):
        pair_hessian_blocks(torch.ones(1, 2), torch.ones(1, 2), "cosine")
