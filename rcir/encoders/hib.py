"""Hedged instance embedding: distributions that match by chance (Oh et al., ICLR 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import EmbeddedTuples, Encoder, EncoderConfig
from rcir.encoders.features import MeanHead, build_features, floored_softplus
from rcir.errors import InvalidConfig
from rcir.losses import kl_to_prior, mean_of_valid
from rcir.losses.pairs import (
    HedgedOptions,
    match_nll,
    mismatch_probability,
    mixture_kl_to_normal,
    mixture_samples,
    soft_contrastive_loss,
)
from rcir.options import require_at_least, require_choices

_Ranking = Literal["match", "mean"]
DEVIATION = 0.1  # of every Gaussian as it starts, in each dimension
PROPOSALS = 64  # of the noise in one dimension
SAMPLES_AT_ONCE = 1 << 22  # numbers of samples, and of their pairs, held at a time


@dataclass(frozen=True)
class HedgedInstanceOptions:
    """Options of hedged instance embedding.

    Args:
        components: of the mixture of Gaussians that an image is: 1, the paper's "MoG-1"; 2,
            "MoG-2", or more; 0, a point, the paper's baseline, without an uncertainty.
        samples: of each image, in training and at test time; a multiple of `components`.
        distance: "match" re-ranks the candidates by the probability that they match, whose negative
            log is the distance; "mean" ranks by the distance of means. Of points, both are one
            order, and distances are those of the points.
    """

    components: int = 1
    samples: int = 8
    distance: _Ranking = "match"

    def __post_init__(self) -> None:
        require_at_least(self, components=0, samples=1)
        if self.components and self.samples % self.components:
            raise InvalidConfig(
                f"encoder.options.samples is {self.samples} and components {self.components}: "
                "give a multiple, as many samples of each component"
            )
        require_choices(self, "distance")


class HedgedInstance(Encoder):
    """An image as a Gaussian with a diagonal covariance, or as a mixture of several.

    Trained on pairs: the probability that samples of two images match falls with their distance,
    by a scale and a shift that are learned. Not normalised; with c components of equal weight,

    - `Embedding.vectors` (n, d) are the means, of a mixture the mean of all of it;
    - `variance` (n, d), of a mixture that of all of it;
    - `uncertainty` (n,) one minus the probability that the image matches itself, by two sets of
      samples;
    - `extra`, of a mixture only, `component_means` and `component_variances` (n, c, d).

    At test time samples are made of noise that is drawn once, the same for every image: one set for
    queries, another, independent one for gallery items. So an embedding does not depend on what is
    embedded with it, and an image in the gallery is asked about by other samples. The noise has
    mean 0 and, in every dimension, the same values in another order: a variance counts alike in all
    of them. (An odd number of samples has this in its second moments only.) What matches an
    uncertain image best need not be the image itself, but may be a more certain one nearby.
    """

    Options = HedgedInstanceOptions
    LossOptions = HedgedOptions
    revision = 1  # noise with unit second moments, and a floor of its variances
    mining = ("random", "top-random")
    noise: Tensor  # (2, samples, dim), where an image is not a point

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
            nn.init.constant_(last.bias, math.log(math.expm1(DEVIATION)))
            self.register_buffer("noise", _mirrored_noise(components, samples, config.dim))

    @property
    def scale(self) -> Tensor:
        """The fall of the logit of a match with a unit of distance; above 0."""
        return F.softplus(self.scale_parameter)

    def forward(self, images: Tensor) -> Embedding:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            means = self.mean_head(feature_map)
            if not self.options.components:
                return Embedding(means)
            variances = floored_softplus(self.variance_head(feature_map)).square()
            return self._mixed(means, variances)

    def _mixed(self, means: Tensor, variances: Tensor) -> Embedding:
        """The embedding of components (n, c * d), without its uncertainty."""
        components = self.options.components
        if components == 1:
            return Embedding(means, variances)
        means, variances = (values.unflatten(1, (components, -1)) for values in (means, variances))
        within, between = variances.mean(1), means.var(1, correction=0)
        extra = {"component_means": means, "component_variances": variances}
        return Embedding(means.mean(1), within + between, extra=extra)

    def _embed(self, images: Tensor) -> Embedding:
        embedding: Embedding = self(images)
        if not self.options.components:
            return embedding
        first, second = (self._samples_of(embedding, noise) for noise in self.noise)
        uncertainty = mismatch_probability(first, second, self.scale, self.shift)
        return Embedding(embedding.vectors, embedding.variance, uncertainty, embedding.extra)

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        """The hedged loss of each tuple, (b,): half of it of the pair that matches.

        The other half is of the anchor and each of its negatives, alike. To a pair's soft
        contrastive loss come the weighted KL divergences of both of its images.
        """
        embedding, valid, divergence = tuples.images, tuples.valid, None
        samples = embedding.vectors[:, None]
        if self.options.components:
            means, variances = _mixture(embedding)
            # Nothing is drawn in evaluation: whoever asks for a loss then changes no random state.
            noise = self.noise[0]
            if self.training:
                noise = torch.randn(len(embedding), *noise.shape, device=noise.device)
            samples = mixture_samples(means, variances, noise)
            if means.shape[1] == 1:  # one Gaussian, exactly; mixtures by their samples
                divergence = kl_to_prior(means[:, 0], variances[:, 0], prior_variance=1.0)[:, None]
            else:
                divergence = mixture_kl_to_normal(samples, means, variances)[:, None]
        anchor, positive, negative = (
            rows.unflatten(2, samples.shape[1:]) for rows in tuples.by_role(samples.flatten(1))
        )
        match = torch.arange(1 + valid.shape[1], device=valid.device) == 0
        others = torch.cat([positive, negative], dim=1)
        losses = soft_contrastive_loss(anchor, others, match, self.scale, self.shift)
        if divergence is not None:
            own, near, far = (rows.squeeze(2) for rows in tuples.by_role(divergence))
            losses = losses + options.kl_scale * (own + torch.cat([near, far], dim=1))
        return (losses[:, 0] + mean_of_valid(losses[:, 1:], valid)) / 2

    @property
    def draws(self) -> bool:
        """True if draws from the variance rank candidates."""
        return bool(self.options.components)

    @property
    def reranks(self) -> bool:
        """True if candidates are ranked by the probability of a match."""
        return bool(self.options.components and self.options.distance == "match")

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Distances (n, k): the negative log probabilities that queries match candidates."""
        n = len(queries)
        k = len(candidates) // max(1, n)
        of = torch.arange(n, device=queries.vectors.device).repeat_interleave(k)
        _, samples, dim = self.noise.shape
        step = max(1, SAMPLES_AT_ONCE // (samples * max(samples, dim)))
        learned = [value.to(queries.vectors.device) for value in (self.scale, self.shift)]
        parts = []
        for rows in torch.arange(n * k, device=of.device).split(step):
            query_samples = self._samples_of(queries[of[rows]], self.noise[0])
            item_samples = self._samples_of(candidates[rows], self.noise[1])
            parts.append(match_nll(query_samples, item_samples, *learned))
        return torch.cat(parts).view(n, k)

    def _samples_of(self, embedding: Embedding, noise: Tensor) -> Tensor:
        """Samples (n, k, d), of noise (k, d) that is the same for all, or (n, k, d)."""
        means, variances = _mixture(embedding)
        return mixture_samples(means, variances, noise.to(means.device))

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor | None:
        if not self.options.components:
            return None
        shape = (len(images), *self.noise.shape[1:])
        noise = torch.randn(shape, generator=generator, device="cpu")
        return self._samples_of(self(images), noise).transpose(0, 1)


def _mirrored_noise(components: int, samples: int, dim: int) -> Tensor:
    """Two sets of standard normal numbers, (2, samples, dim), the same whenever it is asked for.

    Of each component, half of the samples mirror the other half: their mean is that of the
    component, so that the two sets do not move queries and gallery items apart. Of an odd number,
    one has no mirror image. In each dimension the absolute values are the centres of equally
    probable intervals (a Latin hypercube), scaled to a second moment of 1: so few independent draws
    would have another one in each dimension. Their order and their signs are the least correlated
    with the dimensions before, of some random ones.
    """
    generator = torch.Generator().manual_seed(0)
    each = samples // components
    half = each - each // 2
    levels = torch.arange(0.5, half, dtype=torch.float64, device="cpu") / half
    values = torch.special.ndtri((1 + levels) / 2)
    noise = values.new_empty(2, components, half, 0)
    shape = (2, 2, components, PROPOSALS, half)
    for _ in range(dim):
        order, sign = torch.rand(shape, generator=generator, device="cpu")
        proposals = values[order.argsort(-1)] * (sign - 0.5).sign()
        best = (proposals @ noise).norm(dim=-1).argmin(-1)[..., None, None]
        noise = torch.cat([noise, proposals.take_along_dim(best, -2).mT], dim=-1)
    noise = torch.cat([noise, -noise], dim=2)[:, :, :each]
    noise = noise / noise.square().mean(2, keepdim=True).sqrt()
    return noise.flatten(1, 2).float()


def _mixture(embedding: Embedding) -> tuple[Tensor, Tensor]:
    """Means and variances of the components, (n, c, d); one Gaussian is a mixture of itself."""
    if embedding.variance is None:
        raise InvalidConfig("hedged instance embedding needs embeddings with a variance")
    if "component_means" not in embedding.extra:
        return embedding.vectors[:, None], embedding.variance[:, None]
    return embedding.extra["component_means"], embedding.extra["component_variances"]
