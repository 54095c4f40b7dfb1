"""Digests of files and of pixels, by which the same picture is known again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, file_digest
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # digests of vectors need nothing that reads images
    from rcir.data.images import ImageLike

BYTES = 16  # of 2**64 different pictures, two would have the same digest


def digests(images: Sequence[ImageLike] | NDArray[Any]) -> NDArray[np.bytes_]:
    """A digest of each image, by which the same picture is found again.

    That of a path is of the file's bytes, so that it is read but not decoded; that of an array or
    a PIL image is of shape and pixels as `read_image` gives them. A picture that was encoded anew,
    and a file beside the array of its pixels, have different digests.

    Args:
        images: n of what `read_image` takes; paths are read in threads. Or vectors, an array (n, d)
            of floats: the digest of each is of its numbers.

    Returns:
        (n,) of dtype "S32": BLAKE2b of 128 bits in hexadecimal digits, so that numpy's `isin` and
        `unique` take them.

    Raises:
        InvalidImage: a file cannot be read, or something else is not an image.

    Example:
        >>> first, second, third = digests(np.array([[[1, 2]], [[2, 1]], [[1, 2]]], np.uint8))
        >>> bool(first == third), bool(first == second), first.dtype
        (True, False, dtype('S32'))
        >>> bool(first == digests([np.array([[1], [2]], np.uint8)])[0])  # another shape
        False
    """
    if isinstance(images, np.ndarray) and images.dtype.kind == "f":
        rows = np.ascontiguousarray(images, np.float32)
        hexadecimal = [blake2b(row.data, digest_size=BYTES).hexdigest() for row in rows]
    elif len(images) > 1 and all(isinstance(image, str | os.PathLike) for image in images):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hexadecimal = list(pool.map(_digest, images))
    else:
        hexadecimal = [_digest(image) for image in images]
    return np.array(hexadecimal, dtype=f"S{2 * BYTES}")


def _digest(image: ImageLike) -> str:
    from PIL import Image

    from rcir.data.images import UntrustedImage, open_image, read_image

    if isinstance(image, str | os.PathLike | bytes | UntrustedImage):
        with open_image(image) as file:
            return file_digest(file, lambda: blake2b(digest_size=BYTES)).hexdigest()
    if isinstance(image, Image.Image):
        grey = image.mode in ("1", "L")
    else:
        grey = np.shape(image)[2:] in ((), (1,))
    pixels = read_image(image, channels=1 if grey else 3)
    digest = blake2b(repr(pixels.shape).encode(), digest_size=BYTES)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()
