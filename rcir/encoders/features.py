"""Features of a trained or frozen backbone, and the heads on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.backbones import LSTM, build_backbone, output_shape
from rcir.encoders.base import Activation, Encoder, EncoderConfig
from rcir.encoders.hub import (
    HubBackbone,
    TransformersBackbone,
    build_hub_backbone,
    hub_preprocessing,
    is_of_hub,
)
from rcir.errors import InvalidConfig

ACTIVATIONS: Mapping[Activation, Callable[[], nn.Module]] = {
    "leaky-relu": partial(nn.LeakyReLU, 0.1),
    "relu": nn.ReLU,
}
FLOOR_BEGIN, FLOOR_WIDTH = -12.0, 4.0  # arguments where `floored_softplus` leaves softplus


class GeM(nn.Module):
    """Generalised-mean pooling, (n, C, h, w) to (n, C).

    ``f_c = mean_hw(max(x, 1e-6) ** p) ** (1 / p)`` with one learnable p, shared by all channels
    (Radenovic et al., "Fine-tuning CNN image retrieval with no human annotation", TPAMI 2019).
    """

    def __init__(self, p: float = 3.0) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))

    def forward(self, feature_map: Tensor) -> Tensor:
        powered = feature_map.clamp(min=1e-6).pow(self.p)
        return powered.mean(dim=(-2, -1)).pow(1 / self.p)


def pooling(name: str, shape: torch.Size) -> tuple[nn.Module, int]:
    """Return the pooling of feature maps of `shape` (C, h, w), and the length of its output."""
    if name == "gem":
        return GeM(), shape[0]
    if name == "avg":
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), shape[0]
    return nn.Flatten(), math.prod(shape)


class MeanHead(nn.Sequential):
    """Pooling and a linear layer: feature map to vectors (n, dim) of any length."""

    def __init__(self, pool: str, shape: torch.Size, dim: int) -> None:
        module, length = pooling(pool, shape)
        super().__init__(module, nn.Linear(length, dim))


class ScalarHead(nn.Module):
    """Pooling and two linear layers: feature map to a number (n, 1), at first `initial`.

    `hidden_units` is the module that gives the values (n, hidden) between the layers.
    """

    def __init__(
        self,
        pool: str,
        shape: torch.Size,
        hidden: int,
        initial: float = 0.0,
        activation: Activation = "leaky-relu",
    ) -> None:
        super().__init__()
        module, length = pooling(pool, shape)
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, initial)
        between = ACTIVATIONS[activation]()
        self.layers = nn.Sequential(module, nn.Linear(length, hidden), between, last)

    @property
    def hidden_units(self) -> nn.Module:
        return self.layers[-2]

    def forward(self, feature_map: Tensor) -> Tensor:
        numbers: Tensor = self.layers(feature_map)
        return numbers


def floored_softplus(values: Tensor) -> Tensor:
    """Softplus with a floor of 1e-8, since smaller variances would overflow losses.

    Below -12, an arc tangent bounds the argument: gradients become small, but never 0.
    """
    beyond = (FLOOR_BEGIN - values).clamp(min=0) / FLOOR_WIDTH
    bounded = FLOOR_BEGIN - FLOOR_WIDTH * beyond.atan()
    return F.softplus(torch.where(values < FLOOR_BEGIN, bounded, values))


class VarianceHead(ScalarHead):
    """A `ScalarHead` with `floored_softplus`: feature map to variance (n, 1)."""

    def __init__(
        self,
        pool: str,
        shape: torch.Size,
        hidden: int,
        initial: float = 1e-3,
        activation: Activation = "leaky-relu",
    ) -> None:
        super().__init__(pool, shape, hidden, math.log(math.expm1(initial)), activation)

    def forward(self, feature_map: Tensor) -> Tensor:
        return floored_softplus(super().forward(feature_map))


class FrozenBackbone(nn.Module):
    """A backbone and its pooling, neither of which trains: images to features (n, C, 1, 1).

    Features pass through unchanged, so that a training can compute those of each image once.
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

    The backbone pools, or is frozen. All encoders that share it share its features.
    """

    def __init__(self, backbone: nn.Module, config: EncoderConfig) -> None:
        super().__init__(replace(config.without_weights(), method="pretrained", dim=2, options={}))
        self.backbone = backbone
        self.train(backbone.training)

    def forward(self, images: Tensor) -> Embedding:
        return Embedding(self.backbone(images).flatten(1))


def build_features(
    config: EncoderConfig, channels: int, size: tuple[int, int]
) -> tuple[nn.Module, torch.Size, str]:
    """Build the backbone of a completed configuration for images (channels, *size).

    Also return the shape (C, h, w) of its features, and the pooling of heads.

    Raises:
        InvalidConfig: the backbone is unknown, or does not take such images.
        DataUnavailable: the weights are neither cached nor can they be downloaded.
        InvalidData: a file of weights is damaged, or of another network.
    """
    backbone: nn.Module
    if config.projected and not config.backbone.startswith(f"{TransformersBackbone.library}:"):
        raise InvalidConfig(
            f"projected is true, and {config.backbone} is not a model of transformers: set it to "
            "false (open_clip returns projected vectors in any case)"
        )
    if is_of_hub(config.backbone):
        backbone = build_hub_backbone(config, channels, size)
        shape = _hub_shape(backbone, config, size)
    else:
        if config.backbone == LSTM and config.pooling == "gem":
            raise InvalidConfig(
                "encoder.pooling gem is for features that are never negative, and those of an LSTM "
                "can be: set encoder.pooling=flatten"
            )
        backbone = build_backbone(
            config.backbone, channels, config.pretrained, config.checkpoint_path, size[1]
        )
        shape = output_shape(backbone, channels, size)
    if not config.freeze:
        return backbone, shape, config.pooling
    frozen = FrozenBackbone(backbone, shape, config.pooling)
    return frozen, frozen.shape, "flatten"


def model_preprocessing(config: EncoderConfig) -> Preprocessing:
    """Return the preprocessing of a hub's model, or else the default one."""
    return hub_preprocessing(config.backbone) if is_of_hub(config.backbone) else Preprocessing()


def frozen_backbone(encoder: nn.Module) -> FrozenBackbone | None:
    """Return the first frozen backbone of an encoder; None if it has none."""
    return next((part for part in encoder.modules() if isinstance(part, FrozenBackbone)), None)


def _hub_shape(backbone: HubBackbone, config: EncoderConfig, size: tuple[int, int]) -> torch.Size:
    """Return the shape of a feature map by a trial, and freeze weights without effect on features.

    Several workers would wait for the gradients of such weights.
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


class Pretrained(Encoder):
    """Backbone, pooling, unit length: for retrieval without training.

    `config.dim` becomes the length of the pooled features. It states no uncertainty.
    """

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.pooling, length = pooling(pool, shape)
        self.config = replace(self.config, dim=length)
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> Embedding:
        return Embedding(F.normalize(self.pooling(self.backbone(images)).float()))
