"""Arrays of pixels: from PIL images and from arrays, checked and resized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from rcir.errors import InvalidImage

MAX_PIXELS = 100_000_000
SURPLUS = 1 + 1e-9
Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Resizing:
    """How pictures of any size are brought to one.

    Args:
        size: (height, width) of the result.
        interpolation: "bilinear" or "bicubic", both antialiased.
        crop: None resizes the whole picture, whatever its proportions. A share in (0, 1] keeps
            them: the picture is scaled until it just covers size / crop, and its centre is cut out.

    Example:
        >>> Resizing((224, 224), crop=0.875).scaled(600, 300)
        (512, 256)
    """

    size: tuple[int, int]
    interpolation: Interpolation = "bilinear"
    crop: float | None = None

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that a picture of some height and width is resized to, before the cut.

        Rounded as torchvision and timm do.
        """
        if self.crop is None:
            return self.size
        least = int(self.size[0] / self.crop), int(self.size[1] / self.crop)
        if least[0] * width >= least[1] * height:
            return least[0], max(least[1], int(least[0] * width / height))
        return max(least[0], int(least[1] * height / width)), least[1]

    def window(self, height: int, width: int) -> tuple[slice, slice]:
        """Rows and columns of the centre of a scaled picture."""
        top, left = round((height - self.size[0]) / 2), round((width - self.size[1]) / 2)
        return slice(top, top + self.size[0]), slice(left, left + self.size[1])

    def batch(self, images: NDArray[np.uint8]) -> Tensor:
        """uint8 (n, H, W) or (n, H, W, 3) as (n, channels, *size)."""
        height, width = images.shape[1:3]
        scaled = self.scaled(height, width)
        resized = resize(images, scaled, interpolation=self.interpolation)
        return resized if scaled == self.size else resized[..., *self.window(*scaled)].contiguous()

    def one(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(H, W) or (H, W, 3) as (*size) or (*size, 3)."""
        scaled = self.scaled(*pixels.shape[:2])
        resized = resize_one(pixels, scaled, interpolation=self.interpolation)
        return resized[self.window(*scaled)]


def resize(
    images: NDArray[np.uint8],
    size: tuple[int, int],
    extent: tuple[float, float] | None = None,
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """uint8 (n, H, W) or (n, H, W, 3) as (n, channels, *size), antialiased.

    Args:
        extent: (height, width) of the part, from the upper left, that fills the size; None for all.
    """
    values = np.require(images, requirements=["C", "W"]).reshape(-1)
    # Shaped by torch: of one image, numpy's strides may hide that it is stored channels last.
    tensor = torch.from_numpy(values).view(images.shape)
    tensor = tensor[:, None] if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)
    if extent is not None and extent != tuple(tensor.shape[-2:]):
        # The output's size is rounded down, also from a hair below the wanted one.
        scale = tuple(SURPLUS * to / of for to, of in zip(size, extent, strict=True))
        return interpolate(tensor, scale_factor=scale, mode=interpolation, antialias=True)
    if tuple(tensor.shape[-2:]) == tuple(size):
        return tensor.contiguous()
    return interpolate(tensor, size=size, mode=interpolation, antialias=True)


def resize_one(
    pixels: NDArray[np.uint8],
    size: tuple[int, int] | None,
    extent: tuple[float, float] | None = None,
    interpolation: Interpolation = "bilinear",
) -> NDArray[np.uint8]:
    """(H, W) or (H, W, 3) as (*size) or (*size, 3)."""
    if size is None:
        return pixels
    resized = resize(pixels[None], size, extent, interpolation)[0]
    array: NDArray[np.uint8] = (
        resized[0] if pixels.ndim == 2 else resized.permute(1, 2, 0)
    ).numpy()
    return array


def mode_of(channels: int) -> str:
    """Pillow's mode of grey or RGB images."""
    return "L" if channels == 1 else "RGB"


def to_pixels(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    """(H, W) or (H, W, 3) of a PIL image, converted."""
    mode = mode_of(channels)
    return np.asarray(image if image.mode == mode else image.convert(mode))


def as_pixels(array: NDArray[Any], channels: int) -> NDArray[np.uint8]:
    """A uint8 array (H, W), (H, W, 1) or (H, W, 3), converted; `InvalidImage` for any other."""
    if array.dtype != np.uint8:
        nan = array.dtype.kind == "f" and bool(np.isnan(array).any())
        raise InvalidImage(
            f"an image array has dtype {array.dtype}{' and holds NaN' if nan else ''}; give uint8 "
            "values from 0 to 255"
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3) or array.size == 0:
        raise InvalidImage(
            f"an image array has shape {array.shape}; give (height, width) or (height, width, 3)"
        )
    if array.shape[0] * array.shape[1] > MAX_PIXELS:
        raise InvalidImage(
            f"an image array has {array.shape[0] * array.shape[1]:,} pixels; at most "
            f"{MAX_PIXELS:,} are taken: scale it down first"
        )
    if (array.ndim == 2) == (channels == 1):
        return array
    return np.asarray(Image.fromarray(array).convert(mode_of(channels)))
