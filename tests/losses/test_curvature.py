"""Curvature of pairs, against autograd in float64."""

import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional as F

from rcir.losses.curvature import PairCurvature, pair_hessian_diagonal


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs(layer, features):
    return features @ layer[:, :-1].T + layer[:, -1]


@pytest.mark.parametrize("cross", [True, False])
def test_euclidean_is_generalised_gauss_newton(cross):
    """With weights of either sign, and one pair twice."""
    layer, features = random(4, 6), random(7, 5, seed=1)
    pairs = torch.cat([torch.triu_indices(7, 7, 1).T, torch.tensor([[3, 1]])])
    weights, (first, second) = random(len(pairs), seed=2), pairs.T
    # (n, dim, dim, features + 1)
    by_layer = jacobian(lambda given: F.normalize(outputs(given, features)), layer)
    if cross:  # of half the squared length of a difference
        squared = (by_layer[first] - by_layer[second]).square().sum(1)
    else:
        squared = by_layer[first].square().sum(1) + by_layer[second].square().sum(1)
    expected = (weights[:, None, None] * squared).sum(0)
    diagonal = pair_hessian_diagonal(
        features, outputs(layer, features), pairs, weights, geometry="euclidean", cross=cross
    )
    torch.testing.assert_close(diagonal, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("variant", ["full", "fixed", "positive"])
def test_arccos_is_the_hessian_of_the_mean_contrastive_loss(variant):
    layer, features = random(3, 5), random(24, 4, seed=1)
    labels, margin = torch.arange(24) % 3, 1.2
    pairs = torch.triu_indices(24, 24, 1).T
    match = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    left, right = pairs.T
    constant = F.normalize(outputs(layer, features))

    def loss(layer):
        """Means over all pairs of a kind; "fixed": against constants; "positive": matches only."""
        units = F.normalize(outputs(layer, features))
        if variant != "fixed":
            squared = (units[left] - units[right]).square().sum(1)
        else:
            squared = (units[left] - constant[right]).square().sum(1)
            squared = squared + (constant[left] - units[right]).square().sum(1)
        if variant == "positive":
            return squared[match].mean() / 2
        near = (constant[left] - constant[right]).square().sum(1) < margin**2
        assert 0 < (near & ~match).sum() < (~match).sum()
        return (squared[match].mean() - (squared * near)[~match].mean()) / 2

    exact = hessian(loss, layer).reshape(15, 15).diagonal().view(3, 5)
    curvature = PairCurvature("arccos", variant, margin)
    values = outputs(layer, features)
    for part in torch.arange(len(pairs)).split(100):
        curvature.add(features, values, pairs[part], match[part])
        curvature.add_unmined(values, pairs[part][~match[part]])
    torch.testing.assert_close(curvature.mean(None), exact, rtol=1e-8, atol=1e-11)
    same = curvature.mean(float(curvature.counts[1] / (~match).sum()))
    torch.testing.assert_close(same, exact, rtol=1e-8, atol=1e-11)
