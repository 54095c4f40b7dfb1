"""Backbones of model hubs by name, "timm:resnet18": which library builds them, and their weights.

A library is imported where one of its backbones is asked for. It comes with an extra of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rcir.data.preprocessing import Preprocessing
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.imports import naming_extras

HUBS = {  # before the colon of a name: module and class
    "timm": ("rcir.encoders.timm_backbone", "TimmBackbone"),
    "open_clip": ("rcir.encoders.open_clip_backbone", "OpenClipBackbone"),
    "transformers": ("rcir.encoders.transformers_backbone", "TransformersBackbone"),
}


@dataclass(frozen=True)
class HubModel:
    """A model of a hub, and what it starts from.

    Attributes:
        name: of the model, without that of the hub.
        size: (height, width) of the images.
        pretrained: True to start from the weights that the hub has of the model.
        checkpoint_path: .safetensors file to start from instead.
        architecture: what `HubBackbone.architecture` returned for the name.
    """

    name: str
    size: tuple[int, int]
    pretrained: bool = False
    checkpoint_path: str | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)


class HubBackbone(nn.Module):
    """A network of a model hub: images (n, 3, H, W) to feature maps (n, C, h, w).

    A network that pools by itself gives (n, C, 1, 1).

    Args:
        source: the model, and its weights.
    """

    library: ClassVar[str]  # as it is imported, and before the colon of a name

    def __init__(self, source: HubModel) -> None:
        super().__init__()

    @classmethod
    def architecture(cls, name: str) -> dict[str, Any]:
        """Return what builds the network without the hub; empty if the name does."""
        return {}

    @classmethod
    def preprocessing(cls, name: str) -> Preprocessing:
        """Return the preprocessing of the model's own configuration."""
        raise NotImplementedError


def is_of_hub(backbone: str) -> bool:
    """Return whether the name of a backbone is one of a model hub.

    Example:
        >>> is_of_hub("timm:resnet18"), is_of_hub("resnet50")
        (True, False)
    """
    return ":" in backbone


def find_hub(backbone: str) -> tuple[type[HubBackbone], str]:
    """The class that builds a backbone, and the name of the model in its hub.

    Raises:
        InvalidConfig: there is no such hub.
        MissingPackage: its library is not installed.
    """
    hub, _, name = backbone.partition(":")
    if hub not in HUBS or not name:
        raise InvalidConfig(
            f"encoder.backbone {backbone!r} is unknown; models of hubs are "
            f"{', '.join(f'{known}:NAME' for known in HUBS)}"
        )
    module, kind = HUBS[hub]
    with naming_extras():
        hub_backbone: type[HubBackbone] = getattr(import_module(module), kind)
        import_module(hub_backbone.library)
    return hub_backbone, name


def build_hub_backbone(
    backbone: str,
    channels: int,
    size: tuple[int, int],
    pretrained: bool | str,
    checkpoint_path: str | None,
    architecture: Mapping[str, Any],
) -> HubBackbone:
    """Build a backbone of a hub; the arguments are those of `rcir.encoders.EncoderConfig`.

    Raises:
        InvalidConfig: there is no such model, or the weights are requested in a way that the hub
            does not have.
        DataUnavailable: the weights are neither cached nor can they be downloaded.
        InvalidData: the file of weights is damaged, or of another model.
    """
    kind, name = find_hub(backbone)
    if channels != 3:
        raise InvalidConfig(
            f"{backbone} takes 3 channels, not {channels}: set preprocessing.channels"
        )
    if not isinstance(pretrained, bool):
        raise InvalidConfig(
            f"{backbone} has no weights {pretrained}; encoder.pretrained is true or false"
        )
    return kind(HubModel(name, size, pretrained, checkpoint_path, architecture))


def hub_preprocessing(backbone: str) -> Preprocessing:
    """Return the preprocessing of the configuration of a hub's model."""
    kind, name = find_hub(backbone)
    return kind.preprocessing(name)


def model_architecture(backbone: str) -> dict[str, Any]:
    """Return what builds a backbone without its hub; empty if the name does."""
    if not is_of_hub(backbone):
        return {}
    kind, name = find_hub(backbone)
    return kind.architecture(name)


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        InvalidConfig: the file has another ending; a pickle, which can run any program, is never
            read.
        DataUnavailable: there is no such file.
        InvalidData: it is damaged.
    """
    if not path.endswith(".safetensors"):
        raise InvalidConfig(
            f"encoder.checkpoint_path is {path}; weights are read from .safetensors files only, "
            "since other formats can run programs: convert it with safetensors.torch.save_file"
        )
    if not Path(path).is_file():
        raise DataUnavailable(f"there is no file {path}: correct encoder.checkpoint_path")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InvalidData(f"{path} is damaged ({error}): fetch it again") from error


def take_weights(network: nn.Module, path: str) -> None:
    """Load the weights of a safetensors file into a network; see `read_weights`.

    Raises:
        InvalidData: they are another network's.
    """
    weights = read_weights(path)
    if torch.get_default_device().type == "meta":  # a dry run
        return
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise other_weights(path, error) from error


def other_weights(path: str, error: Exception) -> InvalidData:
    """The error of a file that holds the weights of another network."""
    lines = str(error).split("\n")
    return InvalidData(
        f"{path} does not hold the weights of this backbone: {' '.join(lines[:2])[:300]}"
    )


def no_weights(backbone: str, error: Exception) -> DataUnavailable:
    """The error of weights that are neither cached nor can be downloaded."""
    reason = " ".join(str(error).split())[:300]
    return DataUnavailable(
        f"the weights of {backbone} are not in the cache, or damaged there, and could not be "
        f"downloaded ({reason}); connect once, give a file with encoder.checkpoint_path, or train "
        "from scratch with encoder.pretrained=false"
    )
