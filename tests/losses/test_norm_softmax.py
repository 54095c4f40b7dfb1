import math

import numpy as np
import pytest
import torch

from rcir.errors import InvalidConfig
from rcir.losses import NormSoftmaxOptions, norm_softmax_loss

VECTORS, LABELS, DIM = 6, 4, 5


def drawn(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, DIM, generator=generator, dtype=torch.float64)


def naive(x, proxies, label, temperature):
    """Minus the log of the share that the label's own exponential has of all."""
    shares = [
        math.exp(np.dot(x, w) / np.linalg.norm(x) / np.linalg.norm(w) / temperature)
        for w in proxies
    ]
    return -math.log(shares[label] / sum(shares))


@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
def test_it_is_the_cross_entropy_of_the_cosines(temperature):
    vectors, proxies = drawn(VECTORS, 0), drawn(LABELS, 1)
    labels = torch.tensor([0, 1, 2, 3, 3, 0])
    losses = norm_softmax_loss(vectors, proxies, labels, temperature)
    expected = [
        naive(x, proxies.numpy(), label, temperature)
        for x, label in zip(vectors.numpy(), labels.tolist(), strict=True)
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_lengths_do_not_matter():
    vectors, proxies, labels = drawn(3, 0), drawn(LABELS, 1), torch.tensor([0, 1, 2])
    torch.testing.assert_close(
        norm_softmax_loss(3 * vectors, proxies / 7, labels),
        norm_softmax_loss(vectors, proxies, labels),
    )


def test_gradients_are_those_of_finite_differences():
    vectors, proxies = drawn(3, 0).requires_grad_(), drawn(LABELS, 1).requires_grad_()
    labels = torch.tensor([2, 0, 2])
    assert torch.autograd.gradcheck(
        lambda x, w: norm_softmax_loss(x, w, labels, 0.3), (vectors, proxies)
    )


def test_proxies_that_are_alike_give_the_log_of_their_number():
    losses = norm_softmax_loss(drawn(2, 0), torch.ones(7, DIM).double(), torch.tensor([0, 6]))
    assert losses.tolist() == pytest.approx([math.log(7)] * 2)


def test_a_loss_far_beyond_the_range_of_exp_is_finite_and_has_a_gradient():
    vectors = torch.tensor([[1.0, 0.0]], requires_grad=True)
    proxies = torch.tensor([[-1.0, 0.1], [1.0, 0.0]])
    loss = norm_softmax_loss(vectors, proxies, torch.tensor([0]), temperature=1e-3)
    loss.sum().backward()
    assert loss.item() == pytest.approx((1 + 1 / math.hypot(1, 0.1)) * 1e3, rel=1e-5)
    assert vectors.grad.isfinite().all()
    assert vectors.grad.abs().max() > 0


@pytest.mark.parametrize("temperature", [0, -0.1, math.inf, math.nan])
def test_temperatures_that_are_none_are_refused(temperature):
    with pytest.raises(InvalidConfig, match=r"loss\.temperature is .* above 0"):
        NormSoftmaxOptions(temperature)
