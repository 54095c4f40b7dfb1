"""Losses of pairs of distributions, and the curvature of a squared distance.

- Hedged instance embedding: Oh, Murphy, Pan, Roth, Schroff and Gallagher, "Modeling Uncertainty
  with Hedged Instance Embedding", ICLR 2019. Two points match with probability ``sigmoid(-scale |x
  - y| + shift)`` (eq. 2), two images with its mean over pairs of samples (eq. 4 and 5).
- Mutual likelihood: Shi and Jain, "Probabilistic Face Embeddings", ICCV 2019, whose sections are
  quoted below. Each image is a Gaussian with a mean (..., d) and an isotropic (..., 1) or diagonal
  (..., d) variance.
- Second derivatives: Warburg, Miani, Brack and Hauberg, "Bayesian metric learning for uncertainty
  quantification in image retrieval", 2023, arXiv 2302.01332, appendix. The function is ``|u_i -
  u_j|^2 / 2`` of the unit vectors ``u = z / |z|`` of ``z = W x + b``; the contrastive loss of form
  "squared-gap" is plus or minus it, wherever it has a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rcir.losses.tuples import require_not_negative
from rcir.options import require_choice

HessianGeometry = Literal["euclidean", "arccos"]
BLOCK_NUMBERS = 1 << 24  # numbers in the products of features of a block of pairs


@dataclass(frozen=True)
class HedgedOptions:
    """Options of the hedged loss: `loss` in a training's configuration.

    Args:
        kl_scale: at least 0; weight of the KL divergence of each image of a pair from N(0, I).
    """

    kl_scale: float = 1e-4

    def __post_init__(self) -> None:
        require_not_negative(self, "kl_scale")


def match_logits(
    first: Tensor, second: Tensor, scale: Tensor | float, shift: Tensor | float
) -> Tensor:
    """Return logits of a match of every sample of one image and every sample of another.

    Args:
        first: (..., k, d) samples of images.
        second: (..., l, d), broadcast against `first`.
        scale: above 0, of the distance.
        shift: the logit of two samples at the same place.

    Returns:
        (..., k, l). Gradients are finite, also of samples at the same place.
    """
    # Of differences: products of nearby points would lose all digits.
    distance = torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
    return shift - scale * distance


def soft_contrastive_loss(logits: Tensor, match: Tensor) -> Tensor:
    """Return the loss of each pair of images, (...): the mean over pairs of samples.

    It is the expectation of eq. 8, an upper bound of the negative log of the mean probability; for
    points, eq. 3.

    Args:
        logits: (..., k, l), see `match_logits`.
        match: (...) bool, whether the images match.

    Example:
        >>> import torch
        >>> soft_contrastive_loss(torch.zeros(2, 1, 1), torch.tensor([True, False]))
        tensor([0.6931, 0.6931])
    """
    # log(1 + exp(-x)) of a match, log(1 + exp(x)) of none.
    signs = torch.where(match, -1, 1)[..., None, None]
    return F.softplus(signs * logits).mean(dim=(-2, -1))


def mismatch_probability(logits: Tensor) -> Tensor:
    """Return one minus the probability (...) that two images match (eq. 4 and 5).

    For two independent sets of samples of the same image it is one minus its self-similarity, its
    uncertainty (section 2.4, eq. 9).

    Args:
        logits: (..., k, l), see `match_logits`.

    Example:
        >>> import torch
        >>> certain, spread = torch.zeros(2, 1), torch.tensor([[-5.], [5.]])
        >>> logits = match_logits(torch.stack([certain, spread]), spread, scale=1., shift=2.)
        >>> mismatch_probability(logits)
        tensor([0.9526, 0.5594])
    """
    return torch.sigmoid(-logits).mean(dim=(-2, -1))


def match_nll(logits: Tensor) -> Tensor:
    """Return the negative log (...) of the probability that two images match, at least 0.

    It keeps its digits where a match is almost certain, and where it is almost impossible.

    Args:
        logits: (..., k, l), see `match_logits`.

    Example:
        >>> import torch
        >>> match_nll(torch.tensor([[-295.]]))
        tensor(295.)
    """
    mismatch = mismatch_probability(logits)
    log_sum = torch.logsumexp(F.logsigmoid(logits), dim=(-2, -1))
    far = math.log(logits.shape[-2] * logits.shape[-1]) - log_sum
    # The branch that is not taken must have a finite gradient, too.
    near = -torch.log1p(-mismatch.clamp(max=0.5))
    return torch.where(mismatch < 0.5, near, far)


def mixture_samples(means: Tensor, variances: Tensor, noise: Tensor) -> Tensor:
    """Return samples of mixtures of Gaussians, equally many of each component.

    Args:
        means, variances: (..., c, d) of the components, which have equal weights.
        noise: (..., k, d) standard normal numbers, broadcast against the mixtures; k is a multiple
            of c.

    Returns:
        (..., k, d), component by component.
    """
    repeats = noise.shape[-2] // means.shape[-2]
    centres, deviations = (
        values.repeat_interleave(repeats, dim=-2) for values in (means, variances.sqrt())
    )
    return centres + deviations * noise


def mixture_kl_to_normal(samples: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """Estimate the KL divergence of mixtures of Gaussians from N(0, I) by their samples.

    It has no closed form, and the paper does not say how to compute it. The mean difference of both
    log densities is unbiased.

    Args:
        samples: (..., k, d), see `mixture_samples`.
        means, variances: (..., c, d) of the components, which have equal weights.

    Returns:
        (...) nats; below 0 by chance where the divergence is small.

    Example:
        >>> import torch
        >>> mean, variance, z = torch.tensor([[1.]]), torch.tensor([[1.]]), torch.tensor([[1.]])
        >>> mixture_kl_to_normal(z, mean, variance)
        tensor(0.5000)
    """
    # Both densities lack the factor of 2 pi, which they share.
    means, variances = means[..., None, :, :], variances[..., None, :, :]
    away = (samples[..., None, :] - means).square() / variances
    by_component = -(away + variances.log()).sum(-1) / 2  # (..., k, c)
    log_density = torch.logsumexp(by_component, dim=-1) - math.log(means.shape[-2])
    return (log_density + samples.square().sum(-1) / 2).mean(-1)


def mutual_likelihood_score(
    mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor
) -> Tensor:
    """Return the log-likelihood that two Gaussians share a latent vector ("Matching with PFEs").

    It is ``-1/2 sum_d [(m1 - m2)^2 / (v1 + v2) + log(v1 + v2)] - d/2 log(2 pi)``, the log density
    of the difference of the means under the sum of the variances.

    Args:
        mean, other_mean: (..., d), broadcast against each other.
        variance, other_variance: (..., 1) or (..., d); the sum of the two is above 0.

    Returns:
        (...) scores in nats, larger is more similar; log densities, which can be above 0.

    Example:
        >>> import torch
        >>> mean, other = torch.tensor([1.0, 0.0]), torch.tensor([0.8, 0.6])
        >>> mutual_likelihood_score(mean, torch.tensor([0.1]), other, torch.tensor([0.2]))
        tensor(-1.3006)
    """
    total = variance + other_variance
    # An isotropic variance counts d times.
    terms = (mean - other_mean).square() / total + total.log()
    return -0.5 * (terms + math.log(2 * math.pi)).sum(-1)


def mutual_likelihood_loss(mean: Tensor, variance: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean negative score of matching pairs ("Learning"), a scalar in nats.

    Args:
        mean: (m, d), of a batch.
        variance: (m, 1) or (m, d), above 0.
        pairs: (2, p) rows of images that match, at least one pair.
    """
    first, second = pairs
    return -mutual_likelihood_score(
        mean[first], variance[first], mean[second], variance[second]
    ).mean()


