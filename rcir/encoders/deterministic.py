"""The baseline: one vector per image and no uncertainty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import UNDIGESTED_DEFAULT, Encoder, EncoderConfig
from rcir.encoders.features import MeanHead, build_features


@dataclass(frozen=True)
class DeterministicOptions:
    """Options of the deterministic encoder.

    Args:
        unit: divide the vectors by their length.
    """

    unit: bool = field(default=True, metadata={UNDIGESTED_DEFAULT: True})


class Deterministic(Encoder):
    """Backbone, pooling, linear layer, and unit length unless `unit` is false.

    Its `Embedding` has neither variance nor uncertainty; a retriever then takes one minus the
    cosine of the query to its nearest item as the uncertainty of the query.
    """

    Options: ClassVar[type] = DeterministicOptions

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.mean_head = MeanHead(pool, shape, config.dim)

    def forward(self, images: Tensor) -> Embedding:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            vectors = self.mean_head(feature_map)
            # Subclasses have options of their own.
            unit = getattr(self.options, "unit", True)
            return Embedding(F.normalize(vectors) if unit else vectors)
