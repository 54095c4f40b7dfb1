"""Losses of pairs: that two distributions match, and the curvature of a squared distance.

- Hedged instance embedding: Oh, Murphy, Pan, Roth, Schroff and Gallagher, "Modeling Uncertainty
  with Hedged Instance Embedding", ICLR 2019. Two points match with probability ``sigmoid(-scale |x
  - y| + shift)``, by the plain, unsquared distance (eq. 2); two images with the mean of that over
  pairs of samples (eq. 4 and 5). An image that is one point is one sample.
- Mutual likelihood: Shi and Jain, "Probabilistic Face Embeddings", ICCV 2019, whose sections are
  named below. Each image is an independent Gaussian with a mean (..., d) and a variance (..., 1)
  for an isotropic or (..., d) for a diagonal covariance.
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
VALUES = 1 << 24  # of a temporary tensor of pairs: their products of features are made in blocks


@dataclass(frozen=True)
class HedgedOptions:
    """Options of the hedged loss: `loss` in a training's configuration.

    Args:
        kl_scale: at least 0; weight of the KL divergence of each image of a pair from N(0, I).
    """

    kl_scale: float = 1e-4

    def __post_init__(self) -> None:
        require_not_negative("kl_scale", self.kl_scale)


def match_logits(
    first: Tensor, second: Tensor, scale: Tensor | float, shift: Tensor | float
) -> Tensor:
    """Logits of a match of every sample of one image and every sample of another.

    Args:
        first: (..., k, d) samples of images.
        second: (..., l, d), broadcast against the former.
        scale: above 0, of the distance.
        shift: the logit of two samples at the same place.

    Returns:
        (..., k, l). Gradients are finite, also of samples at the same place.
    """
    # Of differences: those of near points have no digits left in a difference of squares.
    distance = torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
    return shift - scale * distance


def soft_contrastive_loss(
    first: Tensor, second: Tensor, match: Tensor, scale: Tensor | float, shift: Tensor | float
) -> Tensor:
    """The loss of each pair: the mean of the negative log probabilities over pairs of samples.

    It is the expectation of eq. 8, a bound from above on the negative log of the mean probability;
    of points, one sample each, eq. 3.

    Args:
        first, second, scale, shift: as `match_logits` takes them.
        match: (...) bool, whether the images match.

    Returns:
        (...) losses.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([[0., 0.]]), torch.tensor([[3., 4.]])
        >>> soft_contrastive_loss(x, y, torch.tensor([True, False]), scale=0.4, shift=2.)
        tensor([0.6931, 0.6931])
    """
    logits = match_logits(first, second, scale, shift)
    # log(1 + exp(-x)) of a match, log(1 + exp(x)) of none.
    signs = torch.where(match, -1, 1)[..., None, None]
    return F.softplus(signs * logits).mean(dim=(-2, -1))


def mismatch_probability(
    first: Tensor, second: Tensor, scale: Tensor | float, shift: Tensor | float
) -> Tensor:
    """One minus the probability that two images match (eq. 4 and 5).

    Of two sets of samples of the same image, drawn independently, it is the image's uncertainty
    (section 2.4, eq. 9): one minus its self-similarity.

    Args:
        first, second, scale, shift: as `match_logits` takes them.

    Returns:
        (...) probabilities.

    Example:
        >>> import torch
        >>> certain, spread = torch.zeros(2, 1), torch.tensor([[-5.], [5.]])
        >>> one = mismatch_probability(certain, certain, scale=1., shift=2.)
        >>> other = mismatch_probability(spread, spread, scale=1., shift=2.)
        >>> round(one.item(), 4), round(other.item(), 4)
        (0.1192, 0.5594)
    """
    return torch.sigmoid(-match_logits(first, second, scale, shift)).mean(dim=(-2, -1))


def match_nll(
    first: Tensor, second: Tensor, scale: Tensor | float, shift: Tensor | float
) -> Tensor:
    """The negative log of the probability that two images match: a distance, at least 0.

    It keeps its digits where a match is almost certain, and where it is almost impossible.

    Args:
        first, second, scale, shift: as `match_logits` takes them.

    Returns:
        (...) nats.

    Example:
        >>> import torch
        >>> x, y = torch.tensor([[0.]]), torch.tensor([[300.]])
        >>> match_nll(x, y, scale=1., shift=5.)
        tensor(295.)
    """
    logits = match_logits(first, second, scale, shift)
    mismatch = torch.sigmoid(-logits).mean(dim=(-2, -1))
    log_sum = torch.logsumexp(F.logsigmoid(logits), dim=(-2, -1))
    far = math.log(logits.shape[-2] * logits.shape[-1]) - log_sum
    # The branch that is not taken must have a finite gradient, too.
    near = -torch.log1p(-mismatch.clamp(max=0.5))
    return torch.where(mismatch < 0.5, near, far)


def mixture_samples(means: Tensor, variances: Tensor, noise: Tensor) -> Tensor:
    """Samples of mixtures of Gaussians of equal weight, as many of each component (stratified).

    Args:
        means: (..., c, d) of the components.
        variances: (..., c, d), likewise; of diagonal covariances.
        noise: (..., k, d) standard normal numbers, broadcast against the mixtures; k is a multiple
            of c.

    Returns:
        (..., k, d), component by component.
    """
    each = noise.shape[-2] // means.shape[-2]
    centres, deviations = (
        values.repeat_interleave(each, dim=-2) for values in (means, variances.sqrt())
    )
    return centres + deviations * noise


def mixture_kl_to_normal(samples: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """KL divergence of mixtures of Gaussians of equal weight from N(0, I), by their samples.

    It has no closed form, and the paper does not say how it is had: here it is the mean of the
    difference of both log densities, without a bias.

    Args:
        samples: (..., k, d), as `mixture_samples` gives them.
        means, variances: (..., c, d) of the components.

    Returns:
        (...) nats; below 0 by chance where the divergence is small.

    Example:
        >>> import torch
        >>> mean, variance, z = torch.tensor([[1.]]), torch.tensor([[1.]]), torch.tensor([[1.]])
        >>> mixture_kl_to_normal(z, mean, variance)
        tensor(0.5000)
    """
    # Both densities without the factor of 2 pi, which they share.
    away = (samples[..., None, :] - means[..., None, :, :]).square() / variances[..., None, :, :]
    of_components = -(away + variances[..., None, :, :].log()).sum(-1) / 2  # (..., k, c)
    log_density = torch.logsumexp(of_components, dim=-1) - math.log(means.shape[-2])
    return (log_density + samples.square().sum(-1) / 2).mean(-1)


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


def pair_hessian_blocks(
    first: Tensor, second: Tensor, geometry: HessianGeometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonals of the blocks of the Hessian by (z_i, z_j), of each pair.

    Args:
        first, second: (p, d), z_i and z_j before they are scaled to unit length; none is 0.
        geometry: "euclidean", the scaling is a layer of the network, which is linearised
            (generalised Gauss-Newton); "arccos", it is part of the loss, and the Hessian is exact.

    Returns:
        Diagonals of the blocks (i, i), (j, j) and (i, j), each (p, d).

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
    """Diagonal of the Hessian of a weighted sum over pairs, by the weights of the last layer.

    Args:
        features: (n, f), x, what the layer is given.
        outputs: (n, d), z = W x + b, before they are scaled to unit length.
        pairs: (p, 2) int64, rows of both.
        weights: (p,) of the pairs; below 0 for pairs that are pushed apart.
        geometry: see `pair_hessian_blocks`.
        cross: also what both of a pair have to do with each other; without, each takes the other
            for constant, which leaves loss and gradient as they are ("fix" in the paper).

    Returns:
        (d, f + 1), of W, and in the last column of b. No tensor (p, d, f) is made.

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
    own, others, crossed = (
        block * weights[:, None]
        for block in pair_hessian_blocks(outputs[left], outputs[right], geometry)
    )
    extended = F.pad(features, (0, 1), value=1.0)  # the bias is the weight of a constant feature
    of_images = outputs.new_zeros(outputs.shape)
    of_images.index_add_(0, left, own).index_add_(0, right, others)
    total = of_images.T @ extended.square()
    if cross:
        block = max(1, VALUES // extended.shape[1])
        for i, j, each in zip(
            left.split(block), right.split(block), crossed.split(block), strict=True
        ):
            total += 2 * each.T @ (extended[i] * extended[j])
    return total
