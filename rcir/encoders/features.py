"""Features that heads take: a backbone, trained or frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.backbones import build_backbone, output_shape
from rcir.encoders.base import Encoder, EncoderConfig
from rcir.encoders.heads import pooling
from rcir.encoders.hub import HubBackbone, build_hub_backbone, hub_preprocessing, is_of_hub
from rcir.errors import InvalidConfig


class FrozenBackbone(nn.Module):
    """A backbone and its pooling, neither of which trains: images to features (n, C, 1, 1).

    It stays in evaluation mode. Features pass through it as they are, so that an encoder takes
    features in the place of images: a training computes those of each image once.

    Args:
        backbone: images to feature maps.
        shape: (C, h, w) of a feature map.
        pool: the pooling; GeM keeps its exponent of 3.
    """

    def __init__(self, backbone: nn.Module, shape: torch.Size, pool: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling, length = pooling(pool, shape)
        self.shape = torch.Size((length, 1, 1))
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] == self.shape:
            return images
        features: Tensor = self.pooling(self.backbone(images))
        return features[:, :, None, None]


class BackboneFeatures(Encoder):
    """Pooled features as vectors, neither normalised nor changed by a head.

    Args:
        backbone: images to features (n, C) or (n, C, 1, 1): with its pooling, or frozen.
        config: of the encoder that it is part of; methods and heads that share the backbone share
            its features.
    """

    def __init__(self, backbone: nn.Module, config: EncoderConfig) -> None:
        super().__init__(replace(config.without_weights(), method="pretrained", dim=2, options={}))
        self.backbone = backbone

    def forward(self, images: Tensor) -> Embedding:
        return Embedding(self.backbone(images).flatten(1))


def build_features(
    config: EncoderConfig, channels: int, size: tuple[int, int]
) -> tuple[nn.Module, torch.Size, str]:
    """A backbone, the shape (C, h, w) of its features, and how heads pool these.

    Args:
        config: of the encoder, completed.
        channels, size: of the images.

    Raises:
        InvalidConfig, DataUnavailable, InvalidData: of backbone or weights, see `build_backbone`
            and `build_hub_backbone`.
    """
    backbone: nn.Module
    if is_of_hub(config.backbone):
        backbone = build_hub_backbone(
            config.backbone,
            channels,
            size,
            config.pretrained,
            config.checkpoint_path,
            config.architecture,
        )
        shape = _hub_shape(backbone, config, size)
    else:
        backbone = build_backbone(
            config.backbone, channels, config.pretrained, config.checkpoint_path
        )
        shape = output_shape(backbone, channels, size)
    if not config.freeze:
        return backbone, shape, config.pooling
    frozen = FrozenBackbone(backbone, shape, config.pooling)
    return frozen, frozen.shape, "flatten"


def model_preprocessing(config: EncoderConfig) -> Preprocessing:
    """Return the preprocessing of a backbone's own configuration; without one, the default."""
    return hub_preprocessing(config.backbone) if is_of_hub(config.backbone) else Preprocessing()


def frozen_backbone(encoder: nn.Module) -> FrozenBackbone | None:
    """The frozen backbone of an encoder, the first of several; None if it has none."""
    return next((each for each in encoder.modules() if isinstance(each, FrozenBackbone)), None)


def _hub_shape(backbone: HubBackbone, config: EncoderConfig, size: tuple[int, int]) -> torch.Size:
    """The shape of what a network of a hub makes of an image; tried, since each has its own rules.

    Weights that no feature depends on do not train: several workers would wait for their gradients.
    """
    generator = torch.Generator().manual_seed(0)
    device = torch.get_default_device()
    image = torch.randn(1, 3, *size, generator=generator, device="cpu").to(device)
    try:
        with torch.enable_grad():
            features: Tensor = backbone.eval()(image)
    except Exception as error:
        raise InvalidConfig(
            f"{config.backbone} does not take images of {size[0]} x {size[1]} pixels ({error}): "
            "set preprocessing.size to what it takes, or leave preprocessing out"
        ) from error
    finally:
        backbone.train()
    if device.type != "meta":
        weights = list(backbone.parameters())
        gradients = torch.autograd.grad(features.sum(), weights, allow_unused=True)
        for values, gradient in zip(weights, gradients, strict=True):
            values.requires_grad_(gradient is not None)
        if config.pooling == "gem" and features.min() < 0:
            raise InvalidConfig(
                f"encoder.pooling gem is for features that are never negative, and those of "
                f"{config.backbone} can be: set encoder.pooling=avg"
            )
    return features.shape[1:]
