"""Reading images, whatever they are given as, without trusting them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, JpegImagePlugin, UnidentifiedImageError

from rcir.data.jpeg import read_jpeg
from rcir.data.pixels import MAX_PIXELS, Resizing, as_pixels, to_pixels
from rcir.errors import InvalidImage

FORMATS = {  # by Pillow's name, with the endings of their files
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "PPM": (".pgm", ".ppm", ".pbm", ".pnm"),
}
ENDINGS = tuple(ending for endings in FORMATS.values() for ending in endings)
STEP = 8  # images that a thread takes at a time

ImageLike: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | NDArray[Any]"


def read_image(
    source: ImageLike, channels: int, size: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """One image as an array of 8-bit values.

    Args:
        source: the path of a file of one of `FORMATS`, whatever its name, or what such a file
            holds, as bytes; a PIL image; or a uint8 array (H, W), (H, W, 1) or (H, W, 3).
        channels: 1 for grey, 3 for RGB; the image is converted.
        size: (height, width) to resize to (bilinear, antialiased); None for the image's own. A
            JPEG file is then decoded at 1/2, 1/4 or 1/8 of its scale, which is faster, where that
            leaves at least twice the size.

    Returns:
        (H, W) for one channel, (H, W, 3) for three; of the size, if one is given. A file's EXIF
        rotation is applied.

    Raises:
        InvalidImage: not an image of one of `FORMATS`, truncated, empty, larger than 100 million
            pixels (known from the header, before anything is decoded), deeper than 8 bits, or of a
            wrong type.
    """
    resizing = None if size is None else Resizing(size)
    if isinstance(source, np.ndarray):
        return _read(source, channels, resizing)
    with _no_warnings():
        return _read(source, channels, resizing)


def image_size(source: str | os.PathLike[str] | bytes) -> tuple[int, int]:
    """Width and height that the file of an image declares; nothing is decoded.

    Raises:
        InvalidImage: as `read_image` does.

    Example:
        >>> file = BytesIO()
        >>> Image.new("L", (2, 3)).save(file, "PNG")
        >>> image_size(file.getvalue())
        (2, 3)
    """
    with (
        _no_warnings(),
        open_image(source) as file,
        Image.open(file, formats=tuple(FORMATS)) as image,
    ):
        _check(image, image_name(source))
        return image.size


def read_images(
    sources: Sequence[ImageLike] | NDArray[Any], channels: int, resizing: Resizing
) -> NDArray[np.uint8]:
    """Images as `read_image` gives them, resized; paths are read in as many threads as torch uses.

    Beside the result, one image for each thread is in memory.

    Returns:
        (n, *resizing.size) for one channel, (n, *resizing.size, 3) for three.

    Raises:
        InvalidImage: of the first image, in the order given, that cannot be read.
    """
    images = np.empty((len(sources), *resizing.size, *(3,) * (channels == 3)), np.uint8)

    def work(start: int) -> None:
        for row in range(start, min(start + STEP, len(sources))):
            images[row] = _read(sources[row], channels, resizing)

    starts = range(0, len(sources), STEP)
    # A PIL image may be given twice, and is decoded when first used: not by two threads at once.
    paths = all(isinstance(source, str | os.PathLike) for source in sources)
    threads = min(torch.get_num_threads(), len(starts)) if paths else 1
    # Once for all threads, since the filters of warnings are shared between them.
    with _no_warnings():
        if threads <= 1:
            for start in starts:
                work(start)
        else:
            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(work, starts):  # in order, and so is the first error
                    pass
    return images


def faults(sources: Sequence[ImageLike]) -> Iterator[str | None]:
    """Of each image, in order, what `read_image` says is wrong with it, or None; in threads."""

    def fault(source: ImageLike) -> str | None:
        try:
            _read(source, 3, None)
        except InvalidImage as error:
            return str(error)
        return None

    # Once for all threads, as in `read_images`.
    with _no_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(fault, sources)


@contextmanager
def open_image(source: str | os.PathLike[str] | bytes) -> Iterator[BufferedReader | BytesIO]:
    """The file of an image, open to be read; what goes wrong meanwhile becomes `InvalidImage`."""
    if isinstance(source, bytes):
        with _pillow(image_name(source)):
            yield BytesIO(source)
        return
    place = Path(source)
    if not place.is_file():
        raise InvalidImage(f"there is no file {place}: give the path of an image file")
    with _pillow(str(place)), place.open("rb") as file:
        yield file


def image_name(source: str | os.PathLike[str] | bytes) -> str:
    """The name of an image's file in errors."""
    return f"the picture of {len(source)} bytes" if isinstance(source, bytes) else str(Path(source))


def _read(source: ImageLike, channels: int, resizing: Resizing | None) -> NDArray[np.uint8]:
    if isinstance(source, np.ndarray):
        return _resized(as_pixels(source, channels), resizing)
    if isinstance(source, Image.Image):
        with _pillow("the PIL image"):
            _check(source, "the PIL image")
            return _resized(to_pixels(ImageOps.exif_transpose(source), channels), resizing)
    if isinstance(source, str | os.PathLike | bytes):
        # Of all that Pillow knows, some formats run other programs, as EPS runs Ghostscript.
        with open_image(source) as file, Image.open(file, formats=tuple(FORMATS)) as image:
            _check(image, image_name(source))
            if isinstance(image, JpegImagePlugin.JpegImageFile):
                return read_jpeg(file, image, channels, resizing)
            ImageOps.exif_transpose(image, in_place=True)
            return _resized(to_pixels(image, channels), resizing)
    raise InvalidImage(
        f"an image is given as {type(source).__name__}; give a path, the bytes of a file, a PIL "
        "image or a uint8 array"
    )


def _resized(pixels: NDArray[np.uint8], resizing: Resizing | None) -> NDArray[np.uint8]:
    return pixels if resizing is None else resizing.one(pixels)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Silence Pillow on large images, which `_check` judges, and on metadata that is not used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _pillow(name: str) -> Iterator[None]:
    """Run Pillow on an image: whatever it raises becomes `InvalidImage`."""
    try:
        yield
    except InvalidImage:
        raise
    except UnidentifiedImageError as error:
        raise InvalidImage(
            f"{name} is not an image, whatever its name says, of a format that is read: give a "
            f"{', '.join(FORMATS)}"
        ) from error
    except Image.DecompressionBombError as error:
        raise InvalidImage(f"{name} is too large: {error}; give a smaller picture") from error
    except Exception as error:  # a decoder of damaged bytes raises almost anything
        raise InvalidImage(
            f"{name} is truncated, damaged or not readable ({error}): replace it"
        ) from error


def _check(image: Image.Image, name: str) -> None:
    """Refuse by the header, before anything is decoded."""
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
