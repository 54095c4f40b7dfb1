"""A pretrained backbone as it is: pooled features of unit length, without a head."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, EncoderConfig
from rcir.encoders.features import build_features
from rcir.encoders.heads import pooling


class Pretrained(Encoder):
    """Backbone, pooling, unit length: for retrieval without training.

    The length of its embeddings is that of the pooled features, and `config.dim` says so. Its
    `Embedding` has neither variance nor uncertainty.
    """

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.pooling, length = pooling(pool, shape)
        self.config = replace(self.config, dim=length)

    def forward(self, images: Tensor) -> Embedding:
        return Embedding(F.normalize(self.pooling(self.backbone(images)).float()))
