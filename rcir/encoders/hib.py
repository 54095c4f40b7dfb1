"""Hedged instance embedding: distributions that match by chance (Oh et al., ICLR 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import EmbeddedTuples, Encoder, EncoderConfig, require_variance
from rcir.encoders.features import MeanHead, build_features, floored_softplus
from rcir.errors import InvalidConfig
from rcir.losses import kl_to_prior, mean_of_valid
from rcir.losses.hedged import (
    HedgedOptions,
    match_logits,
    match_nll,
    mismatch_probability,
    mixture_kl_to_normal,
    mixture_samples,
    soft_contrastive_loss,
)
from rcir.options import require_at_least

INITIAL_DEVIATION = 0.1  # of every Gaussian, in each dimension
PROPOSALS = 64  # for the noise in one dimension
BLOCK_NUMBERS = 1 << 22  # numbers of samples, and of their pairs, in memory at a time


@dataclass(frozen=True)
class HedgedInstanceOptions:
    """Options of hedged instance embedding.

    Args:
        components: number of Gaussians in the mixture of an image: 1, the paper's "MoG-1"; 2,
            "MoG-2", or more; 0, a point, the paper's baseline, without an uncertainty.
        samples: of each image, in training and at test time; a multiple of `components`.
        distance: "match" re-ranks the candidates by the negative log of the probability that they
            match; "mean" ranks by the distance of means. Points are ranked by their distance.
    """

    components: int = 1
    samples: int = 8
    distance: Literal["match", "mean"] = "match"

    def __post_init__(self) -> None:
        require_at_least(self, "encoder.options.", components=0, samples=1)
        if self.components and self.samples % self.components:
            raise InvalidConfig(
                f"encoder.options.samples is {self.samples}; it must be a multiple of components, "
                f"{self.components}"
            )


class HedgedInstance(Encoder):
    """An image as a Gaussian with a diagonal covariance, or as a mixture of several.

    Trained on pairs: the probability that samples of two images match falls with their distance,
    by a learned scale and shift. With c components of equal weight,

    - `Embedding.vectors` (n, d) are the means of the mixtures, of any length;
    - `variance` (n, d) are their variances;
    - `uncertainty` (n,) is one minus the probability that the image matches itself, by two sets of
      samples;
    - `extra`, for c > 1, has `component_means` and `component_variances` (n, c, d).

    At test time samples use noise that is drawn once, the same for every image: one set for
    queries, an independent one for gallery items. So an embedding does not depend on its batch. The
    noise has mean 0 and, in every dimension, the same values in another order, so that a variance
    counts alike in each. (For an odd number of samples only second moments are equal.) The best
    match of an uncertain image may be a more certain one nearby instead of itself.
    """

    Options = HedgedInstanceOptions
    LossOptions = HedgedOptions
    revision = 1  # noise with unit second moments, and a floor of its variances
    mining = ("random", "top-random")
    noise: Tensor  # (2, samples, dim), unless images are points

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        components, samples = self.options.components, self.options.samples
        self.mean_head = MeanHead(pool, shape, max(1, components) * config.dim)
        self.scale_parameter = nn.Parameter(torch.tensor(math.log(math.expm1(1.0))))
        self.shift = nn.Parameter(torch.tensor(1.0))
        if components:
            self.variance_head = MeanHead(pool, shape, components * config.dim)
            last: Any = self.variance_head[-1]
            nn.init.zeros_(last.weight)
            nn.init.constant_(last.bias, math.log(math.expm1(INITIAL_DEVIATION)))
            self.register_buffer("noise", _mirrored_noise(components, samples, config.dim))

    @property
    def scale(self) -> Tensor:
        """Decrease of the logit of a match per unit of distance, above 0."""
        return F.softplus(self.scale_parameter)

    def forward(self, images: Tensor) -> Embedding:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            means = self.mean_head(feature_map)
            if not self.options.components:
                return Embedding(means)
            variances = floored_softplus(self.variance_head(feature_map)).square()
            if self.options.components == 1:
                return Embedding(means, variances)
            shape = (self.options.components, -1)
            means, variances = (values.unflatten(1, shape) for values in (means, variances))
            within, between = variances.mean(1), means.var(1, correction=0)
            extra = {"component_means": means, "component_variances": variances}
            return Embedding(means.mean(1), within + between, extra=extra)

    def _embed(self, images: Tensor) -> Embedding:
        embedding = super()._embed(images)
        if not self.options.components:
            return embedding
        first, second = (_samples_of(embedding, noise) for noise in self.noise)
        uncertainty = mismatch_probability(match_logits(first, second, self.scale, self.shift))
        return Embedding(embedding.vectors, embedding.variance, uncertainty, embedding.extra)

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        """Return the hedged loss of each tuple, (b,): half that of its match, half that of others.

        The loss of a pair adds the weighted KL divergences of both images to the contrastive one.
        """
        embedding, valid, divergence = tuples.images, tuples.valid, None
        samples = embedding.vectors[:, None]
        if self.options.components:
            means, variances = _mixture(embedding)
            # In evaluation a loss must not change the random state.
            noise = self.noise[0]
            if self.training:
                noise = torch.randn(len(embedding), *noise.shape, device=noise.device)
            samples = mixture_samples(means, variances, noise)
            if means.shape[1] == 1:  # exact for one Gaussian
                divergence = kl_to_prior(means[:, 0], variances[:, 0], prior_variance=1.0)[:, None]
            else:
                divergence = mixture_kl_to_normal(samples, means, variances)[:, None]
        anchor, positive, negative = (
            rows.unflatten(2, samples.shape[1:]) for rows in tuples.by_role(samples.flatten(1))
        )
        match = torch.arange(1 + valid.shape[1], device=valid.device) == 0
        others = torch.cat([positive, negative], dim=1)
        logits = match_logits(anchor, others, self.scale, self.shift)
        losses = soft_contrastive_loss(logits, match)
        if divergence is not None:
            first, near, far = (rows.squeeze(2) for rows in tuples.by_role(divergence))
            losses = losses + options.kl_scale * (first + torch.cat([near, far], dim=1))
        return (losses[:, 0] + mean_of_valid(losses[:, 1:], valid)) / 2

    @classmethod
    def unit_length(cls, options: Any) -> bool:
        return False

    @property
    def draws(self) -> bool:
        return bool(self.options.components)

    @property
    def reranks(self) -> bool:
        return bool(self.options.components and self.options.distance == "match")

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Return negative log probabilities (n, k) that queries match candidates."""
        n, device = len(queries), queries.vectors.device
        k = len(candidates) // max(1, n)
        query = torch.arange(n, device=device).repeat_interleave(k)
        _, samples, dim = self.noise.shape
        step = max(1, BLOCK_NUMBERS // (samples * max(samples, dim)))
        scale, shift = self.scale.to(device), self.shift.to(device)
        parts = []
        for rows in torch.arange(n * k, device=device).split(step):
            query_samples = _samples_of(queries[query[rows]], self.noise[0])
            item_samples = _samples_of(candidates[rows], self.noise[1])
            parts.append(match_nll(match_logits(query_samples, item_samples, scale, shift)))
        return torch.cat(parts).view(n, k)


def _mirrored_noise(components: int, samples: int, dim: int) -> Tensor:
    """Return two sets of standard normal numbers, (2, samples, dim), always the same.

    In each component, half of the samples mirror the other half, so that the sets do not move
    queries and items apart. In each dimension the absolute values are the centres of equally
    probable intervals (a Latin hypercube), scaled to a second moment of 1. Of some random orders
    and signs, those that correlate least with earlier dimensions are chosen.
    """
    generator = torch.Generator().manual_seed(0)
    n = samples // components
    half = n - n // 2
    levels = torch.arange(0.5, half, dtype=torch.float64, device="cpu") / half
    values = torch.special.ndtri((1 + levels) / 2)
    noise = values.new_empty(2, components, half, 0)
    shape = (2, 2, components, PROPOSALS, half)
    for _ in range(dim):
        order, sign = torch.rand(shape, generator=generator, device="cpu")
        proposals = values[order.argsort(-1)] * (sign - 0.5).sign()
        best = (proposals @ noise).norm(dim=-1).argmin(-1)[..., None, None]
        noise = torch.cat([noise, proposals.take_along_dim(best, -2).mT], dim=-1)
    noise = torch.cat([noise, -noise], dim=2)[:, :, :n]
    noise = noise / noise.square().mean(2, keepdim=True).sqrt()
    return noise.flatten(1, 2).float()


def _samples_of(embedding: Embedding, noise: Tensor) -> Tensor:
    """Return samples (n, k, d) of n images by noise (k, d), the same for all."""
    means, variances = _mixture(embedding)
    return mixture_samples(means, variances, noise.to(means.device))


def _mixture(embedding: Embedding) -> tuple[Tensor, Tensor]:
    """Return means and variances of the components, (n, c, d), also of a single Gaussian."""
    if "component_means" not in embedding.extra:
        return embedding.vectors[:, None], require_variance(embedding)[:, None]
    return embedding.extra["component_means"], embedding.extra["component_variances"]
