"""Read images without trusting them: paths, bytes, PIL images and arrays give the same pixels."""

from __future__ import annotations

import os
import re
import struct
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, JpegImagePlugin, TiffImagePlugin, UnidentifiedImageError

from rcir.errors import DataUnavailable, ImageTooLarge, InvalidImage, MissingPackage
from rcir.imports import naming_extras
from rcir.storage import as_text, is_uri, open_file

if TYPE_CHECKING:  # pictures that keep their size need no torch
    from torch import Tensor

MAX_PIXELS = 200_000_000  # of a picture by default; the largest sensors of phones have as many
Interpolation = Literal["bilinear", "bicubic", "nearest", "pillow-bilinear", "pillow-bicubic"]
CropRounding = Literal["nearest", "down"]
PILLOW_MODES = {1: "L", 3: "RGB"}  # by number of channels
WITH_TRANSPARENCY = ("1", "L", "P", "RGB", "LA", "PA", "RGBA", "RGBa")  # modes that may have some
MAX_BYTES = 1 << 26  # of a file that is held in memory as a whole; larger ones are streamed
TURN_BY_ORIENTATION = {  # what makes an image upright, by its EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
FORMATS = {  # by Pillow's name, with the endings of their files
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "PPM": (".pgm", ".ppm", ".pbm", ".pnm"),
}
# Read from paths, bytes and PIL images, but not from uploads: these are stills of video codecs,
# whose decoders run beyond any deadline. Pillow decodes AVIF, and the extra "heif" HEIC.
CODEC_FORMATS = {"AVIF": (".avif",), "HEIF": (".heic", ".heif", ".hif")}
# Pillow gives libtiff the whole file: neither the deadline nor the number of reads would end it.
UNTRUSTED_FORMATS = tuple(name for name in FORMATS if name != "TIFF")
# The names of pictures. One whose format needs an extra that is missing fails when it is read.
IMAGE_ENDINGS = tuple(
    ending for endings in (FORMATS | CODEC_FORMATS).values() for ending in endings
)
HIGH_BIT_DEPTH = re.compile(rb"av1C\x81.[\x40-\x7f\xc0-\xff]", re.DOTALL)  # 10 or 12 bits in AVIF
ImageLike: TypeAlias = (
    "str | os.PathLike[str] | bytes | UntrustedImage | Image.Image | NDArray[Any]"
)
MAX_SEGMENTS = 1_000  # of a JPEG file; the longest ones, 64 KiB each, are 62 MiB
MAX_SCANS = 100  # of a progressive JPEG file; encoders write about 10
MAX_READS = 50_000  # of the parts of a file; 32 MiB of PNG chunks of 8 KiB are read in 12,289
UNTRUSTED_BLOCK = 1 << 12  # bytes decoded between two looks at the deadline; a scan may be shorter
JPEG_MARKER = re.compile(rb"\xff[\x02-\xcf\xd9-\xfe]")  # of JPEG segments, not of restarts
LARGE_PIXELS = 1 << 25  # a larger picture takes some 300 MB or more while it is decoded
_large = Lock()
_runs_pillow: ContextVar[bool] = ContextVar("runs_pillow", default=False)


@dataclass(frozen=True)
class Resizing:
    """The ways to bring pictures to one size.

    Args:
        size: (height, width) of the result.
        interpolation: "bilinear" or "bicubic", both antialiased, or "nearest", as PyTorch computes
            them (the last as "nearest-exact"); "pillow-bilinear" or "pillow-bicubic" as Pillow
            does, which takes up to ten times as long for large pictures.
        crop: None resizes the whole picture, whatever its proportions. A share in (0, 1] keeps
            them: the picture is scaled until it just covers size / crop, and its centre is cut out.
        stretch: with a crop, scale height and width each to size / crop, whatever the proportions.
        crop_rounding: the side of an odd margin that gets the extra pixel: "nearest" rounds half
            the margin to the nearest integer, half to even, as torchvision does; "down" rounds it
            down, as transformers does.
    """

    size: tuple[int, int]
    interpolation: Interpolation = "bilinear"
    crop: float | None = None
    stretch: bool = False
    crop_rounding: CropRounding = "nearest"

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that a picture is scaled to before the crop.

        Rounded as torchvision does for squares, and as timm and OpenCLIP do for other rectangles.
        """
        if self.crop is None:
            return self.size
        least = int(self.size[0] / self.crop), int(self.size[1] / self.crop)
        if self.stretch:
            return least
        if least[0] != least[1]:
            ratio = min(height / least[0], width / least[1])
            return round(height / ratio), round(width / ratio)
        if width >= height:
            return least[0], int(least[0] * width / height)
        return int(least[1] * height / width), least[1]

    def window(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the rows and columns of the centre of a scaled picture."""
        rounded = round if self.crop_rounding == "nearest" else int
        top, left = rounded((height - self.size[0]) / 2), rounded((width - self.size[1]) / 2)
        return slice(top, top + self.size[0]), slice(left, left + self.size[1])

    def batch(self, images: NDArray[np.uint8]) -> Tensor:
        """Resize uint8 (n, H, W) or (n, H, W, 3) to (n, channels, *size)."""
        scaled = self.scaled(*images.shape[1:3])
        resized = resize(images, scaled, self.interpolation)
        return resized if scaled == self.size else resized[..., *self.window(*scaled)].contiguous()

    def image(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Resize (H, W) or (H, W, 3) to (*size) or (*size, 3)."""
        resized = self.batch(pixels[None])[0]
        return _channels_last(resized)


def resize(
    images: NDArray[np.uint8], size: tuple[int, int], interpolation: Interpolation
) -> Tensor:
    """Resize uint8 (n, H, W) or (n, H, W, 3) to (n, channels, *size); see `Resizing`."""
    import torch
    from torch.nn.functional import interpolate

    if interpolation.startswith("pillow-"):
        method = Image.Resampling[interpolation.removeprefix("pillow-").upper()]
        pictures = (Image.fromarray(image).resize(size[::-1], method) for image in images)
        images = np.stack([np.asarray(picture) for picture in pictures])
    values = np.require(images, requirements=["C", "W"]).reshape(-1)
    # Shaped by torch: of one image, NumPy's strides may hide that it is stored channels last.
    tensor = torch.from_numpy(values).view(images.shape)
    tensor = tensor[:, None] if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)
    if tuple(tensor.shape[-2:]) == tuple(size):
        return tensor.contiguous()
    if interpolation == "nearest":
        return interpolate(tensor, size=size, mode="nearest-exact")
    return interpolate(tensor, size=size, mode=interpolation, antialias=True)


def _channels_last(image: Tensor) -> NDArray[np.uint8]:
    """Return an image (channels, H, W) as (H, W) or (H, W, 3)."""
    array: NDArray[np.uint8] = (image[0] if len(image) == 1 else image.permute(1, 2, 0)).numpy()
    return array


def to_pixels(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    """Convert a PIL image to (H, W) or (H, W, 3); transparent parts are put on white."""
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode in WITH_TRANSPARENCY and image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode not in ("1", "L", "P", "RGB", "RGBA"):
        image = image.convert("RGB")  # of which grey is the luma, whatever the file stores
    mode = PILLOW_MODES[channels]
    return np.asarray(image if image.mode == mode else image.convert(mode))


def as_pixels(
    array: NDArray[Any], channels: int, max_pixels: int = MAX_PIXELS
) -> NDArray[np.uint8]:
    """Convert a uint8 array (H, W), (H, W, 1) or (H, W, 3); `InvalidImage` for any other."""
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
    _check_pixels("an image array", array.shape[1], array.shape[0], max_pixels)
    if (array.ndim == 2) == (channels == 1):
        return array
    return np.asarray(Image.fromarray(array).convert(PILLOW_MODES[channels]))


def _turn_upright(pixels: NDArray[np.uint8], image: Image.Image) -> NDArray[np.uint8]:
    """Turn the pixels of a PIL image upright by its EXIF orientation."""
    turn = TURN_BY_ORIENTATION.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return pixels if turn is None else np.asarray(Image.fromarray(pixels).transpose(turn))


def _jpeg_pixels(
    file: IO[bytes], image: JpegImagePlugin.JpegImageFile, channels: int
) -> NDArray[np.uint8] | None:
    """Decode by torchvision: the same values, faster. None if it refuses: Pillow decides then."""
    if "torch" not in sys.modules:  # which takes seconds to import
        return None
    import torch

    length = file.seek(0, os.SEEK_END)
    if length > MAX_BYTES or image.mode not in ("L", "RGB"):  # CMYK has two conventions
        return None
    file.seek(0)
    content = bytearray(file.read(length))
    try:
        # Colours stay colours: libjpeg's grey is that of the file, before colours are clipped.
        pixels = decode_jpeg(torch.frombuffer(content, dtype=torch.uint8), len(image.mode))
    except RuntimeError:
        return None
    if pixels.shape[:0:-1] != image.size:
        return None
    array = _channels_last(pixels)
    return as_pixels(array, channels, array.size)


def decode_jpeg(content: Tensor, channels: int) -> Tensor:
    """Decode a file's bytes to uint8 (channels, H, W); `RuntimeError` if torchvision refuses."""
    # Slow to import, and not needed by other files. All threads import the package itself: if one
    # imported the package and one a module in it, they would wait for each other.
    import torchvision

    mode = "GRAY" if channels == 1 else "RGB"
    pixels: Tensor = torchvision.io.decode_jpeg(content, torchvision.io.ImageReadMode[mode])
    return pixels


class UntrustedImage(BytesIO):
    """The bytes of an image file of one of `UNTRUSTED_FORMATS`, decoded in bounded time.

    A small file can take minutes: each scan of a progressive JPEG decodes all of its pixels, and
    Pillow reads the parts of a header one by one. `InvalidImage` is raised at once for too many
    segments or scans; and when it is read, after too many parts or a deadline (`time.monotonic`).
    """

    def __init__(self, content: bytes, deadline: float) -> None:
        super().__init__(content)
        self._deadline, self._reads = deadline, 0
        if content.startswith(b"\xff\xd8"):
            self._check_jpeg(content)

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MAX_READS:
            raise InvalidImage(
                f"{image_name(self)} has more than {MAX_READS:,} parts: save it again"
            )
        if time.monotonic() > self._deadline:
            raise InvalidImage(
                f"{image_name(self)} takes too long to decode: save it again, scale it down, or "
                "retry when the server is less busy"
            )
        return super().read(size)

    def _check_jpeg(self, content: bytes) -> None:
        segments = scans = place = 0
        while (marker := JPEG_MARKER.search(content, place)) is not None:
            kind, place = content[marker.end() - 1], marker.end()
            if kind == 0xD9 and scans:  # the end of the image
                return
            segments += 1
            scans += kind == 0xDA
            if segments > MAX_SEGMENTS or scans > MAX_SCANS:
                raise InvalidImage(
                    f"{image_name(self)} has more than {MAX_SEGMENTS:,} segments or {MAX_SCANS} "
                    "scans: save it again"
                )
            if kind != 0xD9:
                place += max(2, int.from_bytes(content[place : place + 2]))


def read_image(
    source: ImageLike,
    channels: int,
    size: tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.uint8]:
    """Read one image as an array of 8-bit values.

    The pixels are the same whether a picture is passed as a path, as bytes or as a PIL image: it is
    decoded at its full scale, composited on white if it is transparent, converted, turned upright
    by its EXIF orientation, and resized last.

    Args:
        source: the path of a file of one of `FORMATS`, whatever its name, or the bytes of such a
            file; a PIL image; or a uint8 array (H, W), (H, W, 1) or (H, W, 3). AVIF is read if
            Pillow was built with it, HEIC with the extra "heif"; neither is as untrusted bytes.
        channels: 1 for grey, 3 for RGB; the image is converted.
        size: (height, width) to resize to (bilinear, antialiased); None for the image's own.
        max_pixels: a larger picture is refused by its header, before anything is decoded.

    Returns:
        (H, W) for one channel, (H, W, 3) for three; of the size, if one is given.

    Raises:
        ImageTooLarge: it has more than `max_pixels` pixels.
        InvalidImage: not an image of one of the formats, truncated, empty, stored with more than 8
            bits per channel (as the file states), or of a wrong type.
    """
    return _read(source, channels, None if size is None else Resizing(size), max_pixels)


def image_size(
    source: str | os.PathLike[str] | bytes | UntrustedImage, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """Return the width and height that an image's file declares; nothing is decoded."""
    with open_image(source) as file, _open_format(file, _formats(source)) as image:
        _check(image, image_name(source), max_pixels, file)
        return image.size


def read_images(
    sources: Sequence[ImageLike] | NDArray[Any],
    channels: int,
    resizing: Resizing,
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.uint8]:
    """Read images as (n, *size) or (n, *size, 3); paths are read in as many threads as torch uses.

    The error is that of the first image, in the order given, that cannot be read.
    """
    images = np.empty((len(sources), *resizing.size, *(3,) * (channels == 3)), np.uint8)

    def work(row: int) -> None:
        images[row] = _read(sources[row], channels, resizing, max_pixels)

    import torch

    # A PIL image is decoded when it is first used, and may come twice: not in two threads.
    are_paths = all(isinstance(source, str | os.PathLike) for source in sources)
    threads = min(torch.get_num_threads(), len(sources)) if are_paths else 1
    rows = range(len(sources))
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        for _ in map(work, rows) if pool is None else pool.map(work, rows):
            pass  # in order, and so is the first error
    return images


def find_faults(sources: Sequence[ImageLike], max_pixels: int = MAX_PIXELS) -> Iterator[str | None]:
    """Yield for each image, in order, the error of `read_image`, or None; in threads."""

    def fault(source: ImageLike) -> str | None:
        try:
            _read(source, 3, None, max_pixels)
        except InvalidImage as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(fault, sources)


def read_capture_times(paths: Sequence[str | os.PathLike[str]]) -> list[str | None]:
    """Return when photographs were taken, such as "2026-11-26 09:47:00", by their EXIF data.

    None without a readable date, or if it follows the pixels of a PNG file, which are not decoded.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_capture_time, paths))


def _capture_time(path: str | os.PathLike[str]) -> str | None:
    try:
        with open_image(path, lazily=True) as file:
            image = _open_format(file, _formats(path))
            exif = Image.Image.getexif(image)  # the method of PNG files decodes all pixels
            stated = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal)
            return str(datetime.strptime(str(stated).strip("\0 "), "%Y:%m:%d %H:%M:%S"))
    except (InvalidImage, ValueError):
        return None


@contextmanager
def open_image(
    source: str | os.PathLike[str] | bytes | UntrustedImage, lazily: bool = False
) -> Iterator[IO[bytes]]:
    """Open the file of an image; errors in the context become `InvalidImage`.

    An object in a bucket is read completely, unless `lazily`.
    """
    formats = UNTRUSTED_FORMATS if isinstance(source, UntrustedImage) else FORMATS
    with _pillow(image_name(source), formats):
        if isinstance(source, UntrustedImage):
            source.seek(0)
            yield source
        elif isinstance(source, bytes):
            yield BytesIO(source)
        elif not (is_uri(source) or (path := Path(source)).is_file()):
            missing = "a folder" if path.is_dir() else "not a file that is there"
            raise InvalidImage(f"{path} is {missing}: pass the path of an image, such as 1.jpg")
        else:
            with open_file(source, lazily) as file:
                yield file


def image_name(source: str | os.PathLike[str] | bytes | UntrustedImage) -> str:
    """Return the name of an image's file for messages."""
    if isinstance(source, UntrustedImage):
        source = source.getvalue()
    return (
        f"the picture of {len(source)} bytes"
        if isinstance(source, bytes)
        else as_text(Path(source))
    )


def _formats(source: object) -> tuple[str, ...]:
    return UNTRUSTED_FORMATS if isinstance(source, UntrustedImage) else (*FORMATS, *CODEC_FORMATS)


def _open_format(file: IO[bytes], formats: Iterable[str]) -> ImageFile.ImageFile:
    """Open an image as `Image.open` does, whose limit of pixels cannot be changed by an argument.

    Only these formats are tried: for others, Pillow may run programs, such as Ghostscript for EPS.
    """
    start = file.read(16)
    for name in formats:
        if name == "HEIF" and start[4:8] == b"ftyp":
            with naming_extras():
                import pillow_heif
            pillow_heif.register_heif_opener()
        if name not in Image.OPEN:
            Image.init()
        factory, accept = Image.OPEN.get(name, (None, None))
        if factory is None or accept is None or accept(start) is not True:
            continue
        file.seek(0)
        try:
            return factory(file, "")
        except (SyntaxError, IndexError, TypeError, struct.error):
            continue
    raise UnidentifiedImageError


def _read(
    source: ImageLike, channels: int, resizing: Resizing | None, max_pixels: int
) -> NDArray[np.uint8]:
    if isinstance(source, np.ndarray):
        return _resize(as_pixels(source, channels, max_pixels), resizing)
    if isinstance(source, Image.Image):
        with _pillow("the PIL image"):
            _check(source, "the PIL image", max_pixels)
            return _resize(_turn_upright(to_pixels(source, channels), source), resizing)
    if isinstance(source, str | os.PathLike | bytes | UntrustedImage):
        with open_image(source) as file, _open_format(file, _formats(source)) as image:
            _check(image, image_name(source), max_pixels, file)
            untrusted = isinstance(source, UntrustedImage)
            large = image.size[0] * image.size[1] > LARGE_PIXELS
            # An upload may be slow on purpose: others do not wait for it.
            with _large if large and not untrusted else nullcontext():
                pixels = None
                if untrusted:
                    # torchvision decodes the whole file at once, Pillow block by block.
                    image.decodermaxblock = UNTRUSTED_BLOCK
                elif isinstance(image, JpegImagePlugin.JpegImageFile):
                    pixels = _jpeg_pixels(file, image, channels)
                if pixels is None:
                    pixels = to_pixels(image, channels)
                return _resize(_turn_upright(pixels, image), resizing)
    raise InvalidImage(
        f"an image is a {type(source).__name__}; pass a path, the bytes of a file, a PIL image or "
        "a uint8 array"
    )


def _resize(pixels: NDArray[np.uint8], resizing: Resizing | None) -> NDArray[np.uint8]:
    return pixels if resizing is None else resizing.image(pixels)


class _InPillow(type):
    def __subclasscheck__(cls, category: type) -> bool:
        return _runs_pillow.get()


class _PillowWarning(Warning, metaclass=_InPillow):
    """Stands for every category of warnings in a thread that runs Pillow, and for none in others.

    `warnings.catch_warnings` would replace the filters of all threads.
    """


@contextmanager
def _pillow(name: str, formats: Iterable[str] = FORMATS) -> Iterator[None]:
    """Run Pillow on an image: its errors become `InvalidImage`.

    Its warnings are ignored, of large images, which `_check` refuses, and of unused metadata.
    """
    if all(category is not _PillowWarning for _, _, category, _, _ in warnings.filters):
        warnings.simplefilter("ignore", _PillowWarning)
    token = _runs_pillow.set(True)
    try:
        yield
    except (InvalidImage, DataUnavailable):
        raise
    except FileNotFoundError as error:
        raise InvalidImage(f"{error}: pass the path of an image, such as 1.jpg") from error
    except MissingPackage as error:
        raise InvalidImage(f"{name} may be HEIC, which is not read: {error}") from error
    except UnidentifiedImageError as error:
        raise InvalidImage(
            f"{name} is not an image of a supported format, whatever its name says: use "
            f"{', '.join(formats)}"
        ) from error
    except Image.DecompressionBombError as error:  # some formats have Pillow's own limit
        raise ImageTooLarge(f"{name} is too large: {error}; scale it down first") from error
    except Exception as error:  # a decoder of damaged bytes raises almost anything
        raise InvalidImage(
            f"{name} is truncated, damaged or not readable ({error}): replace it"
        ) from error
    finally:
        _runs_pillow.reset(token)


def _check(image: Image.Image, name: str, max_pixels: int, file: IO[bytes] | None = None) -> None:
    """Raise `InvalidImage` for what the header states, before anything is decoded."""
    width, height = image.size
    _check_pixels(name, width, height, max_pixels)
    if width * height == 0:
        raise InvalidImage(f"{name} is {width} x {height} pixels: it is empty")
    if (bits := _bits(image, file)) > 8:
        raise InvalidImage(
            f"{name} has {bits} bits per channel, deeper than the 8 that are read: map the range "
            "that matters to 0..255 first, in the way the encoder's training images were"
        )


def _check_pixels(name: str, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"{name} has {width} x {height} pixels; at most {max_pixels:,} pixels are read: scale "
            "it down first, or raise the limit (max_pixels; on the command line --max-pixels)"
        )


def _bits(image: Image.Image, file: IO[bytes] | None) -> int:
    """Return the bits per channel of a file, or of a PIL image without one.

    Pillow's mode does not show them: it reduces colours of 16 bits to the upper 8.
    """
    if image.mode.startswith(("I", "F")):
        return 16 if image.mode.startswith("I;16") else 32
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return int(max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))))
    if image.format == "HEIF":
        return int(image.info.get("bit_depth", 8))
    if image.format == "AVIF" and file is not None:
        file.seek(0)
        return 10 if HIGH_BIT_DEPTH.search(file.read(1 << 16)) else 8
    for decoder, _, _, options in getattr(image, "tile", ()):
        raw_mode, *further = options if isinstance(options, tuple) else (options,)
        if decoder.startswith("ppm"):
            return int(further[-1]).bit_length()
        if image.format == "PNG" and ";16" in str(raw_mode):
            return 16
    return 8
