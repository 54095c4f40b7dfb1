"""Built-in networks from an image, or a sequence of features, to a feature map."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from filelock import FileLock
from torch import Tensor, nn

from rcir.encoders.hub import load_weights
from rcir.errors import DataUnavailable, InvalidConfig

Weights = Literal["IMAGENET1K_V1", "IMAGENET1K_V2"]
RESNETS = ("resnet50", "resnet101")
LSTM = "lstm"
BACKBONES = ("mnist-cnn", "lenet", "cifar-cnn", "resnet10", LSTM, *RESNETS, "densenet161")
UNTRAINED = BACKBONES[:5]  # without published weights
LSTM_WIDTH = 128
SMALL = {  # size of kernels, and layers: the width of a convolution, an activation or a pooling
    "mnist-cnn": (3, (32, "relu", 64, "relu", "pool")),
    "lenet": (5, (32, "pool", "relu", 64, "pool", "relu")),  # pooling first makes ReLU cheaper
    "cifar-cnn": (3, (32, "relu", "pool", 64, "relu", "pool", 64, "relu")),
}


class SequenceLSTM(nn.Module):
    """The last output of an LSTM (Hochreiter and Schmidhuber, 1997), (n, 1, T, d) to (n, C, 1, 1).

    Args:
        length: d, number of features of each of the T steps.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(length, LSTM_WIDTH, batch_first=True)

    def forward(self, sequences: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(sequences[:, 0])[0]
        return outputs[:, -1, :, None, None]


def build_backbone(
    name: str,
    channels: int,
    pretrained: bool | Weights,
    checkpoint_path: str | None = None,
    width: int | None = None,
) -> nn.Module:
    """Build a network from images (n, channels, H, W) to feature maps (n, C, h, w).

    They are not negative, except those of "lstm", which reads an image as a sequence of its rows of
    `width` numbers, see `SequenceLSTM`.

    "mnist-cnn" (from 8 x 8 pixels) and "cifar-cnn" (from 18 x 18) are those of Warburg et al.,
    2023, arXiv 2302.01332; "lenet" (from 16 x 16) is that of Oh et al., ICLR 2019, who do not state
    its widths; "resnet10" suits images of 28 to 64 pixels. The others are torchvision's, with its
    ImageNet weights or those of a .safetensors file.
    """
    if name not in BACKBONES:
        raise InvalidConfig(
            f"backbone {name!r} is unknown; choose one of {', '.join(BACKBONES)}, or a model of a "
            "hub, such as timm:resnet18"
        )
    if name in UNTRAINED:
        if pretrained or checkpoint_path is not None:
            raise InvalidConfig(
                f"{name} has no pretrained weights: set encoder.pretrained=false, and no "
                "encoder.checkpoint_path"
            )
        if name == LSTM:
            if channels != 1 or width is None:
                raise InvalidConfig(f"{name} takes one channel: set preprocessing.channels=1")
            return SequenceLSTM(width)
        return _resnet10(channels) if name == "resnet10" else _small_network(name, channels)
    if channels != 3:
        raise InvalidConfig(f"{name} takes 3 channels, not {channels}: set preprocessing.channels")
    network: Any = _torchvision(name, pretrained)
    if checkpoint_path is not None:
        load_weights(network, checkpoint_path)
    if name in RESNETS:
        return nn.Sequential(*list(network.children())[:-2])
    return nn.Sequential(network.features, nn.ReLU(inplace=True))


def output_shape(backbone: nn.Module, channels: int, size: tuple[int, int]) -> torch.Size:
    """Return the shape (C, h, w) of the feature map of an image of `size` (height, width)."""
    training = backbone.training
    try:
        with torch.no_grad():
            shape: torch.Size = backbone.eval()(torch.zeros(1, channels, *size)).shape[1:]
            return shape
    except RuntimeError as error:
        raise InvalidConfig(
            f"images of {size[0]} x {size[1]} pixels are too small for this backbone: "
            "raise preprocessing.size, or choose a smaller backbone"
        ) from error
    finally:
        backbone.train(training)


def _small_network(name: str, channels: int) -> nn.Module:
    kernel, layers = SMALL[name]
    modules: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, int):
            modules.append(nn.Conv2d(channels, layer, kernel))
            channels = layer
        else:
            modules.append(nn.ReLU() if layer == "relu" else nn.MaxPool2d(2))
    return nn.Sequential(*modules)


def _resnet10(channels: int) -> nn.Module:
    """Build a ResNet of one basic block per stage (He et al., CVPR 2016), half as wide."""
    from torchvision.models.resnet import BasicBlock  # slow to import, see below

    stem = nn.Conv2d(channels, 32, 3, stride=2, padding=1, bias=False)
    layers = [stem, nn.BatchNorm2d(32), nn.ReLU(inplace=True), BasicBlock(32, 32)]
    for width in (64, 128, 256):
        shortcut = nn.Conv2d(width // 2, width, 1, stride=2, bias=False)
        normed = nn.Sequential(shortcut, nn.BatchNorm2d(width))
        layers.append(BasicBlock(width // 2, width, 2, normed))
    return nn.Sequential(*layers)


def _torchvision(name: str, pretrained: bool | Weights) -> nn.Module:
    from torchvision import models  # slow to import, and unused by the smallest networks

    weight_names = [weights.name for weights in models.get_model_weights(name)]  # without the alias
    if isinstance(pretrained, str) and pretrained not in weight_names:
        raise InvalidConfig(
            f"{name} has no weights {pretrained}; set encoder.pretrained to one of "
            f"{', '.join(weight_names)}, true or false"
        )
    weights = pretrained if isinstance(pretrained, str) else "DEFAULT" if pretrained else None
    try:
        with _one_download(models.get_model_weights(name)[weights].url if weights else None):
            backbone: nn.Module = models.get_model(name, weights=weights)
        return backbone
    # No network, a download that fails its hash, a file in the cache that is cut short.
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise DataUnavailable(
            f"the ImageNet weights of {name} are missing or damaged in torch's cache, and could "
            f"not be downloaded ({error}): empty the cache and connect once, or set "
            "encoder.pretrained=false"
        ) from error


def _one_download(url: str | None) -> AbstractContextManager[Any]:
    """Let other processes of the machine wait for a file that one of them downloads."""
    if url is None:
        return nullcontext()
    file = Path(torch.hub.get_dir(), "checkpoints", Path(url).name)  # where torch keeps it
    if file.is_file():
        return nullcontext()
    file.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(file.with_name(f".{file.name}.lock"))
