"""An encoder's weights as a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
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
            f"{kind.__name__} is defined in the program itself, where whoever loads it cannot "
            "import it: move it to a module, and set encoder.method to its import path"
        )
    if find_method(encoder.config.method) is not kind:
        raise InvalidConfig(
            f"the encoder is a {name}, and its configuration says {encoder.config.method}, which "
            f'would be loaded in its place: build it with EncoderConfig("{name}", ...)'
        )


def save_encoder(encoder: Encoder, path: Path) -> None:
    """Write the weights of an encoder as safetensors."""
    save_tensors(encoder.state_dict(), path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, readable by whom the umask allows, as any other file."""
    path.write_bytes(to_bytes({name: values.contiguous() for name, values in tensors.items()}))


def load_encoder(config: EncoderConfig, preprocessing: Preprocessing, path: Path) -> Encoder:
    """An encoder with the weights of a file, in evaluation mode."""
    weights = load_file(path)
    for name, values in weights.items():
        if not values.isfinite().all():
            raise InvalidData(f"{path}: some of {name} are NaN or infinite")
    # Its weights are in the file: nothing is downloaded.
    plan = (config.without_weights(), preprocessing.channels, preprocessing.size)
    _require_shapes(plan, weights)
    untrained = build_encoder(*plan)
    untrained.load_state_dict(weights)
    untrained.config = config
    return untrained.eval()


def _require_shapes(
    plan: tuple[EncoderConfig, int, tuple[int, int]], weights: Mapping[str, Tensor]
) -> None:
    """Raise `InvalidData` if weights are of another encoder, before the memory for it is asked for.

    A configuration that was changed may ask for any amount.
    """
    try:
        with torch.device("meta"):
            needed = build_encoder(*plan).state_dict()
    except (RuntimeError, NotImplementedError):
        return  # an encoder that computes with its weights as it is built
    for name in needed.keys() | weights.keys():
        shapes = [tuple(each[name].shape) for each in (needed, weights) if name in each]
        if len(shapes) < 2 or shapes[0] != shapes[1]:
            raise InvalidData(f"weights {name} do not fit the configuration of the encoder")
