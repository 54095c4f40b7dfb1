"""Bayesian Triplet Loss encoder: a Gaussian per image (Warburg et al., ICCV 2021, section 3)."""

from __future__ import annotations

import math

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

    The mean is a unit vector (`mean_norm="unit"`), a unit vector times one trained factor
    ("scaled_unit"), or the head's output times that factor ("scaled_raw", the paper's wording;
    the factor is set by the first training batch so that the mean length starts at 1).
    """

    scale_is_set: Tensor

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone: nn.Module = build_backbone(config.backbone, channels, config.pretrained)
        shape = output_shape(self.backbone, channels, size)
        self.mean_head = MeanHead(config.pooling, shape, config.dim)
        self.variance_head = VarianceHead(config.pooling, shape, config.variance_hidden)
        self.mean_norm = config.mean_norm
        if config.mean_norm != "unit":
            self.log_scale = nn.Parameter(torch.tensor(0.0))
            self.register_buffer("scale_is_set", torch.tensor(config.mean_norm == "scaled_unit"))

    def forward(self, images: Tensor) -> Embedding:
        feature_map = self.backbone(images)
        variance = self.variance_head(feature_map)
        return Embedding(self._mean(self.mean_head(feature_map)), variance, variance.squeeze(1))

    def _mean(self, raw: Tensor) -> Tensor:
        if self.mean_norm == "unit":
            return F.normalize(raw)
        if self.training and not self.scale_is_set:
            with torch.no_grad():
                self.log_scale.fill_(-math.log(float(raw.norm(dim=1).mean().clamp(min=1e-6))))
                self.scale_is_set.fill_(True)
        unscaled = F.normalize(raw) if self.mean_norm == "scaled_unit" else raw
        return unscaled * self.log_scale.exp()
