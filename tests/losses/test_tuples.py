import numpy as np
import pytest
import torch
from scipy.stats import norm

from rcir.embedding import Embedding
from rcir.errors import InvalidConfig
from rcir.losses import (
    BayesianTripletOptions,
    PointLossOptions,
    bayesian_tuple_loss,
    point_tuple_loss,
)

TUPLES, NEGATIVES, DIM = 4, 3, 5
VALID = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.bool)


@pytest.fixture
def embedding():
    generator = torch.Generator().manual_seed(0)
    n = TUPLES * (2 + NEGATIVES)
    mean = torch.randn(n, DIM, generator=generator, dtype=torch.float64)
    variance = 0.1 + torch.rand(n, 1, generator=generator, dtype=torch.float64)
    return Embedding(mean, variance)


def parts(rows):
    """Anchor, positive and valid negatives of each tuple, as the layout puts them."""
    rows = rows.numpy()
    for i in range(TUPLES):
        start = 2 * TUPLES + i * NEGATIVES
        negatives = [rows[start + j] for j in range(NEGATIVES) if VALID[i, j]]
        yield rows[i], rows[TUPLES + i], negatives


def test_point_embeddings_get_the_mean_triplet_loss_of_their_valid_negatives(embedding):
    losses = point_tuple_loss(embedding.vectors, VALID, PointLossOptions(0.4, "squared"))
    for loss, (a, p, negatives) in zip(losses, parts(embedding.vectors), strict=True):
        hinges = [max(0, ((a - p) ** 2).sum() - ((a - n) ** 2).sum() + 0.4) for n in negatives]
        assert loss.item() == pytest.approx(np.mean(hinges))


def test_gaussian_embeddings_get_likelihood_plus_divergence(embedding):
    def divergence(mean, variance):
        ratio = DIM * variance[0]  # to the prior's variance, 1 / DIM
        return 0.5 * (DIM * (ratio - 1 - np.log(ratio)) + DIM * (mean**2).sum())

    options = BayesianTripletOptions(0.2, kl_scale=0.01)
    losses = bayesian_tuple_loss(embedding.vectors, embedding.variance, VALID, options)
    for loss, (a, p, ns), (va, vp, vns) in zip(
        losses, parts(embedding.vectors), parts(embedding.variance), strict=True
    ):
        nlls, divergences = [], []
        for n, vn in zip(ns, vns, strict=True):
            ap, an, pn = (((x - y) ** 2).sum() for x, y in ((a, p), (a, n), (p, n)))
            mean = ap - an + DIM * (vp - vn)[0]
            spread = 2 * DIM * (vp**2 + vn**2) + 4 * DIM * va * (vp + vn)
            spread = (spread + 4 * (vp * ap + vn * an + va * pn))[0]
            nlls.append(-norm.logcdf((-0.2 - mean) / np.sqrt(spread)))
            divergences.append(divergence(n, vn))
        total = divergence(a, va) + divergence(p, vp) + np.mean(divergences)
        assert loss.item() == pytest.approx(np.mean(nlls) + 0.01 * total)


def test_invalid_negatives_get_no_gradient(embedding):
    mean = embedding.vectors.clone().requires_grad_()
    variance = embedding.variance.clone().requires_grad_()
    bayesian_tuple_loss(mean, variance, VALID, BayesianTripletOptions()).sum().backward()
    untouched = torch.cat([torch.zeros(2 * TUPLES, dtype=torch.bool), ~VALID.flatten()])
    for leaf in (mean, variance):
        assert (leaf.grad[untouched] == 0).all()
        assert (leaf.grad[~untouched].abs().sum(1) > 0).all()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PointLossOptions, {"margin": -0.1}),
        (BayesianTripletOptions, {"margin": -0.1}),
        (BayesianTripletOptions, {"kl_scale": -1e-9}),
    ],
)
def test_negative_weights_are_refused(kind, options):
    with pytest.raises(InvalidConfig, match="negative"):
        kind(**options)
