"""Bayesian Triplet Loss encoders: a Gaussian or a von Mises-Fisher distribution per image.

Warburg et al., ICCV 2021: section 3, and the supplement for distributions on the sphere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import (
    EmbeddedTuples,
    Encoder,
    EncoderConfig,
    HeadOptions,
    by_query,
    require_variance,
)
from rcir.encoders.features import MeanHead, VarianceHead, build_features
from rcir.errors import InvalidConfig
from rcir.losses import (
    BayesianTripletOptions,
    VonMisesFisherOptions,
    bayesian_tuple_loss,
    bessel_ratio,
    expected_squared_distance,
    vmf_expected_squared_distance,
    vmf_tuple_loss,
)
from rcir.options import require_at_least

Distance = Literal["mean", "expected"]
INITIAL_LENGTH = 0.9  # mean resultant length of every image before training


@dataclass(frozen=True)
class BayesianTripletEncoderOptions(HeadOptions):
    """Options of the Bayesian Triplet Loss encoder, beside `HeadOptions`.

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
        require_at_least(self, "encoder.options.", variance_hidden=1)


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
        hidden, activation = self.options.variance_hidden, self.options.activation
        self.variance_head = VarianceHead(pool, shape, hidden, activation=activation)
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


@dataclass(frozen=True)
class VonMisesFisherEncoderOptions(HeadOptions):
    """Options of the von Mises-Fisher encoder, beside `HeadOptions`.

    Args:
        concentration_hidden: width of the concentration head's hidden layer; at least 1.
        distance: "mean" ranks by the distance of mean directions; "expected" re-ranks the
            candidates by the root of the expected squared distance, which moves uncertain gallery
            images towards the middle.
    """

    concentration_hidden: int = 128
    distance: Distance = "mean"

    def __post_init__(self) -> None:
        require_at_least(self, "encoder.options.", concentration_hidden=1)


class VonMisesFisher(Encoder):
    """A shared backbone with heads for the mean direction and the concentration.

    `Embedding.vectors` are the mean directions, of unit length. ``extra["concentration"]`` (n, 1)
    is kappa, at most 1e8, `uncertainty` (n,) its inverse, which the head predicts.
    """

    Options = VonMisesFisherEncoderOptions
    LossOptions = VonMisesFisherOptions
    revision = 1  # bounds of its variances
    mining = ("random", "semi-hard")
    draws = True

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.mean_head = MeanHead(pool, shape, config.dim)
        # Banerjee et al. (JMLR 2005, eq. 4.4): the concentration of a mean resultant length.
        initial = INITIAL_LENGTH * (config.dim - INITIAL_LENGTH**2) / (1 - INITIAL_LENGTH**2)
        hidden, activation = self.options.concentration_hidden, self.options.activation
        self.dispersion_head = VarianceHead(pool, shape, hidden, 1 / initial, activation)

    def forward(self, images: Tensor) -> Embedding:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            mean = F.normalize(self.mean_head(feature_map))
            dispersion = self.dispersion_head(feature_map)
        extra = {"concentration": 1 / dispersion}
        return Embedding(mean, uncertainty=dispersion.squeeze(1), extra=extra)

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        concentration = tuples.by_role(_concentration(tuples.images))
        return vmf_tuple_loss(tuples.vectors, concentration, tuples.valid, options)

    def draw_distances(self, queries: Embedding, candidates: Tensor) -> Tensor:
        """Return distances of draws from Gaussians with the means and variances of the vMFs."""
        dim = queries.vectors.shape[1]
        length = bessel_ratio(_concentration(queries), dim).to(queries.vectors)
        variance = (1 - length.square()).clamp(min=0) / dim
        return super().draw_distances(Embedding(length * queries.vectors, variance), candidates)

    @property
    def reranks(self) -> bool:
        return bool(self.options.distance == "expected")

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Return roots (n, k) of the expected squared distances of n queries to k candidates."""
        mean, other_mean = by_query(queries.vectors, candidates.vectors)
        kappa, other_kappa = by_query(*map(_concentration, (queries, candidates)))
        return vmf_expected_squared_distance(mean, kappa, other_mean, other_kappa).sqrt()


def _concentration(embedding: Embedding) -> Tensor:
    if "concentration" not in embedding.extra:
        raise InvalidConfig('vMF encoders need embeddings with extra["concentration"]')
    return embedding.extra["concentration"]
