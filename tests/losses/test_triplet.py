import math

import numpy as np
import pytest
import torch

from rcir.errors import InvalidConfig
from rcir.losses import triplet_loss


def naive(a, p, n, margin, form):
    near, far = math.dist(a, p), math.dist(a, n)
    if form == "squared":
        return max(0.0, near**2 - far**2 + margin)
    if form == "unsquared":
        return max(0.0, near - far + margin)
    return math.log1p(math.exp(near - far))


@pytest.mark.parametrize("form", ["squared", "unsquared", "soft"])
@pytest.mark.parametrize("margin", [0.0, 0.1, 2.0])
def test_every_form_follows_its_definition(form, margin):
    a, p, n = np.random.default_rng(0).standard_normal((3, 40, 5))
    expected = [naive(*rows, margin, form) for rows in zip(a, p, n, strict=True)]
    losses = triplet_loss(*(torch.from_numpy(x) for x in (a, p, n)), margin, form)
    np.testing.assert_allclose(losses, expected, rtol=1e-9, atol=1e-9)
    assert 0 < sum(loss == 0 for loss in expected) < 40 or form == "soft"


def test_several_negatives_share_an_anchor_by_broadcasting():
    a, p = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    negatives = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    assert triplet_loss(a, p, negatives, 0.5).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("form", ["squared", "unsquared", "soft"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_is_finite_where_the_positive_equals_the_anchor(form, dtype):
    a = torch.tensor([0.6, 0.8], dtype=dtype, requires_grad=True)
    p = a.detach().clone().requires_grad_()
    n = torch.tensor([0.6, 0.9], dtype=dtype, requires_grad=True)
    triplet_loss(a, p, n, 0.5, form).backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in (a, p, n))
    assert n.grad[1] < 0  # the negative is pushed away


def test_the_gradient_of_a_wrong_triplet_draws_the_positive_and_pushes_the_negative():
    a = torch.zeros(2)
    p = torch.tensor([3.0, 4.0], requires_grad=True)
    n = torch.tensor([0.0, 1.0], requires_grad=True)
    triplet_loss(a, p, n, 0.1, "squared").backward()
    assert p.grad.tolist() == [6.0, 8.0]
    assert n.grad.tolist() == [0.0, -2.0]


def test_an_unknown_form_is_refused_with_the_choices():
    with pytest.raises(InvalidConfig, match="choose one of squared, unsquared, soft"):
        triplet_loss(torch.zeros(2), torch.zeros(2), torch.ones(2), form="cosine")
