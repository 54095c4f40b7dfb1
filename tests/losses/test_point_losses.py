"""Losses of point embeddings: triplet, contrastive, tuples of either, and normalised softmax."""

import math

import numpy as np
import pytest
import torch

from rcir.errors import InvalidConfig
from rcir.losses import (
    BayesianTripletOptions,
    NormSoftmaxOptions,
    PointLossOptions,
    TupleRows,
    VonMisesFisherOptions,
    contrastive_loss,
    norm_softmax_loss,
    point_tuple_loss,
    triplet_loss,
)
from rcir.losses.hedged import HedgedOptions

FORMS = ("squared-gap", "linear", "hadsell", "soft")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_triplet(a, p, n, margin, form):
    near, far = math.dist(a, p), math.dist(a, n)
    if form == "squared":
        return max(0.0, near**2 - far**2 + margin)
    if form == "unsquared":
        return max(0.0, near - far + margin)
    return math.log1p(math.exp(near - far))


@pytest.mark.parametrize("form", ["squared", "unsquared", "soft"])
@pytest.mark.parametrize("margin", [0.0, 0.1, 2.0])
def test_triplet_losses_follow_their_definition(form, margin):
    a, p, n = np.random.default_rng(0).standard_normal((3, 40, 5))
    expected = [naive_triplet(*rows, margin, form) for rows in zip(a, p, n, strict=True)]
    losses = triplet_loss(*(torch.from_numpy(x) for x in (a, p, n)), margin, form)
    np.testing.assert_allclose(losses, expected, rtol=1e-9, atol=1e-9)
    assert 0 < sum(loss == 0 for loss in expected) < 40 or form == "soft"


@pytest.mark.parametrize("form", ["squared", "unsquared", "soft"])
def test_gradient_is_finite_where_the_positive_equals_the_anchor(form):
    a, p, n = (torch.tensor(x, requires_grad=True) for x in ([0.6, 0.8], [0.6, 0.8], [0.6, 0.9]))
    triplet_loss(a, p, n, 0.5, form).backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in (a, p, n))
    assert n.grad[1] < 0  # the negative is pushed away


def test_the_gradient_of_a_wrong_triplet_pulls_the_positive_and_pushes_the_negative():
    a = torch.zeros(2)
    p = torch.tensor([3.0, 4.0], requires_grad=True)
    n = torch.tensor([0.0, 1.0], requires_grad=True)
    triplet_loss(a, p, n, 0.1, "squared").backward()
    assert p.grad.tolist() == [6.0, 8.0]
    assert n.grad.tolist() == [0.0, -2.0]


A, B = torch.tensor([[0.0, 0.0], [0.3, 0.4]], dtype=torch.float64)  # half apart


def naive_contrastive(first, second, match, margin, form):
    """The loss of one pair, as a scalar with its gradient."""
    distance = torch.dist(first, second)
    if form == "soft":
        p = torch.sigmoid(10 * (margin - distance))
        return -(p if match else 1 - p).log()
    if form == "squared-gap":
        gap = distance**2 if match else torch.clamp(margin**2 - distance**2, min=0)
        return gap / 2
    gap = distance if match else torch.clamp(margin - distance, min=0)
    return gap if form == "linear" else gap**2 / 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("match", [True, False])
def test_contrastive_losses_and_gradients_agree_with_a_naive_form(form, match):
    first, second = normal(2, 40, 3)
    first.requires_grad_()
    losses = contrastive_loss(first, second, match, 2.0, form)
    assert 10 < (losses > 0).sum() <= 40
    (gradient,) = torch.autograd.grad(losses.sum(), first)
    pairs = zip(first, second, strict=True)
    total = sum(naive_contrastive(x, y, match, 2.0, form) for x, y in pairs)
    assert losses.sum().item() == pytest.approx(total.item(), rel=1e-9)
    expected = torch.autograd.grad(total, first)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("match", [True, False])
