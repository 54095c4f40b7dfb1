"""Encoders that know their own uncertainty: `build_encoder` makes one from its configuration."""

from collections.abc import Callable

from rcir.embedding import Embedding
from rcir.encoders.base import (
    METHODS,
    EmbeddedTuples,
    Encoder,
    EncoderConfig,
    NoOptions,
    find_method,
    method_name,
    require_encoder,
)
from rcir.encoders.features import build_features, model_preprocessing
from rcir.terminal import working


@working("loading the encoder")
def build_encoder(config: EncoderConfig, channels: int, size: tuple[int, int]) -> Encoder:
    """Build an untrained encoder for images (channels, *size).

    Raises:
        InvalidConfig: the configuration is inconsistent or names something unknown.
        DataUnavailable: pretrained weights cannot be loaded.

    Example:
        >>> import torch
        >>> encoder = build_encoder(EncoderConfig("btl", dim=16), channels=1, size=(8, 16))
        >>> encoder.embed(torch.zeros(2, 1, 8, 16)).vectors.shape
        torch.Size([2, 16])
    """
    kind: Callable[..., Encoder] = find_method(config.method)
    return kind(config, channels, size)


__all__ = [
    "METHODS",
    "EmbeddedTuples",
    "Embedding",
    "Encoder",
    "EncoderConfig",
    "NoOptions",
    "build_encoder",
    "build_features",
    "find_method",
    "method_name",
    "model_preprocessing",
    "require_encoder",
]
