"""Random transforms of training images, drawn afresh at every step.

The numbers for a whole batch are drawn first, and each process transforms its own images, so that
the result does not depend on how a batch is shared out. Colours are changed as by torchvision's
`ColorJitter`, image by image; rotation, crop and mirroring are one affine warp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rcir.errors import InvalidConfig
from rcir.torch_settings import copy_to

CROP_RATIOS = (3 / 4, 4 / 3)
ERASED_AREA, ERASED_RATIO = (0.02, 0.4), 0.3  # of random erasing
LUMA_WEIGHTS = (0.2989, 0.587, 0.114)  # ITU-R BT.601
# Values that are changed at a time: 2 MiB of float32, which fit into a processor's cache.
MAX_BATCH_PIXELS = 1 << 19


def draw_warps(
    n: int,
    size: tuple[int, int],
    rotation: float,
    crop: float,
    mirrored: NDArray[np.bool_],
    rng: np.random.Generator,
) -> NDArray[np.float32]:
    """Draw n warps: a rotation about the centre, then a crop resized to the whole, then mirroring.

    Angles are uniform in [-rotation, rotation] degrees, counterclockwise; `mirrored` (n,) says
    which images are mirrored. The area of the crop is uniform in [crop, 1], the ratio of its sides
    log-uniform in [3/4, 4/3] of the image's, if such a crop fits, its place uniform. Return (n, 2,
    3), from places in the result to places in the image: both are (x, y, 1), where x and y run from
    -1 to 1 between the outer borders.
    """
    angle = np.radians(rng.uniform(-rotation, rotation, n))
    area = rng.uniform(crop, 1, n)
    low, high = np.maximum(CROP_RATIOS[0], area), np.minimum(CROP_RATIOS[1], 1 / area)
    ratio = np.exp(rng.uniform(np.log(low), np.log(high)))
    scale = np.minimum(np.sqrt([area * ratio, area / ratio]), 1)
    x, y = (1 - scale) * rng.uniform(-1, 1, (2, n))  # centre of the crop
    across, down = scale * np.stack([np.where(mirrored, -1, 1), np.ones(n)])
    aspect = size[0] / size[1]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array(
        [
            [across * cos, -down * sin * aspect, x * cos - y * sin * aspect],
            [across * sin / aspect, down * cos, x * sin / aspect + y * cos],
        ],
        np.float32,
    ).transpose(2, 0, 1)


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Warp float32 images (n, C, H, W) by matrices (n, 2, 3); bilinear, black outside."""
    height, width = images.shape[-2:]
    x, y = (
        (torch.arange(length, device=images.device) * 2 + (1 - length)) / length
        for length in (width, height)
    )
    a, b, c = matrices[:, :, :, None, None].unbind(2)  # each (n, 2, 1, 1)
    grid = (x * a + c) + y[:, None] * b
    return F.grid_sample(images, grid.permute(0, 2, 3, 1), "bilinear", "zeros", align_corners=False)


def adjust_brightness(images: Tensor, factor: Tensor) -> None:
    """Scale values by factors of at least 0."""
    images.mul_(factor).clamp_(0, 255)


def adjust_contrast(images: Tensor, factor: Tensor) -> None:
    """Scale differences to the mean of the grey image by factors of at least 0."""
    # Sums of whole numbers are exact: they do not depend on how threads share the work.
    sums = images.round_().sum(-1).sum(-1, dtype=torch.float64)
    if images.shape[1] == 3:
        sums = (
            sums[:, :1] * LUMA_WEIGHTS[0]
            + sums[:, 1:2] * LUMA_WEIGHTS[1]
            + sums[:, 2:] * LUMA_WEIGHTS[2]
        )
    mean = (sums / images.shape[2:].numel()).float().view(-1, 1, 1, 1)
    images.sub_(mean).mul_(factor).add_(mean).clamp_(0, 255)


def adjust_saturation(images: Tensor, factor: Tensor) -> None:
    """Scale differences to the grey image by factors of at least 0; grey images stay."""
    if images.shape[1] == 1:
        return
    red, green, blue = (images[:, i : i + 1] * weight for i, weight in enumerate(LUMA_WEIGHTS))
    grey = red.add_(green).add_(blue)
    images.sub_(grey).mul_(factor).add_(grey).clamp_(0, 255)


