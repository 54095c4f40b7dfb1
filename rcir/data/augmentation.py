"""Random transforms of training images, drawn afresh at every step.

Drawing is apart from changing: the numbers for a whole batch come first, and whoever holds some of
its images changes these alone. So the result is the same however a batch is shared out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.data import colour
from rcir.data.warp import draw_warps, warp
from rcir.errors import InvalidConfig

PIXELS_AT_ONCE = (
    1 << 19
)  # values changed at a time: what a processor's cache holds, 2 MiB of float32


def occlude(
    images: NDArray[np.uint8], probability: float, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Hide part of some images behind black squares (Oh et al., ICLR 2019, appendix A).

    Each square tile of an image (a digit, or the whole of a square image) is hit with the given
    probability, on its own, by a square of side L in {0, ..., tile} at a uniform place inside it.

    Args:
        images: (n, ..., s, m * s) uint8, m tiles side by side.
        probability: of a tile to be hit, in [0, 1].
        rng: source of all randomness.

    Returns:
        The images (a copy), and for each whether a square of side 1 or more was drawn.
    """
    n, side, width = len(images), *images.shape[-2:]
    squares = _draw_squares(n, (side, width), probability, rng)
    mask = _hidden(squares, side)
    mask = mask.reshape(n, *(1,) * (images.ndim - 3), *mask.shape[1:])
    return np.where(mask, 0, images).astype(np.uint8), np.any(squares[..., 2] > 0, axis=1)


