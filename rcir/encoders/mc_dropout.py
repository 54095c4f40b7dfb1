"""Monte Carlo dropout: the spread of randomly thinned networks (Gal and Ghahramani, ICML 2016).

As Cai et al. (AAAI 2025), dropout on the output of every convolution, in training and at test time,
with every other layer in evaluation mode at test time. Of whole channels it is that of Warburg et
al. (2023, arXiv 2302.01332) for small networks.
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
from rcir.encoders.base import Encoder, EncoderConfig
from rcir.encoders.deterministic import Deterministic
from rcir.encoders.features import frozen_backbone
from rcir.errors import InvalidConfig
from rcir.options import require_at_least, require_choices

Masks = Literal["shared", "independent"]
SIDE_BY_SIDE = 64  # images times passes in one forward pass, unless the images alone are more


@dataclass(frozen=True)
class MCDropoutOptions:
    """Options of MC dropout.

    Args:
        dropout: probability of a feature to be dropped after every convolution, in (0, 1).
        passes: number of sampled networks; at least 2.
        channels: drop whole channels in place of single features (Tompson et al., CVPR 2015).
        masks: "shared", a pass applies one mask to all images, or "independent", every image has
            masks of its own, as in the code of Cai et al.; here its pixels decide them, so that
            equal images have equal embeddings.
        unit: divide the mean over the passes by its length, which that code does not do.
    """

    dropout: float = 0.1
    passes: int = 20
    channels: bool = False
    masks: Masks = "shared"
    unit: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.dropout < 1:
            raise InvalidConfig(f"encoder.options.dropout is {self.dropout}; it must lie in (0, 1)")
        require_at_least(self, passes=2)
        require_choices(self, "masks")


class DropoutConv(nn.Module):
    """A convolution whose output is thinned: at random in training, by fixed masks in a pass."""

    def __init__(self, conv: nn.Module, probability: float, channels: bool) -> None:
        super().__init__()
        self.conv = conv
        self.probability = probability
        self.channels = channels

    def forward(self, images: Tensor) -> Tensor:
        if (passes := _passes.get()) is not None:
            return passes.thinned(self, images)
        output = self.conv(images)
        drop = F.dropout2d if self.channels else F.dropout
        return drop(output, self.probability) if self.training else output


class IndependentPasses:
    """Forward passes side by side in which every image has masks of its own.

    Whether a value is kept is a hash of the pixels of its image, the pass, the layer and its place,
    computed without rounding: the same on every device and in every batch.

    Args:
        images: (n, ...) float32.
        rows: the passes.
    """

    def __init__(self, images: Tensor, rows: range) -> None:
        bits = images.float().contiguous().flatten(1).view(torch.int32)
        places = _hashed(torch.arange(bits.shape[1], dtype=torch.int32, device=bits.device))
        keys = _hashed(bits ^ places).sum(1, dtype=torch.int32)
        passes = torch.tensor(rows, dtype=torch.int32, device=bits.device)
        self._keys = _hashed(keys + _hashed(passes)[:, None]).flatten()  # pass by pass
        self._layer = 0

    def thinned(self, layer: DropoutConv, images: Tensor) -> Tensor:
        """The thinned output of a layer, (passes * n, C, H, W)."""
        output: Tensor = layer.conv(images)
        self._layer += 1
        shape = torch.Size((output.shape[1], 1, 1)) if layer.channels else output.shape[1:]
        places = torch.arange(shape.numel(), dtype=torch.int32, device=output.device)
        keys = _hashed(self._keys + self._layer)[:, None]
        numbers = _hashed(_hashed(places) ^ keys).bitwise_and_(0x7FFFFFFF).view(-1, *shape)
        keep = 1 - layer.probability
        return output.mul_((numbers < int(keep * 2**31)) / keep)


def _hashed(values: Tensor) -> Tensor:
    """A bijection of int32 that looks random: the finaliser of MurmurHash3 (A. Appleby, 2011)."""
    values = values ^ ((values >> 16) & 0xFFFF)
    values = values.mul_(0x85EBCA6B - 2**32)
    values = values.bitwise_xor_((values >> 13) & 0x7FFFF)
    values = values.mul_(0xC2B2AE35 - 2**32)
    return values.bitwise_xor_((values >> 16) & 0xFFFF)


class Passes:
    """Forward passes of one batch by fixed masks, several of them side by side.

    Pass t draws from a generator of its own, seeded with t, one mask for each convolution in the
    order in which they run; that is when the masks are drawn, for all passes at once.

    Args:
        count: number of passes.
        masks: of an earlier batch of the same shape on the same device, after its first pass;
            empty if there are none, and then filled.
    """

    def __init__(self, count: int, masks: dict[DropoutConv, Tensor]) -> None:
        self.masks = masks  # each (count, C, H, W)
        self._generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
        self._rows = slice(0, 0)  # the passes at work, side by side
        self._below: Tensor | None = None  # what lies below the first mask, the same for all passes

    def choose(self, rows: slice) -> None:
        """Choose the passes that are computed next, side by side."""
        self._rows = rows

    def thinned(self, layer: DropoutConv, images: Tensor) -> Tensor:
        """The thinned output of a layer, (passes * n, C, H, W)."""
        first = layer is next(iter(self.masks), layer)
        output: Tensor
        if not first:
            output = layer.conv(images)
        elif self._below is None:
            output = self._below = layer.conv(images)
        else:
            output = self._below
        keep = 1 - layer.probability
        if layer not in self.masks:
            shape = output.shape[1:]
            if layer.channels:
                shape = torch.Size((shape[0], 1, 1))
            draws = [torch.rand(shape, generator=each, device="cpu") for each in self._generators]
            self.masks[layer] = torch.stack([draw < keep for draw in draws]).to(output.device)
        factors = self.masks[layer][self._rows, None] / keep
        if first:
            return (output * factors).flatten(0, 1)
        # In place: on a CPU, memory for a second output takes longer than the multiplication.
        output.unflatten(0, (len(factors), len(output) // len(factors))).mul_(factors)
        return output


# The passes that this thread computes. An argument of the layers in all but name: the backbones
# around them pass on images alone.
_passes: ContextVar[Passes | IndependentPasses | None] = ContextVar("passes", default=None)


@contextmanager
def at_work(passes: Passes | IndependentPasses) -> Iterator[None]:
    """Thin what this thread computes meanwhile."""
    before = _passes.set(passes)
    try:
        yield
    finally:
        _passes.reset(before)


class MCDropout(Encoder):
    """The mean direction and the spread of `passes` thinned networks.

    Each pass draws one mask per convolution and applies it to every image, so that a pass is one
    network: the embedding of an image depends neither on its batch nor on when it is computed, and
    two images are compared under the same networks. With ``z_t`` the unit vectors of the passes,
    `vectors` is their mean, at unit length unless `unit` is false, `variance` (n, d) their unbiased
    variance, and `uncertainty` (n,) the mean of that over the dimensions. With `masks`
    "independent", each image has networks of its own.

    With a frozen backbone, the masks are of its features, and nothing below is thinned.

    The masks for images of the last shape and device are kept: one byte for each pass and each
    value that a convolution gives for one image (resnet50 at 224 x 224 pixels: 11 MB a pass), or
    for each of its channels.
    """

    Options = MCDropoutOptions
    draws = True

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        plain = replace(config, method="deterministic", options={})
        self.network = Deterministic(plain, channels, size)
        self.passes = self.options.passes
        if config.freeze:
            thinned = DropoutConv(nn.Identity(), self.options.dropout, self.options.channels)
            self.network.backbone = nn.Sequential(self.network.backbone, thinned)
            self.convolutions = [thinned]
        else:
            self.convolutions = list(_wrap(self.network, self.options))
        self._kept: tuple[object, dict[DropoutConv, Tensor]] | None = None
        if not self.convolutions:
            raise InvalidConfig(f"{config.backbone} has no convolution to put dropout on")

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a replica elsewhere, draws the same masks when it needs them.
        return self.__dict__ | {"_kept": None}

    def forward(self, images: Tensor) -> Embedding:
        embedding: Embedding = self.network(images)
        return embedding

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self._passes(images)

    def _passes(self, images: Tensor) -> Tensor:
        """The unit vectors of the passes, (passes, n, dim)."""
        decisive = images  # features are rounded differently from batch to batch
        if (frozen := frozen_backbone(self)) is not None:
            images = frozen(images)  # the same for all passes
        count = max(1, SIDE_BY_SIDE // max(1, len(images)))
        parts = [
            range(start, min(start + count, self.passes)) for start in range(0, self.passes, count)
        ]
        if self.options.masks == "independent":
            vectors = []
            for part in parts:
                repeated = images.repeat(len(part), *[1] * (images.ndim - 1))
                with at_work(IndependentPasses(decisive, part)):
                    vectors.append(self.network(repeated).vectors)
        else:
            vectors = self._by_shared_masks(images, parts)
        return torch.cat(
            [
                together.unflatten(0, (len(part), len(images)))
                for part, together in zip(parts, vectors, strict=True)
            ]
        )

    def _by_shared_masks(self, images: Tensor, parts: list[range]) -> list[Tensor]:
        """Return the vectors of each part of the passes, (passes * n, dim)."""
        kind = (images.shape[1:], images.device)
        kept = self._kept
        passes = Passes(self.passes, kept[1] if kept is not None and kept[0] == kind else {})
        vectors = []
        for part in parts:
            passes.choose(slice(part.start, part.stop))
            with at_work(passes):
                vectors.append(self.network(images).vectors)
        self._kept = (kind, passes.masks)  # once all of them are drawn, and then never changed
        return vectors

    def _embed(self, images: Tensor) -> Embedding:
        stacked = self._passes(images)
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