def shift_hue(images: Tensor, shift: Tensor) -> None:
    """Turn hues by shifts in [-0.5, 0.5] of the colour circle; grey images stay.

    Value and chroma of the HSV model stay. A channel is the largest value, less the chroma where
    the hue is 2 to 3 sixths of the circle from its own, less a part of it from 1 sixth on.
    """
    if images.shape[1] == 1:
        return
    red, green, blue = images.unbind(1)
    high = torch.maximum(torch.maximum(red, green), blue)
    chroma = high - torch.minimum(torch.minimum(red, green), blue)
    scale = torch.where(chroma > 0, chroma, 1).mul_(6).reciprocal_()
    hue = torch.where(
        green == high, (blue - red).mul_(scale).add_(1 / 3), (red - green).mul_(scale).add_(2 / 3)
    )
    hue = torch.where(red == high, (green - blue).mul_(scale), hue).add_(shift.view(-1, 1, 1))
    for channel, own in enumerate((0.0, 1 / 3, 2 / 3)):
        away = hue - own
        away.sub_(away.round()).abs_()  # of the circle, at most half
        torch.sub(high, away.mul_(6).sub_(1).clamp_(0, 1).mul_(chroma), out=images[:, channel])


def gaussians(deviation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weights (n, 2 * radius + 1) of Gaussians (n,) in pixels, up to 3 deviations."""
    radius = np.ceil(3 * deviation.astype(np.float64))[:, None]
    steps = np.arange(-radius.max(), radius.max() + 1)
    weights = np.exp(-0.5 * (steps / np.maximum(deviation, 1e-3)[:, None]) ** 2)
    weights *= np.abs(steps) <= radius
    normed: NDArray[np.float32] = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return normed


def blur(images: Tensor, weights: Tensor) -> Tensor:
    """Blur float32 images (n, C, H, W) by weights (n, 2 * radius + 1); borders are repeated."""
    radius = weights.shape[1] // 2
    for axis, sides in ((-1, (radius, radius, 0, 0)), (-2, (0, 0, radius, radius))):
        padded, length = F.pad(images, sides, "replicate"), images.shape[axis]
        images = torch.zeros_like(images)
        for number, weight in enumerate(weights[:, :, None, None, None].unbind(1)):
            images += padded.narrow(axis, number, length) * weight
    return images


def occlude(
    images: NDArray[np.uint8], probability: float, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Hide part of some images behind black squares (Oh et al., ICLR 2019, appendix A).

    Each square tile of an image (n, ..., s, m * s) is hit with the given probability by a square of
    side L in {0, ..., s} at a uniform place inside it. Also return which images were hit (L > 0).
    """
    n, side, width = len(images), *images.shape[-2:]
    squares = _draw_squares(n, (side, width), probability, rng)
    mask = _mask_squares(squares, side)
    mask = mask.reshape(n, *(1,) * (images.ndim - 3), *mask.shape[1:])
    return np.where(mask, 0, images).astype(np.uint8), np.any(squares[..., 2] > 0, axis=1)


def _draw_squares(
    n: int, size: tuple[int, int], probability: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the row, column and side of the square in each tile, (n, tiles, 3)."""
    side, tiles = size[0], size[1] // size[0]
    hit = rng.random((n, tiles)) < probability
    length = np.where(hit, rng.integers(0, side + 1, (n, tiles)), 0)
    corner = np.floor(rng.random((2, n, tiles)) * (side - length + 1)).astype(np.int64)
    return np.stack([*corner, length], axis=-1)


def _mask_squares(squares: NDArray[np.int64], side: int) -> NDArray[np.bool_]:
    """Return the pixels (n, side, tiles * side) that squares hide."""
    first, end = squares[..., :2, None], squares[..., :2, None] + squares[..., 2:, None]
    inside = (np.arange(side) >= first) & (np.arange(side) < end)  # (n, tiles, 2, side)
    hidden = inside[:, :, 0, :, None] & inside[:, :, 1, None, :]
    return hidden.transpose(0, 2, 1, 3).reshape(len(squares), side, squares.shape[1] * side)


def _draw_boxes(
    n: int, size: tuple[int, int], probability: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the (top, left, bottom, right) of the rectangle to erase in each image, (n, 4).

    A side that does not fit becomes that of the image.
    """
    area = rng.uniform(*ERASED_AREA, n) * (rng.random(n) < probability) * size[0] * size[1]
    ratio, lengths = ERASED_RATIO ** rng.uniform(-1, 1, n), np.array(size)[:, None]
    sides = np.minimum(np.sqrt([area * ratio, area / ratio]).round(), lengths)
    first = np.floor(rng.random((2, n)) * (lengths - sides + 1))
    return np.concatenate([first, first + sides]).T.astype(np.int64)


def _mask_boxes(boxes: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the pixels (n, *size) that boxes cover."""
    rows, columns = (np.arange(length)[None] for length in size)
    top, left, bottom, right = boxes.T[..., None]
    covered: NDArray[np.bool_] = ((rows >= top) & (rows < bottom))[:, :, None] & (
        (columns >= left) & (columns < right)
    )[:, None]
    return covered


@dataclass(frozen=True)
class TransformParameters:
    """Parameters of the transform of each of n images; None where nothing is done.

    Attributes:
        mirrored: (n,) bool, whether it is flipped left to right; None if the warps do it.
        warps: (n, 2, 3), see `rcir.data.augmentation`.
        brightness, contrast, saturation: (n,) factors.
        hue: (n,) shifts, of the colour circle.
        squares: (n, tiles, 3) row, column and side of the square that hides part of each tile.
        deviation: (n,) of the Gaussian that blurs it, in pixels.
        boxes: (n, 4) top, left, bottom and right of the rectangle that is erased.
    """

    mirrored: NDArray[np.bool_] | None = None
    warps: NDArray[np.float32] | None = None
    brightness: NDArray[np.float32] | None = None
    contrast: NDArray[np.float32] | None = None
    saturation: NDArray[np.float32] | None = None
    hue: NDArray[np.float32] | None = None
    squares: NDArray[np.int64] | None = None
    deviation: NDArray[np.float32] | None = None
    boxes: NDArray[np.int64] | None = None

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> TransformParameters:
        """Return the parameters of some of the images."""
        values = (getattr(self, field.name) for field in fields(self))
        return TransformParameters(*(None if value is None else value[rows] for value in values))

    def __call__(self, images: Tensor) -> Tensor:
        """Change uint8 images (n, C, H, W); an image's result depends on nothing but itself."""
        if self.mirrored is not None:
            chosen = copy_to(self.mirrored, images.device)
            images = torch.where(chosen[:, None, None, None], images.flip(-1), images)
        changes = (self.warps, self.brightness, self.contrast, self.saturation, self.hue)
        if any(values is not None for values in (*changes, self.deviation)):
            changed = torch.empty_like(images, memory_format=torch.contiguous_format)
            on_cpu = images.device.type == "cpu"
            step = MAX_BATCH_PIXELS // images.shape[1:].numel() if on_cpu else len(images)
            step = max(1, step)
            for start in range(0, len(images), step):
                rows = slice(start, start + step)
                changed[rows] = self[rows]._interpolate(images[rows])
            images = changed
        if self.squares is not None:
            mask = copy_to(_mask_squares(self.squares, images.shape[-2]), images.device)
            images = images.masked_fill(mask[:, None], 0)
        if self.boxes is not None:
            height, width = images.shape[-2:]
            mask = copy_to(_mask_boxes(self.boxes, (height, width)), images.device)
            images = images.masked_fill(mask[:, None], 0)
        return images

    def _interpolate(self, images: Tensor) -> Tensor:
        """Warp, recolour and blur images to float32 whole numbers in [0, 255]."""
        values = images.to(torch.float32, memory_format=torch.contiguous_format)
        if self.warps is not None:
            values = warp(values, copy_to(self.warps, images.device))
        for adjust, parameters in (
            (adjust_brightness, self.brightness),
            (adjust_contrast, self.contrast),
            (adjust_saturation, self.saturation),
            (shift_hue, self.hue),
        ):
            if parameters is not None:
                adjust(values, copy_to(parameters, images.device).view(-1, 1, 1, 1))
        if self.deviation is not None:
            values = blur(values, copy_to(gaussians(self.deviation), images.device))
        return values.clamp_(0, 255).round_()


@dataclass(frozen=True)
class Augmentation:
    """Random transforms of training images: warps, colours, blur, occlusion, then erasing.

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
        grey: probability that an image loses its colours; None for 0.
        blur: largest standard deviation of a Gaussian blur, in pixels; that of an image is uniform
            in [0, blur]. None blurs nothing.
        erase: probability that a rectangle becomes black (Zhong et al., AAAI 2020): 2 to 40% of the
            area, with a ratio of the sides log-uniform in [0.3, 1 / 0.3]. None for 0.

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
    grey: float | None = None
    blur: float | None = None
    erase: float | None = None

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
        for name, limit in (("grey", 1.0), ("blur", math.inf), ("erase", 1.0)):
            value = getattr(self, name)
            if value is not None and not (0 <= value <= limit and value < math.inf):
                raise InvalidConfig(f"augmentation.{name} is {value}; it must be in [0, {limit:g}]")

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
        if self.grey:
            coloured = np.ones(n, np.float32) if saturation is None else saturation
            saturation = np.where(rng.random(n) < self.grey, np.float32(0), coloured)
        deviation = rng.uniform(0, self.blur, n).astype(np.float32) if self.blur else None
        boxes = _draw_boxes(n, size, self.erase, rng) if self.erase else None
        return TransformParameters(
            mirrored, warps, brightness, contrast, saturation, hue, squares, deviation, boxes
        )
