"""Mutual likelihood of Gaussians: Shi and Jain, "Probabilistic Face Embeddings", ICCV 2019.

Each image is a Gaussian with a mean (..., d) and an isotropic (..., 1) or diagonal (..., d)
variance. Docstrings quote sections of the paper.
"""

from __future__ import annotations

import math

from torch import Tensor


def mutual_likelihood_score(
    mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor
) -> Tensor:
    """Return the log-likelihood (...) that two Gaussians share a latent vector ("Matching").

    It is ``-1/2 sum_d [(m1 - m2)^2 / (v1 + v2) + log(v1 + v2)] - d/2 log(2 pi)``, the log density
    of the difference of the means under the sum of the variances, in nats. It can be above 0.
    """
    total = variance + other_variance
    # An isotropic variance counts d times.
    terms = (mean - other_mean).square() / total + total.log()
    return -0.5 * (terms + math.log(2 * math.pi)).sum(-1)


def mutual_likelihood_loss(mean: Tensor, variance: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean negative score of matching rows, pairs (2, p) ("Learning"), a scalar."""
    first, second = pairs
    return -mutual_likelihood_score(
        mean[first], variance[first], mean[second], variance[second]
    ).mean()


def fuse_gaussians(
    mean: Tensor, variance: Tensor, group: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """Return the normalised products of the Gaussians of each group ("Fusion").

    ``1 / v = sum_i 1 / v_i`` and ``m = v sum_i m_i / v_i``, for independent observations of one
    object, in float64. Smaller variances than 1e-20 count as that. `group` is (n,) int64 in
    [0, groups), each at least once. Means (groups, d) are not of unit length.
    """
    precision = 1 / variance.double().clamp(min=1e-20)

    def add(values: Tensor) -> Tensor:
        return values.new_zeros(groups, values.shape[1]).index_add(0, group, values)

    fused = 1 / add(precision)
    centre = fused * add(precision * mean.double())
    return centre.to(mean.dtype), fused.to(variance.dtype)
