"""Hedged instance embedding: the probability that two images match, where each is a distribution.

Oh, Murphy, Pan, Roth, Schroff and Gallagher, "Modeling Uncertainty with Hedged Instance
Embedding", ICLR 2019. Two points match with probability ``sigmoid(-scale |x - y| + shift)``, by the
plain, unsquared distance (eq. 2); two images with the mean of that over pairs of samples (eq. 4 and
5). An image that is one point is one sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rcir.losses.tuples import require_not_negative


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
