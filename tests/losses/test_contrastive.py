import numpy as np
import pytest
import torch

from rcir.errors import InvalidConfig
from rcir.losses import PointLossOptions, contrastive_loss, point_tuple_loss

FORMS = ("squared-gap", "linear", "hadsell", "soft")
A, B = torch.tensor([[0.0, 0.0], [0.3, 0.4]], dtype=torch.float64)  # half apart

# By hand, of a margin of 0.7; the soft ones are -log sigmoid(10 (.7 - .5)) and the other way round.
GOLDEN = {
    "squared-gap": (0.125, 0.12),
    "linear": (0.5, 0.2),
    "hadsell": (0.125, 0.02),
    "soft": (np.log1p(np.exp(-2)), np.log1p(np.exp(2))),
}


@pytest.mark.parametrize("form", FORMS)
def test_pairs_half_apart(form):
    near, far = (contrastive_loss(A, B, match, 0.7, form).item() for match in (True, False))
    assert (near, far) == pytest.approx(GOLDEN[form], abs=1e-9)
    assert (contrastive_loss(A, B, False, 0.4, form) == 0) == (form != "soft")


def naive(first, second, match, margin, form):
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
def test_gradients_are_those_of_a_naive_form(form, match):
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 40, 3, generator=generator, dtype=torch.float64)
    first.requires_grad_()
    losses = contrastive_loss(first, second, match, 2.0, form)
    assert 10 < (losses > 0).sum() <= 40
    (found,) = torch.autograd.grad(losses.sum(), first)
    total = sum(naive(x, y, match, 2.0, form) for x, y in zip(first, second, strict=True))
    assert losses.sum().item() == pytest.approx(total.item(), rel=1e-9)
    torch.testing.assert_close(found, torch.autograd.grad(total, first)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("match", [True, False])
def test_images_with_one_embedding_have_a_finite_gradient(form, match):
    first = torch.ones(3, requires_grad=True)
    contrastive_loss(first, torch.ones(3), match, 0.7, form).backward()
    assert (first.grad == 0).all()


def test_unknown_forms_are_refused():
    with pytest.raises(InvalidConfig, match="squared-gap, linear, hadsell, soft"):
        contrastive_loss(A, B, True, 0.7, "squared")
    with pytest.raises(InvalidConfig, match="contrastive-linear"):
        PointLossOptions(form="linear")


@pytest.mark.parametrize("form", FORMS)
def test_a_tuple_is_its_positive_pair_and_the_mean_of_its_valid_negative_pairs(form):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2 + 2 + 6, 4, generator=generator, dtype=torch.float64)
    valid = torch.tensor([[True, True, False], [False, False, True]])
    named = "contrastive" if form == "squared-gap" else f"contrastive-{form}"
    losses = point_tuple_loss(rows, valid, PointLossOptions(4.0, named))
    for i, loss in enumerate(losses):
        far = [
            naive(rows[i], rows[4 + 3 * i + j], False, 4.0, form).item()
            for j in range(3)
            if valid[i, j]
        ]
        near = naive(rows[i], rows[2 + i], True, 4.0, form).item()
        assert loss.item() == pytest.approx(near + np.mean(far), rel=1e-9)


def test_the_slope_of_the_soft_form_is_an_option():
    rows = torch.stack([A, B, A])
    valid = torch.ones(1, 1, dtype=torch.bool)
    loss = point_tuple_loss(rows, valid, PointLossOptions(0.5, "contrastive-soft", 4.0)).item()
    assert loss == pytest.approx(np.log(2) + np.log1p(np.exp(2)), abs=1e-5)
    with pytest.raises(InvalidConfig, match="scale is 0"):
        PointLossOptions(scale=0.0)


def test_each_form_has_a_margin_of_its_own():
    assert PointLossOptions(form="unsquared").margin == 0.1
    assert PointLossOptions(form="contrastive-linear").margin == 0.7
    assert PointLossOptions(margin=0.0, form="contrastive").margin == 0.0
