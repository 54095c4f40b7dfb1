"""Encoders without uncertainty: the baseline, and a classifier of labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, EncoderConfig
from rcir.encoders.features import MeanHead, build_features
from rcir.errors import InvalidConfig
from rcir.losses import NormSoftmaxOptions, norm_softmax_loss
from rcir.options import require_at_least


@dataclass(frozen=True)
class DeterministicOptions:
    """Options of the deterministic encoder.

    Args:
        unit: divide the vectors by their length.
    """

    unit: bool = True


class Deterministic(Encoder):
    """Backbone, pooling, linear layer, and unit length unless `unit` is false.

    It states no uncertainty. A retriever then uses one minus the cosine of the query to its nearest
    item.
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
            unit = getattr(self.options, "unit", True)  # subclasses have other options
            return Embedding(F.normalize(vectors) if unit else vectors)


@dataclass(frozen=True)
class NormSoftmaxEncoderOptions:
    """Options of the normalised softmax encoder.

    Args:
        classes: number of proxies, at least that of the labels of training images.
    """

    classes: int = 1000

    def __post_init__(self) -> None:
        require_at_least(self, "encoder.options.", classes=2)


class NormSoftmax(Deterministic):
    """The deterministic encoder, trained as a classifier of the training labels.

    No tuples are mined: every image is classified among all labels, which takes far fewer epochs
    than triplets if an encoder starts from random weights. The training images must have one label
    each.
    """

    Options = NormSoftmaxEncoderOptions
    LossOptions = NormSoftmaxOptions
    by_label = True

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config, channels, size)
        self.proxies = nn.Parameter(torch.randn(self.options.classes, config.dim) * 0.1)

    def check_labels(self, count: int) -> None:
        if count > len(self.proxies):
            raise InvalidConfig(
                f"encoder.options.classes is {len(self.proxies)}; it must be at least {count}, the "
                "number of labels of the training images"
            )

    def label_loss(self, embedding: Embedding, labels: Tensor, options: Any) -> Tensor:
        return norm_softmax_loss(embedding.vectors, self.proxies, labels, options.temperature)
