"""Arrays of pixels: from PIL images and from arrays, checked and resized."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from rcir.errors import InvalidImage

MAX_PIXELS = 100_000_000
SURPLUS = 1 + 1e-9


def resize(
    images: NDArray[np.uint8], size: tuple[int, int], extent: tuple[float, float] | None = None
) -> Tensor:
    """uint8 (n, H, W) or (n, H, W, 3) as (n, channels, *size): bilinear, antialiased.

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
        return interpolate(tensor, scale_factor=scale, mode="bilinear", antialias=True)
    if tuple(tensor.shape[-2:]) == tuple(size):
        return tensor.contiguous()
    return interpolate(tensor, size=size, mode="bilinear", antialias=True)


def resize_one(
    pixels: NDArray[np.uint8],
    size: tuple[int, int] | None,
    extent: tuple[float, float] | None = None,
) -> NDArray[np.uint8]:
    """(H, W) or (H, W, 3) as (*size) or (*size, 3)."""
    if size is None:
        return pixels
    resized = resize(pixels[None], size, extent)[0]
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
