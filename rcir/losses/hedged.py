"""Hedged loss: two images match with a probability that falls with the distance of their samples.

Oh, Murphy, Pan, Roth, Schroff and Gallagher, "Modeling Uncertainty with Hedged Instance Embedding",
ICLR 2019. Two points match with probability ``sigmoid(-scale |x - y| + shift)`` (eq. 2), two images
with its mean over pairs of samples (eq. 4 and 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rcir.options import require_at_least
from rcir.torch_settings import BY_DIFFERENCES


@dataclass(frozen=True)
class HedgedOptions:
    """Options of the hedged loss: `loss` in a training's configuration.

    Args:
        kl_scale: at least 0; weight of the KL divergence of each image of a pair from N(0, I).
    """

    kl_scale: float = 1e-4

    def __post_init__(self) -> None:
        require_at_least(self, "loss.", kl_scale=0)


def match_logits(
    first: Tensor, second: Tensor, scale: Tensor | float, shift: Tensor | float
) -> Tensor:
    """Return logits (..., k, l) of a match of each sample (..., k, d) and each other (..., l, d).

    Gradients are finite, also of samples at the same place.
    """
    return shift - scale * torch.cdist(first, second, compute_mode=BY_DIFFERENCES)


def soft_contrastive_loss(logits: Tensor, match: Tensor) -> Tensor:
    """Return the loss (...) of each pair of images: the mean over the logits (..., k, l).

    It is the expectation of eq. 8, an upper bound of the negative log of the mean probability; for
    points, eq. 3. `match`, (...), is True for images that match.
    """
    # log(1 + exp(-x)) of a match, log(1 + exp(x)) of none.
    signs = torch.where(match, -1, 1)[..., None, None]
    return F.softplus(signs * logits).mean(dim=(-2, -1))


def mismatch_probability(logits: Tensor) -> Tensor:
    """Return one minus the probability (...) that two images match (eq. 4 and 5).

    For two independent sets of samples of the same image it is one minus its self-similarity, its
    uncertainty (section 2.4, eq. 9).
    """
    return torch.sigmoid(-logits).mean(dim=(-2, -1))


def match_nll(logits: Tensor) -> Tensor:
    """Return the negative log (...) of the probability that two images match, at least 0.

    It keeps its digits where a match is almost certain, and where it is almost impossible.
    """
    mismatch = mismatch_probability(logits)
    log_sum = torch.logsumexp(F.logsigmoid(logits), dim=(-2, -1))
    far = math.log(logits.shape[-2] * logits.shape[-1]) - log_sum
    # The branch that is not taken must have a finite gradient, too.
    near = -torch.log1p(-mismatch.clamp(max=0.5))
    return torch.where(mismatch < 0.5, near, far)


def mixture_samples(means: Tensor, variances: Tensor, noise: Tensor) -> Tensor:
    """Return samples (..., k, d) of mixtures of c Gaussians, k / c of each, one after the other.

    The means and variances of the components are (..., c, d), and the noise (..., k, d) is standard
    normal.
    """
    repeats = noise.shape[-2] // means.shape[-2]
    centres, deviations = (
        values.repeat_interleave(repeats, dim=-2) for values in (means, variances.sqrt())
    )
    return centres + deviations * noise


def mixture_kl_to_normal(samples: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    """Estimate the KL divergence (...) of mixtures from N(0, I) in nats, by `mixture_samples`.

    It has no closed form, and the paper does not say how to compute it. The mean difference of both
    log densities is unbiased, and can be below 0 where the divergence is small.
    """
    # Both densities lack the factor of 2 pi, which they share.
    means, variances = means[..., None, :, :], variances[..., None, :, :]
    away = (samples[..., None, :] - means).square() / variances
    by_component = -(away + variances.log()).sum(-1) / 2  # (..., k, c)
    log_density = torch.logsumexp(by_component, dim=-1) - math.log(means.shape[-2])
    return (log_density + samples.square().sum(-1) / 2).mean(-1)
