"""Bayesian Triplet Loss encoder: a Gaussian per image (Warburg et al., ICCV 2021, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import EmbeddedTuples, Encoder, EncoderConfig, by_query, require_variance
from rcir.encoders.features import MeanHead, VarianceHead, build_features
from rcir.losses import BayesianTripletOptions, bayesian_tuple_loss, expected_squared_distance
from rcir.options import require_at_least

Distance = Literal["mean", "expected"]


@dataclass(frozen=True)
class BayesianTripletEncoderOptions:
    """Options of the Bayesian Triplet Loss encoder.

    Args:
        variance_hidden: width of the variance head's hidden layer; at least 1.
        scaled: multiply the mean, otherwise a unit vector, by a trainable positive number, which
            starts at 1 (Warburg et al., section 3; not in the code of Cai et al.).
        distance: "mean" ranks by the distance of means; "expected" re-ranks the candidates by the
            root of the expected squared distance, which moves uncertain gallery images back.
    """

    variance_hidden: int = 128
    scaled: bool = False
    distance: Distance = "mean"

    def __post_init__(self) -> None:
        require_at_least(self, variance_hidden=1)


class BayesianTriplet(Encoder):
    """A shared backbone with a mean head and a variance head.

    `Embedding.vectors` are the means, unit vectors unless `scaled`. `variance` is isotropic (n, 1)
    and above 1e-8, `uncertainty` (n,) the same.
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
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            mean = F.normalize(self.mean_head(feature_map))
            if self.options.scaled:
                mean = mean * self.log_scale.exp()
            variance = self.variance_head(feature_map)
            return Embedding(mean, variance, variance.squeeze(1))

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        variance = tuples.by_role(require_variance(tuples.images))
        return bayesian_tuple_loss(tuples.vectors, variance, tuples.valid, options)

    @property
    def reranks(self) -> bool:
        return bool(self.options.distance == "expected")

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Return roots (n, k) of the expected squared distances of n queries to k candidates."""
        mean, other_mean = by_query(queries.vectors, candidates.vectors)
        variance, other_variance = by_query(*map(require_variance, (queries, candidates)))
        return expected_squared_distance(mean, variance, other_mean, other_variance).sqrt()
