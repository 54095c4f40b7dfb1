"""Preprocessing of images for an encoder; the same for training, gallery and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.data.images import (
    MAX_PIXELS,
    CropRounding,
    ImageLike,
    Interpolation,
    Resizing,
    find_faults,
    read_image,
    read_images,
)
from rcir.errors import InvalidConfig, InvalidImage
from rcir.options import require_at_least, require_choice

Reading = Literal[Interpolation, "none"]
READER_REVISION = 2  # revision of the pixels that `rcir.data.images` reads from a file
ALWAYS_STATED = ("size", "channels", "mean", "std")  # whatever their values


@dataclass(frozen=True)
class Preprocessing:
    """Decode, resize, scale to [0, 1], normalise.

    Args:
        size: (height, width) of the encoder's input; images of another size are resized to it,
            antialiased.
        channels: 1 for grey, 3 for RGB.
        mean, std: one for all channels or one for each, subtracted from and divided into values in
            [0, 1].
        interpolation, crop, stretch, crop_rounding: see `rcir.data.images.Resizing`. With
            interpolation "none", images are sequences of features, see `resized`.
        max_pixels: larger images are refused; no vector depends on it.

    Example:
        >>> import numpy as np
        >>> preprocessing = Preprocessing(size=(8, 16), channels=1)
        >>> preprocessing([np.full((16, 32, 3), 255, np.uint8)]).shape
        torch.Size([1, 1, 8, 16])
    """

    size: tuple[int, int] = (8, 16)
    channels: int = 1
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: Reading = "bilinear"
    crop: float | None = None
    stretch: bool = False
    crop_rounding: CropRounding = "nearest"
    max_pixels: int = field(default=MAX_PIXELS, compare=False)

    def __post_init__(self) -> None:
        if self.channels not in (1, 3) or (self.channels == 3 and self.interpolation == "none"):
            raise InvalidConfig(
                f"preprocessing.channels is {self.channels}; it must be 1 or 3, and 1 with "
                'interpolation "none"'
            )
        if len(self.size) != 2 or min(self.size) < 1:
            raise InvalidConfig(f"preprocessing.size is {self.size}; it must be height and width")
        lengths = {len(self.mean), len(self.std)}
        if not lengths <= {1, self.channels} or min(self.std) <= 0:
            raise InvalidConfig(
                f"preprocessing.mean {self.mean} and std {self.std} must each have one value, or "
                f"one for each of {self.channels} channels, those of std above 0"
            )
        require_choice("preprocessing.interpolation", self.interpolation, Reading)
        if self.crop is not None and not 0 < self.crop <= 1:
            raise InvalidConfig(
                f"preprocessing.crop is {self.crop}; it must lie in (0, 1], or be null for the "
                "whole image"
            )
        require_choice("preprocessing.crop_rounding", self.crop_rounding, CropRounding)
        require_at_least(self, "preprocessing.", max_pixels=1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Make one from plain values, as `to_dict`, `dataclasses.asdict` and JSON give them."""
        stated = {name: tuple(values[name]) for name in ("size", "mean", "std")}
        return cls(**{**values, **stated, "channels": values["channels"]})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; options of resizing that have their defaults are left out."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default or field.name in ALWAYS_STATED
        }

    def identity(self) -> dict[str, Any]:
        """Return plain values of all that vectors depend on, with the revision of the reader."""
        values = {name: value for name, value in self.to_dict().items() if name != "max_pixels"}
        return values | {"reader": READER_REVISION}

    def __call__(self, images: Sequence[ImageLike] | NDArray[np.uint8]) -> Tensor:
        """Return images as normalised float32 (n, channels, *size), or raise `InvalidImage`."""
        return self.normalise(self.resized(images))

    def resized(self, images: Sequence[ImageLike] | NDArray[np.uint8]) -> Tensor:
        """Return images as uint8 (n, channels, *size), as augmentations expect them.

        Paths are read and resized in threads. With interpolation "none", images are sequences of
        features, floats (n, *size), which stay as they are: float32 (n, 1, *size).
        """
        if self.interpolation == "none":
            return self._sequences(images)
        resizing = Resizing(
            self.size, self.interpolation, self.crop, self.stretch, self.crop_rounding
        )
        if self._is_batch(images):
            return resizing.batch(np.asarray(images))
        if len(images) == 0:
            raise InvalidImage("there are no images: give at least one")
        if all(isinstance(image, np.ndarray) for image in images):
            arrays = [read_image(image, self.channels, None, self.max_pixels) for image in images]
            if len({array.shape for array in arrays}) == 1:
                return resizing.batch(np.stack(arrays))
        pixels = torch.from_numpy(read_images(images, self.channels, resizing, self.max_pixels))
        return pixels[:, None] if self.channels == 1 else pixels.permute(0, 3, 1, 2)

    def find_faults(self, images: Sequence[ImageLike] | NDArray[np.uint8]) -> dict[int, str]:
        """Return the rows of the images that cannot be read, each with the reason."""
        reasons = find_faults([*images], self.max_pixels)
        return {row: reason for row, reason in enumerate(reasons) if reason is not None}

    def normalise(self, images: Tensor) -> Tensor:
        """Return images (n, channels, *size) as normalised float32: uint8 scaled, floats not."""
        mean, std = (
            _put_on_device(tuple(values), images.device) for values in (self.mean, self.std)
        )
        scaled = images.clone() if images.is_floating_point() else images.float().div_(255)
        return scaled.sub_(mean).div_(std)

    def _sequences(self, images: Sequence[Any] | NDArray[Any]) -> Tensor:
        try:
            features = np.asarray(images)
        except ValueError:  # of different shapes
            features = np.empty(0)
        if features.dtype.kind != "f" or features.shape != (len(images), *self.size):
            raise InvalidImage(
                'with interpolation "none", images must be arrays of floats of the shape '
                f"{tuple(self.size)}; got {features.dtype} of the shape {features.shape[1:]}"
            )
        with np.errstate(over="ignore"):  # to infinity, which is refused
            single = features.astype(np.float32)
        if not (finite := np.isfinite(single).all(axis=(1, 2))).all():
            raise InvalidImage(f"image {finite.argmin()} has features that are not finite")
        return torch.from_numpy(single)[:, None]

    def _is_batch(self, images: Sequence[ImageLike] | NDArray[np.uint8]) -> bool:
        """Return whether this is one array of images that need no conversion one by one."""
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.size == 0:
            return False
        return images.ndim == 3 if self.channels == 1 else images.ndim == 4 and images.shape[3] == 3


@cache
def _put_on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Copy values (n, 1, 1) to a device once: each copy waits for the device."""
    return torch.tensor(values, device=device).view(-1, 1, 1)
