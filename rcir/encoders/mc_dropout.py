"""Monte Carlo dropout: the spread of randomly thinned networks (Gal and Ghahramani, ICML 2016).

As in Cai et al. (AAAI 2025), the output of every convolution is dropped out, in training and at
test time; all other layers are in evaluation mode at test time. Dropout of whole channels is that
of Warburg et al. (2023, arXiv 2302.01332) for small networks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.backbones import LSTM
from rcir.encoders.base import Encoder, EncoderConfig
from rcir.encoders.deterministic import Deterministic
from rcir.encoders.features import frozen_backbone
from rcir.errors import InvalidConfig
from rcir.options import require_at_least

Masks = Literal["shared", "independent"]
MAX_JOINT = 64  # images times passes in one forward pass, unless the images alone are more


@dataclass(frozen=True)
class MCDropoutOptions:
    """Options of MC dropout.

    Args:
        dropout: probability of a feature to be dropped after every convolution, in (0, 1).
        passes: number of sampled networks; at least 2.
        channels: drop whole channels in place of single features (Tompson et al., CVPR 2015).
        masks: "shared", a pass applies one mask to all images, or "independent", every image has
            its own masks, as in the code of Cai et al.; here its pixels determine them, so that
            equal images have equal embeddings.
        unit: divide the mean over the passes by its length, unlike that code.
    """

    dropout: float = 0.1
    passes: int = 20
    channels: bool = False
    masks: Masks = "shared"
    unit: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.dropout < 1:
            raise InvalidConfig(f"encoder.options.dropout is {self.dropout}; it must lie in (0, 1)")
        require_at_least(self, "encoder.options.", passes=2)


class DropoutConv(nn.Module):
    """A convolution with dropout: random in training, by fixed masks in a pass."""

    def __init__(self, conv: nn.Module, probability: float, channels: bool) -> None:
        super().__init__()
        self.conv = conv
        self.probability = probability
        self.channels = channels

    def forward(self, images: Tensor) -> Tensor:
        if (masks := _masks.get()) is not None:
            return masks.thin(self, images)
        output = self.conv(images)
        drop = F.dropout2d if self.channels else F.dropout
        return drop(output, self.probability) if self.training else output

    def mask_shape(self, output: Tensor) -> torch.Size:
        """Return the shape of the mask of an image, whose output is (C, H, W)."""
        return torch.Size((output.shape[1], 1, 1)) if self.channels else output.shape[1:]


class IndependentMasks:
    """Masks by a hash of the image's pixels, the pass, the layer and the position.

    They are the same on every device and in every batch.
    """

    def __init__(self, pixels: Tensor) -> None:
        bits = pixels.float().contiguous().flatten(1).view(torch.int32)
        places = _hash(torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device))
        self._images = _hash(bits ^ places).sum(1, dtype=torch.int32)

    def begin(self, images: Tensor, part: range) -> Tensor:
        """Return the input of joint passes, (passes * n, ...), whose masks follow."""
        passes = torch.tensor(part, dtype=torch.int32, device=images.device)
        self._keys = _hash(self._images + _hash(passes)[:, None]).flatten()  # pass by pass
        self._layer = 0
        return images.repeat(len(part), *[1] * (images.ndim - 1))

    def thin(self, layer: DropoutConv, images: Tensor) -> Tensor:
        """Return the thinned output of a layer, (passes * n, C, H, W)."""
        output: Tensor = layer.conv(images)
        self._layer += 1
        shape = layer.mask_shape(output)
        places = torch.arange(shape.numel(), dtype=torch.int32, device=output.device)
        keys = _hash(self._keys + self._layer)[:, None]
        numbers = _hash(_hash(places) ^ keys).bitwise_and_(0x7FFFFFFF).view(-1, *shape)
        keep = 1 - layer.probability
        return output.mul_((numbers < int(keep * 2**31)) / keep)


def _hash(values: Tensor) -> Tensor:
    """Hash int32 numbers by a bijection, the finaliser of MurmurHash3 (A. Appleby, 2011)."""
    values = values ^ ((values >> 16) & 0xFFFF)
    values = values.mul_(0x85EBCA6B - 2**32)
    values = values.bitwise_xor_((values >> 13) & 0x7FFFF)
    values = values.mul_(0xC2B2AE35 - 2**32)
    return values.bitwise_xor_((values >> 16) & 0xFFFF)


class SharedMasks:
    """Masks by pass, the same for all images of a shape; `masks` are of an earlier batch, or empty.

    The generator of pass t, with seed t, draws one mask (C, H, W) for each convolution in turn.
    """

    def __init__(self, count: int, masks: dict[DropoutConv, Tensor]) -> None:
        self.masks = masks  # each (count, C, H, W)
        self._generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
        self._below: Tensor | None = None  # output of the first convolution, equal for all passes

    def begin(self, images: Tensor, part: range) -> Tensor:
        """Return the input of joint passes, (n, ...), whose masks follow."""
        self._rows = slice(part.start, part.stop)
        return images

    def thin(self, layer: DropoutConv, images: Tensor) -> Tensor:
        """Return the thinned output of a layer, (passes * n, C, H, W)."""
        is_first = layer is next(iter(self.masks), layer)
        below = self._below if is_first else None
        output: Tensor = layer.conv(images) if below is None else below
        keep = 1 - layer.probability
        if layer not in self.masks:
            shape = layer.mask_shape(output)
            draws = [torch.rand(shape, generator=g, device="cpu") for g in self._generators]
            self.masks[layer] = torch.stack([draw < keep for draw in draws]).to(output.device)
        factors = self.masks[layer][self._rows, None] / keep
        if is_first:
            self._below = output
            return (output * factors).flatten(0, 1)
        # In place: on a CPU, allocating a second output takes longer than the multiplication.
        output.unflatten(0, (len(factors), len(output) // len(factors))).mul_(factors)
        return output


# The masks in this thread: an argument of the layers that backbones would not pass on.
_masks: ContextVar[SharedMasks | IndependentMasks | None] = ContextVar("masks", default=None)


@contextmanager
def thinning(masks: SharedMasks | IndependentMasks) -> Iterator[None]:
    """Thin the networks that this thread computes."""
    before = _masks.set(masks)
    try:
        yield
    finally:
        _masks.reset(before)


class MCDropout(Encoder):
    """The mean direction and the spread of `passes` thinned networks.

    Each pass draws one mask per convolution and applies it to every image, so that a pass is one
    network: embeddings do not depend on the batch, and images are compared under the same networks.
    `vectors` is the mean of the unit vectors of the passes, at unit length unless `unit` is false,
    `variance` (n, d) their unbiased variance, and `uncertainty` (n,) its mean over the dimensions.
    With `masks` "independent", each image has its own networks.

    Of a frozen backbone and of an LSTM only the features are thinned.

    The masks for the last shape and device of images are kept: one byte for each pass and each
    output of a convolution (resnet50 at 224 x 224 pixels: 11 MB a pass), or for each channel.
    """

    Options = MCDropoutOptions
    draws = True

    @classmethod
    def unit_length(cls, options: Any) -> bool:
        return True  # those of the passes, whose mean may be shorter

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        plain = replace(config, method="deterministic", options={})
        self.network = Deterministic(plain, channels, size)
        self.passes = self.options.passes
        if config.freeze or config.backbone == LSTM:
            thinned = DropoutConv(nn.Identity(), self.options.dropout, self.options.channels)
            self.network.backbone = nn.Sequential(self.network.backbone, thinned)
            self.convolutions = [thinned]
        else:
            self.convolutions = list(_wrap(self.network, self.options))
        self._cached: tuple[object, dict[DropoutConv, Tensor]] | None = None
        if not self.convolutions:
            raise InvalidConfig(f"{config.backbone} has no convolution for dropout")

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a replica draws the same masks on demand.
        return self.__dict__ | {"_cached": None}

    def forward(self, images: Tensor) -> Embedding:
        embedding: Embedding = self.network(images)
        return embedding

    def pass_vectors(self, images: Tensor) -> Tensor:
        """Return the unit vectors of the passes, (passes, n, dim), in evaluation mode."""
        pixels = images  # not features, which are rounded differently in each batch
        if (frozen := frozen_backbone(self)) is not None:
            images = frozen(images)  # the same for all passes
        kind, cached = (images.shape[1:], images.device), self._cached
        masks: SharedMasks | IndependentMasks
        if self.options.masks == "shared":
            masks = SharedMasks(self.passes, cached[1] if cached and cached[0] == kind else {})
        else:
            masks = IndependentMasks(pixels)
        step = max(1, MAX_JOINT // max(1, len(images)))
        vectors = []
        for start in range(0, self.passes, step):
            part = range(start, min(start + step, self.passes))
            with thinning(masks):
                joint = self.network(masks.begin(images, part)).vectors
            vectors.append(joint.unflatten(0, (len(part), len(images))))
        if isinstance(masks, SharedMasks):
            self._cached = (kind, masks.masks)  # all of them are drawn, and never change
        return torch.cat(vectors)

    def _embed(self, images: Tensor) -> Embedding:
        stacked = self.pass_vectors(images)
        mean, variance = stacked.mean(dim=0), stacked.var(dim=0)
        vectors = F.normalize(mean) if self.options.unit else mean
        return Embedding(vectors, variance, variance.mean(dim=1))


def _wrap(module: nn.Module, options: MCDropoutOptions) -> Iterator[DropoutConv]:
    """Put dropout behind every convolution below `module`."""
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            wrapped = DropoutConv(child, options.dropout, options.channels)
            setattr(module, name, wrapped)
            yield wrapped
        else:
            yield from _wrap(child, options)
