"""Heteroscedastic triplet encoder: a vector and a variance per image (Taha et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import (
    EmbeddedTuples,
    Encoder,
    EncoderConfig,
    HeadOptions,
    NoOptions,
    require_variance,
)
from rcir.encoders.features import MeanHead, ScalarHead, build_features
from rcir.losses import bounded_log_variance, heteroscedastic_tuple_loss
from rcir.options import require_at_least


@dataclass(frozen=True)
class TripRegOptions(HeadOptions):
    """Options of the heteroscedastic triplet encoder, beside `HeadOptions`.

    Args:
        variance_hidden: width of the variance head's hidden layer; at least 1.
        unit: divide the vectors by their length, as Warburg et al. (ICCV 2021) do, and Taha et al.
            do not.
    """

    variance_hidden: int = 128
    unit: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, "encoder.options.", variance_hidden=1)


class TripReg(Encoder):
    """A shared backbone with a head for the vector and one for the log variance.

    `Embedding.vectors` are of any length unless `unit`. `variance` (n, 1), from exp(-10) to exp(10)
    and 1 before training, is the expected soft triplet loss of an image, `uncertainty` (n,) the
    same. They are no variance of the vectors: nothing is ranked by them or drawn from them.
    """

    Options = TripRegOptions
    LossOptions = NoOptions
    revision = 1  # bounds of its variances

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.mean_head = MeanHead(pool, shape, config.dim)
        hidden, activation = self.options.variance_hidden, self.options.activation
        self.log_variance_head = ScalarHead(pool, shape, hidden, activation=activation)

    def forward(self, images: Tensor) -> Embedding:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            vectors = self.mean_head(feature_map)
            if self.options.unit:
                vectors = F.normalize(vectors)
            variance = bounded_log_variance(self.log_variance_head(feature_map)).exp()
        return Embedding(vectors, variance, variance.squeeze(1))

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        variance = tuples.by_role(require_variance(tuples.images))
        return heteroscedastic_tuple_loss(tuples.vectors, variance, tuples.valid)
