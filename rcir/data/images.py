"""Reading one image, whatever it is given as, without trusting it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from rcir.errors import InvalidImage

MAX_PIXELS = 100_000_000

ImageLike: TypeAlias = "str | os.PathLike[str] | Image.Image | NDArray[Any]"


def read_image(source: ImageLike, channels: int) -> NDArray[np.uint8]:
    """One image as an array of 8-bit values.

    Args:
        source: a path, a PIL image, or a uint8 array (H, W), (H, W, 1) or (H, W, 3).
        channels: 1 for grey, 3 for RGB; the image is converted.

    Returns:
        (H, W) for one channel, (H, W, 3) for three. A file's EXIF rotation is applied.

    Raises:
        InvalidImage: not an image, truncated, empty, larger than 100 million pixels (known from
            the header, before anything is decoded), deeper than 8 bits, or of a wrong type.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source, channels)
    if isinstance(source, Image.Image):
        with _pillow("the PIL image"):
            return _from_pil(source, "the PIL image", channels)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise InvalidImage(f"there is no file {path}: give the path of an image file")
        with _pillow(str(path)), Image.open(path) as image:
            return _from_pil(image, str(path), channels)
    raise InvalidImage(
        f"an image is given as {type(source).__name__}; give a path, a PIL image or a uint8 array"
    )


@contextmanager
def _pillow(name: str) -> Iterator[None]:
    """Run Pillow on an image: whatever it raises becomes `InvalidImage`."""
    try:
        with warnings.catch_warnings():
            # Of large images, which `_from_pil` judges, and of metadata that is not used.
            warnings.simplefilter("ignore")
            yield
    except InvalidImage:
        raise
    except UnidentifiedImageError as error:
        raise InvalidImage(
            f"{name} is not an image, whatever its name says: give a JPEG, PNG or other file that "
            "Pillow reads"
        ) from error
    except Image.DecompressionBombError as error:
        raise InvalidImage(f"{name} is too large: {error}; give a smaller picture") from error
    except Exception as error:  # a decoder of damaged bytes raises almost anything
        raise InvalidImage(
            f"{name} is truncated, damaged or not readable ({error}): replace it"
        ) from error


def _from_pil(image: Image.Image, name: str, channels: int) -> NDArray[np.uint8]:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InvalidImage(
            f"{name} declares {width} x {height} pixels; at most {MAX_PIXELS:,} pixels are "
            "decoded: scale it down first"
        )
    if width * height == 0:
        raise InvalidImage(f"{name} is {width} x {height} pixels: it is empty")
    if image.mode.startswith(("I", "F")):
        raise InvalidImage(
            f"{name} has pixels of mode {image.mode}, deeper than 8 bits: map the range that "
            "matters to 0..255 first, in the way the encoder's training images were"
        )
    upright = ImageOps.exif_transpose(image)
    return np.asarray(upright.convert("L" if channels == 1 else "RGB"))


def _from_array(array: NDArray[Any], channels: int) -> NDArray[np.uint8]:
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
    return np.asarray(Image.fromarray(array).convert("L" if channels == 1 else "RGB"))
