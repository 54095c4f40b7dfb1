"""Bayesian Triplet Loss encoder: a Gaussian per image (Warburg et al., ICCV 2021, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.backbones import build_backbone, output_shape
from rcir.encoders.base import Encoder, EncoderConfig
from rcir.encoders.heads import MeanHead, VarianceHead


class BayesianTriplet(Encoder):
    """A shared backbone with a mean head and a variance head.

    `Embedding.variance` is the isotropic variance (n, 1), `Embedding.uncertainty` the same (n,).
    The mean is a unit vector, as in the code of Cai et al. (AAAI 2025).
    """

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone: nn.Module = build_backbone(config.backbone, channels, config.pretrained)
        shape = output_shape(self.backbone, channels, size)
        self.mean_head = MeanHead(config.pooling, shape, config.dim)
        self.variance_head = VarianceHead(config.pooling, shape, config.variance_hidden)

    def forward(self, images: Tensor) -> Embedding:
        mean, variance = self._gaussian(images)
        return Embedding(mean, variance, variance.squeeze(1))

    def _gaussian(self, images: Tensor) -> tuple[Tensor, Tensor]:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            return F.normalize(self.mean_head(feature_map)), self.variance_head(feature_map)

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor:
        mean, variance = self._gaussian(images)
        noise = torch.randn(self.config.passes, *mean.shape, generator=generator)
        return mean + variance.sqrt() * noise.to(mean.device)
