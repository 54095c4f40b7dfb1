"""Bayesian Triplet Loss encoder: a Gaussian per image (Warburg et al., ICCV 2021, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import EmbeddedTuples, Encoder, EncoderConfig
from rcir.encoders.features import MeanHead, VarianceHead, build_features
from rcir.errors import InvalidConfig
from rcir.losses import BayesianTripletOptions, bayesian_tuple_loss, expected_squared_distance
from rcir.options import require_at_least, require_choices

Distance = Literal["mean", "expected"]


@dataclass(frozen=True)
class BayesianTripletEncoderOptions:
    """Options of the Bayesian Triplet Loss encoder.

    Args:
        variance_hidden: width of the variance head's hidden layer; at least 1.
        scaled: multiply the mean, a unit vector otherwise, by one trainable positive number, which
            starts at 1 (Warburg et al., section 3); without, as in the code of Cai et al.
        distance: "mean" ranks by the distance of means; "expected" re-ranks the candidates by the
            root of the expected squared distance, which moves uncertain gallery images back.
        passes: number of draws, where draws are asked for; at least 2.
    """

    variance_hidden: int = 128
    scaled: bool = False
    distance: Distance = "mean"
    passes: int = 20

    def __post_init__(self) -> None:
        require_at_least(self, variance_hidden=1, passes=2)
        require_choices(self, "distance")


class BayesianTriplet(Encoder):
    """A shared backbone with a mean head and a variance head.

    `Embedding.vectors` are the means, unit vectors unless `scaled`; `Embedding.variance` is the
    isotropic variance (n, 1), above 1e-8, `Embedding.uncertainty` the same (n,).
    """

    Options = BayesianTripletEncoderOptions
    LossOptions = BayesianTripletOptions
    revision = 1  # bounds of its variances
    mining = ("random", "semi-hard")
    draws = True

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.mean_head = MeanHead(pool, shape, config.dim)
        self.variance_head = VarianceHead(pool, shape, self.options.variance_hidden)
        if self.options.scaled:
            self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Embedding:
        mean, variance = self._gaussian(images)
        return Embedding(mean, variance, variance.squeeze(1))

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        """The Bayesian triplet loss of each tuple, (b,)."""
        variance = tuples.images.variance
        if variance is None:
            raise InvalidConfig("the Bayesian triplet loss needs embeddings with a variance")
        return bayesian_tuple_loss(tuples.vectors, tuples.by_role(variance), tuples.valid, options)

    @property
    def reranks(self) -> bool:
        """True if candidates are ranked by expected distances."""
        return bool(self.options.distance == "expected")

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Roots (n, k) of the expected squared distances of n queries to k candidates each."""
        n = len(queries)
        near = [values.view(n, -1, values.shape[1]) for values in _gaussians(candidates)]
        mean, variance = (values[:, None] for values in _gaussians(queries))
        return expected_squared_distance(mean, variance, *near).sqrt()

    def _gaussian(self, images: Tensor) -> tuple[Tensor, Tensor]:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            mean = F.normalize(self.mean_head(feature_map))
            if self.options.scaled:
                mean = mean * self.log_scale.exp()
            return mean, self.variance_head(feature_map)

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor:
        mean, variance = self._gaussian(images)
        shape = (self.options.passes, *mean.shape)
        noise = torch.randn(shape, generator=generator, device="cpu")
        return mean + variance.sqrt() * noise.to(mean.device)


def _gaussians(embedding: Embedding) -> tuple[Tensor, Tensor]:
    """Means and variances."""
    if embedding.variance is None:
        raise InvalidConfig("expected distances need embeddings with a variance")
    return embedding.vectors, embedding.variance
