"""JPEG files: decoded at a reduced scale where that is enough, and turned upright."""

from __future__ import annotations

import os
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, JpegImagePlugin
from torch import Tensor

from rcir.data.pixels import Resizing, mode_of, resize_one, to_pixels

MAX_BYTES = 1 << 26  # of a file that is held in memory as a whole; larger ones are streamed
MARGIN = 2  # a JPEG decoded at a reduced scale has this many times the size that is asked for
TURNS = {  # what makes an image upright, by its EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_jpeg(
    file: BinaryIO,
    image: JpegImagePlugin.JpegImageFile,
    channels: int,
    resizing: Resizing | None,
) -> NDArray[np.uint8]:
    """(H, W) or (H, W, 3) of a JPEG file that Pillow has opened, see `rcir.data.read_image`."""
    by_torchvision = image.mode in ("L", "RGB")  # not CMYK, of which there are two conventions
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    width, height = image.size
    # Resized first and turned then: what is turned is small.
    lying = orientation in (5, 6, 7, 8)
    upright = (width, height) if lying else (height, width)
    scaled = None if resizing is None else resizing.scaled(*upright)
    stored = scaled[::-1] if scaled is not None and lying else scaled
    wanted = None if stored is None else (MARGIN * stored[1], MARGIN * stored[0])
    box = image.draft(mode_of(channels), wanted)
    # A reduced picture's last row and column may be padding in part.
    extent = None if box is None else (box[1][3], box[1][2])
    whole = image.size == (width, height)
    pixels = _all_pixels(file, image.size, channels) if whole and by_torchvision else None
    if pixels is None:
        pixels = to_pixels(image, channels)
    if resizing is None or scaled is None:
        return _upright(pixels, orientation)
    resized = resize_one(pixels, stored, extent, resizing.interpolation)
    return _upright(resized, orientation)[resizing.window(*scaled)]


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    if orientation not in TURNS:
        return pixels
    return np.asarray(Image.fromarray(pixels).transpose(TURNS[orientation]))


def _all_pixels(file: BinaryIO, size: tuple[int, int], channels: int) -> NDArray[np.uint8] | None:
    """By torchvision, faster at full scale; None for what it refuses, which Pillow is to judge."""
    length = file.seek(0, os.SEEK_END)
    if length > MAX_BYTES:
        return None
    file.seek(0)
    content = bytearray(file.read(length))
    try:
        pixels = decode_jpeg(torch.frombuffer(content, dtype=torch.uint8), channels)
    except RuntimeError:
        return None
    if pixels.shape[:0:-1] != size:
        return None
    array: NDArray[np.uint8] = (pixels[0] if channels == 1 else pixels.permute(1, 2, 0)).numpy()
    return array


def decode_jpeg(content: Tensor, channels: int) -> Tensor:
    """uint8 (channels, H, W) of a file's bytes; `RuntimeError` for what torchvision refuses."""
    # Slow to import; other files need none. The package, of which all threads wait for the same:
    # they would wait for each other where one takes the package and one a module in it.
    import torchvision

    mode = "GRAY" if channels == 1 else "RGB"
    pixels: Tensor = torchvision.io.decode_jpeg(content, torchvision.io.ImageReadMode[mode])
    return pixels
