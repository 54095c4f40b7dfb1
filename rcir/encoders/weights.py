"""Weights of encoders in files, and the encoders that are built from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from rcir.data.preprocessing import Preprocessing
from rcir.encoders import Encoder, EncoderConfig, build_encoder, find_method, method_name
from rcir.errors import InvalidConfig, InvalidData


def require_loadable(encoder: Encoder) -> None:
    """Raise `InvalidConfig` unless the configuration of an encoder names its class."""
    kind = type(encoder)
    name = method_name(kind)
    if kind.__module__ == "__main__":
        raise InvalidConfig(
            f"{kind.__name__} is defined in the program itself, which other programs cannot "
            "import: move it to a module, and set encoder.method to its import path"
        )
    if find_method(encoder.config.method) is not kind:
        raise InvalidConfig(
            f"the encoder is a {name}, but its configuration names {encoder.config.method}, which "
            f'would be loaded instead: build it with EncoderConfig("{name}", ...)'
        )


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, with the permissions that the umask allows."""
    path.write_bytes(save({name: values.contiguous() for name, values in tensors.items()}))


def load_encoder(config: EncoderConfig, preprocessing: Preprocessing, path: Path) -> Encoder:
    """Build an encoder in evaluation mode with the weights in a file; they must be finite."""
    weights = load_file(path)
    for name, values in weights.items():
        if not values.isfinite().all():
            raise InvalidData(f"{path}: some of {name} are NaN or infinite")
    # Without pretrained weights nothing is downloaded: the file has all of them.
    encoder = build_encoder(config.without_weights(), preprocessing.channels, preprocessing.size)
    encoder.load_state_dict(weights)
    encoder.config = config
    return encoder.eval()