def fuse_gaussians(
    mean: Tensor, variance: Tensor, group: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """Return the normalised products of the Gaussians of each group ("Fusion").

    ``1 / v = sum_i 1 / v_i`` and ``m = v sum_i m_i / v_i``, for independent observations of one
    object. Computed in float64.

    Args:
        mean: (n, d).
        variance: (n, 1) or (n, d), at least 0; smaller ones than 1e-20 count as that.
        group: (n,) int64 in [0, groups), each at least once.
        groups: number of groups.

    Returns:
        Means (groups, d), not of unit length, and variances (groups, 1) or (groups, d).

    Example:
        >>> import torch
        >>> mean, variance = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.1], [0.3]])
        >>> fuse_gaussians(mean, variance, torch.tensor([0, 0]), groups=1)
        (tensor([[0.7500, 0.2500]]), tensor([[0.0750]]))
    """
    precision = 1 / variance.double().clamp(min=1e-20)

    def add(values: Tensor) -> Tensor:
        return values.new_zeros(groups, values.shape[1]).index_add(0, group, values)

    fused = 1 / add(precision)
    centre = fused * add(precision * mean.double())
    return centre.to(mean.dtype), fused.to(variance.dtype)


def pair_hessian_blocks(
    first: Tensor, second: Tensor, geometry: HessianGeometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Return diagonals (p, d) of the blocks (i, i), (j, j) and (i, j) of the Hessian of each pair.

    Args:
        first, second: (p, d), z_i and z_j before they are scaled to unit length; none is 0.
        geometry: "euclidean", the scaling is a layer of the network, which is linearised
            (generalised Gauss-Newton); "arccos", it is part of the loss, and the Hessian is exact.

    Raises:
        InvalidConfig: there is no such geometry.
    """
    require_choice("Hessian", geometry, HessianGeometry)
    n1, n2 = first.norm(dim=1, keepdim=True), second.norm(dim=1, keepdim=True)
    u1, u2 = first / n1, second / n2
    product = u1 * u2
    cosine = product.sum(1, keepdim=True)
    cross = (u1.square() + u2.square() - cosine * product - 1) / (n1 * n2)
    if geometry == "euclidean":
        return (1 - u1.square()) / n1.square(), (1 - u2.square()) / n2.square(), cross
    shared = cosine + 2 * product
    return (
        (shared - 3 * cosine * u1.square()) / n1.square(),
        (shared - 3 * cosine * u2.square()) / n2.square(),
        cross,
    )


def pair_hessian_diagonal(
    features: Tensor,
    outputs: Tensor,
    pairs: Tensor,
    weights: Tensor,
    geometry: HessianGeometry = "euclidean",
    cross: bool = True,
) -> Tensor:
    """Return the diagonal of the Hessian of a weighted sum over pairs, by the last layer's weights.

    Args:
        features: (n, f), inputs x of the layer.
        outputs: (n, d), z = W x + b, before they are scaled to unit length.
        pairs: (p, 2) int64, rows of both.
        weights: (p,) of the pairs; below 0 for pairs that are pushed apart.
        geometry: see `pair_hessian_blocks`.
        cross: include mixed derivatives. Without them, each image of a pair is constant for the
            other, which does not change loss and gradient ("fix" in the paper).

    Returns:
        (d, f + 1), of W, and in the last column of b.

    Example:
        >>> import torch
        >>> layer = torch.tensor([[1., .5, .1], [0., 2., -.2]])  # W, and b
        >>> x = torch.tensor([[1., 2.], [2., 1.]])
        >>> z = x @ layer[:, :2].T + layer[:, 2]
        >>> pair_hessian_diagonal(x, z, torch.tensor([[0, 1]]), torch.ones(1))
        tensor([[0.0402, 0.0649, 0.0080],
                [0.1790, 0.0134, 0.0281]])
    """
    left, right = pairs.T
    lefts, rights, crossed = (
        block * weights[:, None]
        for block in pair_hessian_blocks(outputs[left], outputs[right], geometry)
    )
    extended = F.pad(features, (0, 1), value=1.0)  # the bias is the weight of a constant feature
    by_image = outputs.new_zeros(outputs.shape)
    by_image.index_add_(0, left, lefts).index_add_(0, right, rights)
    total = by_image.T @ extended.square()
    if cross:
        block = max(1, BLOCK_NUMBERS // extended.shape[1])  # no tensor (p, d, f) is made
        for i, j, mixed in zip(*(x.split(block) for x in (left, right, crossed)), strict=True):
            total += 2 * mixed.T @ (extended[i] * extended[j])
    return total