def test_identical_embeddings_have_a_zero_gradient(form, match):
    first = torch.ones(3, requires_grad=True)
    contrastive_loss(first, torch.ones(3), match, 0.7, form).backward()
    assert (first.grad == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_contrastive_tuple_is_its_positive_pair_plus_the_mean_of_valid_negative_pairs(form):
    rows = normal(2 + 2 + 6, 4, seed=1)
    valid = torch.tensor([[True, True, False], [False, False, True]])
    name = "contrastive" if form == "squared-gap" else f"contrastive-{form}"
    losses = point_tuple_loss(TupleRows.split(rows, valid), valid, PointLossOptions(4.0, name))
    for i, loss in enumerate(losses):
        negatives = [rows[4 + 3 * i + j] for j in range(3) if valid[i, j]]
        far = [naive_contrastive(rows[i], row, False, 4.0, form).item() for row in negatives]
        near = naive_contrastive(rows[i], rows[2 + i], True, 4.0, form).item()
        assert loss.item() == pytest.approx(near + np.mean(far), rel=1e-9)


def test_a_triplet_tuple_is_the_mean_over_its_valid_negatives():
    rows = normal(4 + 4 + 12, 5)
    valid = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.bool)
    losses = point_tuple_loss(TupleRows.split(rows, valid), valid, PointLossOptions(0.4, "squared"))
    for i, loss in enumerate(losses):
        negatives = [rows[8 + 3 * i + j] for j in range(3) if valid[i, j]]
        hinges = [naive_triplet(rows[i], rows[4 + i], n, 0.4, "squared") for n in negatives]
        assert loss.item() == pytest.approx(np.mean(hinges))


def test_the_slope_of_the_soft_form_is_an_option():
    rows, valid = torch.stack([A, B, A]), torch.ones(1, 1, dtype=torch.bool)
    loss = point_tuple_loss(
        TupleRows.split(rows, valid), valid, PointLossOptions(0.5, "contrastive-soft", 4.0)
    ).item()
    assert loss == pytest.approx(np.log(2) + np.log1p(np.exp(2)), abs=1e-5)


def test_default_margins_depend_on_the_form():
    assert PointLossOptions(form="unsquared").margin == 0.1
    assert PointLossOptions(form="contrastive-linear").margin == 0.7
    assert PointLossOptions(margin=0.0, form="contrastive").margin == 0.0


def naive_softmax(x, proxies, label, temperature):
    """Minus the log of the share that the label's exponential has of all."""
    shares = [
        math.exp(np.dot(x, w) / np.linalg.norm(x) / np.linalg.norm(w) / temperature)
        for w in proxies
    ]
    return -math.log(shares[label] / sum(shares))


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_norm_softmax_is_the_cross_entropy_of_cosines(temperature):
    vectors, proxies = normal(6, 5), normal(4, 5, seed=1)
    labels = torch.tensor([0, 1, 2, 3, 3, 0])
    losses = norm_softmax_loss(vectors, proxies, labels, temperature)
    expected = [
        naive_softmax(x, proxies.numpy(), label, temperature)
        for x, label in zip(vectors.numpy(), labels.tolist(), strict=True)
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-9, atol=1e-12)


def test_norm_softmax_beyond_the_range_of_exp_is_finite_and_has_a_gradient():
    vectors = torch.tensor([[1.0, 0.0]], requires_grad=True)
    proxies = torch.tensor([[-1.0, 0.1], [1.0, 0.0]])
    loss = norm_softmax_loss(vectors, proxies, torch.tensor([0]), temperature=1e-3)
    loss.sum().backward()
    assert loss.item() == pytest.approx((1 + 1 / math.hypot(1, 0.1)) * 1e3, rel=1e-5)
    assert vectors.grad.isfinite().all()
    assert vectors.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        (PointLossOptions, {"form": "linear"}, "contrastive-linear"),
        (PointLossOptions, {"margin": -0.1}, "margin"),
        (PointLossOptions, {"margin": math.nan}, "margin"),
        (PointLossOptions, {"scale": 0.0}, "scale"),
        (BayesianTripletOptions, {"margin": -1e-9}, "margin"),
        (BayesianTripletOptions, {"kl_scale": -1e-9}, "kl_scale"),
        (BayesianTripletOptions, {"epsilon": -1e-9}, "epsilon"),
        (VonMisesFisherOptions, {"kl_scale": math.nan}, "kl_scale"),
        (HedgedOptions, {"kl_scale": -1}, "kl_scale"),
        *(
            (NormSoftmaxOptions, {"temperature": value}, "temperature")
            for value in (0, -0.1, math.inf, math.nan)
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_invalid_options_are_refused(kind, options, word):
    with pytest.raises(InvalidConfig, match=word):
        kind(**options)


def test_unknown_forms_are_refused():
    with pytest.raises(InvalidConfig, match="unsquared"):
        triplet_loss(A, A, B, form="cosine")
    with pytest.raises(InvalidConfig, match="hadsell"):
        contrastive_loss(A, B, True, 0.7, "squared")