def _draw_squares(
    n: int, size: tuple[int, int], probability: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Row, column and side of the square in each tile, (n, tiles, 3)."""
    side, tiles = size[0], size[1] // size[0]
    hit = rng.random((n, tiles)) < probability
    length = np.where(hit, rng.integers(0, side + 1, (n, tiles)), 0)
    corner = np.floor(rng.random((2, n, tiles)) * (side - length + 1)).astype(np.int64)
    return np.stack([*corner, length], axis=-1)


def _hidden(squares: NDArray[np.int64], side: int) -> NDArray[np.bool_]:
    """Which pixels squares hide, (n, side, tiles * side)."""
    first, end = squares[..., :2, None], squares[..., :2, None] + squares[..., 2:, None]
    inside = (np.arange(side) >= first) & (np.arange(side) < end)  # (n, tiles, 2, side)
    hidden = inside[:, :, 0, :, None] & inside[:, :, 1, None, :]
    return hidden.transpose(0, 2, 1, 3).reshape(len(squares), side, squares.shape[1] * side)


@dataclass(frozen=True)
class TransformParameters:
    """Parameters of the transform of each of n images; None where nothing is done.

    Attributes:
        mirrored: (n,) bool, whether it is flipped left to right; None if the warps do it.
        warps: (n, 2, 3), see `rcir.data.warp`.
        brightness, contrast, saturation: (n,) factors.
        hue: (n,) shifts, of the colour circle.
        squares: (n, tiles, 3) row, column and side of the square that hides part of each tile.
    """

    mirrored: NDArray[np.bool_] | None = None
    warps: NDArray[np.float32] | None = None
    brightness: NDArray[np.float32] | None = None
    contrast: NDArray[np.float32] | None = None
    saturation: NDArray[np.float32] | None = None
    hue: NDArray[np.float32] | None = None
    squares: NDArray[np.int64] | None = None

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> TransformParameters:
        """Those of some of the images."""
        values = (getattr(self, field.name) for field in fields(self))
        return TransformParameters(*(None if value is None else value[rows] for value in values))

    def __call__(self, images: Tensor) -> Tensor:
        """Change uint8 images (n, C, H, W); an image's result depends on nothing but itself."""
        if self.mirrored is not None:
            chosen = torch.from_numpy(self.mirrored).to(images.device)
            images = torch.where(chosen[:, None, None, None], images.flip(-1), images)
        colours = (self.brightness, self.contrast, self.saturation, self.hue)
        if self.warps is not None or any(values is not None for values in colours):
            changed = torch.empty_like(images, memory_format=torch.contiguous_format)
            step = len(images)
            if images.device.type == "cpu":
                step = PIXELS_AT_ONCE // images.shape[1:].numel()
            step = max(1, step)
            for start in range(0, len(images), step):
                rows = slice(start, start + step)
                changed[rows] = self[rows]._interpolated(images[rows])
            images = changed
        if self.squares is not None:
            mask = torch.from_numpy(_hidden(self.squares, images.shape[-2])).to(images.device)
            images = images.masked_fill(mask[:, None], 0)
        return images

    def _interpolated(self, images: Tensor) -> Tensor:
        """Warped and recoloured, float32 whole numbers in [0, 255]."""
        values = images.to(torch.float32, memory_format=torch.contiguous_format)
        if self.warps is not None:
            values = warp(values, torch.from_numpy(self.warps).to(images.device))
        for adjust, parameters in (
            (colour.adjust_brightness, self.brightness),
            (colour.adjust_contrast, self.contrast),
            (colour.adjust_saturation, self.saturation),
            (colour.shift_hue, self.hue),
        ):
            if parameters is not None:
                adjust(values, torch.from_numpy(parameters).to(images.device).view(-1, 1, 1, 1))
        return values.clamp_(0, 255).round_()


@dataclass(frozen=True)
class Augmentation:
    """Random transforms of training images: warps, colours, then occlusion.

    Args:
        occlusion: probability of a tile to be hit by a black square, see `occlude`; the width of
            the images must be a multiple of their height.
        flip: mirror every second image, on average, left to right.
        rotation: degrees in [0, 180]; angles are uniform in [-rotation, rotation], black outside.
        crop: smallest share of the area that a random crop keeps, in (0, 1]; it is resized to the
            whole, and stretched by up to 4/3. 1 crops nothing.
        jitter: (brightness, contrast, saturation, hue): the first three are factors, uniform in
            [1 - b, 1 + b] for b in [0, 1], the last is a shift, uniform in [-h, h] of the colour
            circle for h in [0, 0.5]. They are applied in this order; grey images have no saturation
            and no hue.

    Example:
        >>> import numpy as np, torch
        >>> images = torch.zeros(6, 3, 32, 32, dtype=torch.uint8)
        >>> augmentation = Augmentation(rotation=10, jitter=(0.2, 0.2, 0.2, 0.1))
        >>> changes = augmentation.draw(6, (32, 32), np.random.default_rng(0))
        >>> torch.equal(changes(images)[2:4], changes[2:4](images[2:4]))
        True
    """

    occlusion: float = 0.0
    flip: bool = False
    rotation: float = 0.0
    crop: float = 1.0
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.occlusion <= 1:
            raise InvalidConfig(f"augmentation.occlusion is {self.occlusion}; it must be in [0, 1]")
        if not 0 <= self.rotation <= 180:
            raise InvalidConfig(f"augmentation.rotation is {self.rotation}; it must be in [0, 180]")
        if not 0 < self.crop <= 1:
            raise InvalidConfig(f"augmentation.crop is {self.crop}; it must be in (0, 1]")
        most = (1, 1, 1, 0.5)
        if len(self.jitter) != 4 or not all(
            0 <= value <= limit for value, limit in zip(self.jitter, most, strict=True)
        ):
            raise InvalidConfig(
                f"augmentation.jitter is {list(self.jitter)}; it must be brightness, contrast and "
                "saturation in [0, 1] and hue in [0, 0.5]"
            )

    def draw(self, n: int, size: tuple[int, int], rng: np.random.Generator) -> TransformParameters:
        """Draw the parameters for n images of `size` (height, width)."""
        mirrored = rng.random(n) < 0.5 if self.flip else None
        warps = None
        if self.rotation or self.crop < 1:
            flips = np.zeros(n, np.bool_) if mirrored is None else mirrored
            warps, mirrored = draw_warps(n, size, self.rotation, self.crop, flips, rng), None
        *factors, hue = (
            rng.uniform(-spread, spread, n).astype(np.float32) if spread else None
            for spread in self.jitter
        )
        brightness, contrast, saturation = (None if f is None else 1 + f for f in factors)
        squares = _draw_squares(n, size, self.occlusion, rng) if self.occlusion else None
        return TransformParameters(mirrored, warps, brightness, contrast, saturation, hue, squares)
