"""Heteroscedastic triplet loss, against its definition and what it should learn."""

import math

import numpy as np
import pytest
import torch

from rcir.losses import (
    TupleRows,
    bounded_log_variance,
    heteroscedastic_tuple_loss,
    triplet_loss,
)


def triplets(n, dim=4, seed=0):
    """Vectors and log variances of n tuples of one negative each, by role."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(3, n, 1, dim, generator=generator, dtype=torch.float64)
    return vectors, torch.randn(3, n, 1, 1, generator=generator, dtype=torch.float64)


def losses_of(vectors, s):
    variances = TupleRows(*(each.exp() for each in s))
    n = max(len(each) for each in (*vectors, *s))
    valid = torch.ones(n, 1, dtype=torch.bool)
    return heteroscedastic_tuple_loss(TupleRows(*vectors), variances, valid)


def naive(a, p, n, variances):
    soft = math.log(1 + math.exp(math.dist(a, p) - math.dist(a, n)))
    return sum(0.5 * soft / v + 0.5 * math.log(v) for v in variances)


def learned(sign):
    """Variances (anchor, positive, negative) that are trained against 50 triplets of one anchor,
    with `sign` before the logarithm.
    """
    vectors, _ = triplets(50, seed=2)
    vectors[0] = vectors[0, :1]
    s = [torch.zeros(n, 1, 1, dtype=torch.float64, requires_grad=True) for n in (1, 50, 50)]
    optimizer = torch.optim.Adam(s, lr=0.1)
    for _ in range(300):
        loss = losses_of(vectors, s) + (sign - 1) * sum(s).flatten() / 2
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    soft = triplet_loss(*vectors, form="soft").flatten()
    return [each.detach().exp().flatten() for each in s], soft


def test_the_variance_of_an_image_becomes_its_expected_loss():
    (anchor, positive, negative), soft = learned(1)
    assert soft.std() > 0.3
    assert anchor.item() == pytest.approx(soft.mean().item(), rel=1e-4)
    torch.testing.assert_close(positive, soft, rtol=1e-3, atol=0)
    torch.testing.assert_close(negative, soft, rtol=1e-3, atol=0)


def test_with_the_sign_printed_in_the_paper_variances_diverge():
    (anchor, positive, _), soft = learned(-1)
    assert anchor.item() > 1e6 * soft.mean().item()
    assert (positive > 1e6 * soft).all()


def test_a_tuple_is_the_mean_of_its_triplets():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2 + 2 + 6, 3, generator=generator, dtype=torch.float64)
    variance = torch.rand(10, 1, generator=generator, dtype=torch.float64) + 0.1
    valid = torch.tensor([[True, False, True], [False, True, False]])
    by_role = (TupleRows.split(each, valid) for each in (rows, variance))
    found = heteroscedastic_tuple_loss(*by_role, valid)
    for row, columns in enumerate(([0, 2], [1])):
        chosen = [[row, 2 + row, 4 + 3 * row + column] for column in columns]
        expected = np.mean([naive(*rows[r].tolist(), variance[r, 0].tolist()) for r in chosen])
        assert found[row].item() == pytest.approx(expected, abs=1e-6)


def test_log_variances_are_bounded_and_keep_a_gradient_beyond():
    values = torch.tensor([-1e6, -20.0, -0.1, 0.0, 0.1, 20.0, 1e6], dtype=torch.float64)
    values.requires_grad_()
    bounded = bounded_log_variance(values)
    assert bounded.abs().max().item() == pytest.approx(10, rel=1e-4)
    assert bounded.abs().max() <= 10
    assert (bounded.diff() > 0).all()
    np.testing.assert_allclose(bounded[2:5].detach(), values[2:5].detach(), rtol=1e-4)
    bounded.sum().backward()
    assert (values.grad[1:6] > 0.05).all()
    vectors, _ = triplets(7)
    single = values.detach().float().requires_grad_()
    s = bounded_log_variance(single[:, None, None])
    s.sum().backward()
    assert (single.grad > 0).all()
    assert torch.isfinite(losses_of(vectors.float(), (s, s, s))).all()
