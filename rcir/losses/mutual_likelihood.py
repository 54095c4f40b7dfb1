"""Mutual likelihood: how probable it is that two Gaussians embed the same thing.

Shi and Jain, "Probabilistic Face Embeddings", ICCV 2019, whose
sections are named below. Each image is an independent Gaussian with
a mean (..., d) and a variance (..., 1) for an isotropic or (..., d) for a diagonal covariance.
"""

from __future__ import annotations

import math

from torch import Tensor


def mutual_likelihood_score(
    mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor
) -> Tensor:
    """Log-likelihood that two Gaussians have the same latent vector ("Matching with PFEs").

    The logarithm of the integral over z of ``N(z; mean, variance) N(z; other_mean,
    other_variance)``, which is the density of the difference of the means under the sum of the
    variances: ``-1/2 sum_d [(m1 - m2)^2 / (v1 + v2) + log(v1 + v2)] - d/2 log(2 pi)``.

    Args:
        mean, other_mean: (..., d), broadcast against each other.
        variance, other_variance: (..., 1) or (..., d); the sum of the two is above 0.

    Returns:
        (...) scores in nats, larger is more alike; a density, so they can be above 0.

    Example:
        >>> import torch
        >>> mean, other = torch.tensor([1.0, 0.0]), torch.tensor([0.8, 0.6])
        >>> mutual_likelihood_score(mean, torch.tensor([0.1]), other, torch.tensor([0.2]))
        tensor(-1.3006)
    """
    total = variance + other_variance
    terms = (mean - other_mean).square() / total + total.log()  # of isotropic ones d times the log
    return -0.5 * (terms + math.log(2 * math.pi)).sum(-1)


def mutual_likelihood_loss(mean: Tensor, variance: Tensor, pairs: Tensor) -> Tensor:
    """The mean negative score of genuine pairs ("Learning"); other pairs have no part.

    Args:
        mean: (m, d), of a batch.
        variance: (m, 1) or (m, d), above 0.
        pairs: (2, p) rows of images that match, at least one pair.

    Returns:
        The loss, a scalar in nats; it has no lower bound but that of the variances.

    Example:
        >>> import torch
        >>> mean = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> variance = torch.tensor([[0.1], [0.2], [0.3]])
        >>> mutual_likelihood_loss(mean, variance, torch.tensor([[0, 1], [1, 0]]))
        tensor(1.3006)
    """
    first, second = pairs
    return -mutual_likelihood_score(
        mean[first], variance[first], mean[second], variance[second]
    ).mean()


def fuse_gaussians(
    mean: Tensor, variance: Tensor, group: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """The Gaussians proportional to the products of several, group by group ("Fusion").

    ``1 / v = sum_i 1 / v_i`` and ``m = v sum_i m_i / v_i``: what is known of one thing of which
    there are several independent observations. Computed in float64.

    Args:
        mean: (n, d).
        variance: (n, 1) or (n, d), larger than or equal to 0. One below 1e-20 counts as that.
        group: (n,) int64 in [0, groups), each at least once.
        groups: number of groups.

    Returns:
        Means (groups, d), not of unit length, and variances (groups, 1) or (groups, d), of the
        types that were given.

    Example:
        >>> import torch
        >>> mean, variance = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.1], [0.3]])
        >>> fuse_gaussians(mean, variance, torch.tensor([0, 0]), groups=1)
        (tensor([[0.7500, 0.2500]]), tensor([[0.0750]]))
    """
    precision = 1 / variance.double().clamp(min=1e-20)

    def summed(values: Tensor) -> Tensor:
        return values.new_zeros(groups, values.shape[1]).index_add(0, group, values)

    fused = 1 / summed(precision)
    centre = fused * summed(precision * mean.double())
    return centre.to(mean.dtype), fused.to(variance.dtype)
