"""The baseline: one vector per image and no uncertainty."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import Encoder
from rcir.encoders.config import EncoderConfig
from rcir.encoders.features import build_features
from rcir.encoders.heads import MeanHead


class Deterministic(Encoder):
    """Backbone, pooling, linear layer, unit length.

    Its `Embedding` has neither variance nor uncertainty; a retriever then takes one minus the
    cosine of the query to its nearest item as the uncertainty of the query.
    """

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.mean_head = MeanHead(pool, shape, config.dim)

    def forward(self, images: Tensor) -> Embedding:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            return Embedding(F.normalize(self.mean_head(feature_map)))
