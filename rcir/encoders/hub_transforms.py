"""Translate the transforms of hub models to a `Preprocessing`, or refuse them; compare both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rcir.data.images import Interpolation
from rcir.data.preprocessing import Preprocessing

Transform = Callable[[Image.Image], Tensor]  # an RGB image to (3, H, W)
MAX_DIFFERENCE = 0.02  # standard deviations; DINOv3 does not round where it interpolates
IMAGE_STD = 0.225  # of pixels from 0 to 1, typically
SCALES = (0.35, 1.3, 0.35, 1.3, 0.35, 1.3, 3.1)  # of synthetic images, relative to the input
RATIOS = (1.0, 1.13, 1.37, 1.51, 1.83, 2.39, 1.21)  # of their longer to their shorter side
BY_NUMBER: dict[int | None, Interpolation]  # as Pillow numbers its methods
BY_NUMBER = {None: "bilinear", 0: "nearest", 2: "bilinear", 3: "bicubic"}
BY_PILLOW: dict[str, Interpolation] = {  # as timm resizes images; "nearest" does not round
    "nearest": "nearest",
    "bilinear": "pillow-bilinear",
    "bicubic": "pillow-bicubic",
}


class Untranslatable(Exception):
    """A `Preprocessing` cannot do what a transform does."""


def timm_preprocessing(settings: Mapping[str, Any]) -> tuple[Preprocessing, Transform]:
    """Translate settings of ``timm.data.resolve_data_config``; also return their transform."""
    import timm

    channels, height, width = settings["input_size"]
    if channels != 3:
        raise Untranslatable(f"its images have {channels} channels, not 3")
    interpolation = BY_PILLOW.get(settings["interpolation"])
    if interpolation is None:
        raise Untranslatable(f"it resizes images by the method {settings['interpolation']}")
    mode, share = settings["crop_mode"], settings["crop_pct"]
    if mode not in ("center", "squash") or share > 1:
        raise Untranslatable(f"its crop_mode {mode} with crop_pct {share} pads images")
    stretches = mode == "squash"
    return (
        Preprocessing(
            (height, width),
            channels,
            tuple(settings["mean"]),
            tuple(settings["std"]),
            interpolation,
            crop=None if stretches and share == 1 else share,
            stretch=stretches and share < 1,
        ),
        timm.data.create_transform(**settings, is_training=False),
    )


def open_clip_preprocessing(settings: Mapping[str, Any]) -> tuple[Preprocessing, Transform]:
    """Translate OpenCLIP's ``PreprocessCfg``; also return its transform."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    config = PreprocessCfg(**settings)
    if config.resize_mode == "longest":
        raise Untranslatable("its resize_mode longest pads images")
    _, height, width = config.input_size
    return (
        Preprocessing(
            (height, width),
            3,
            _by_channel(config.mean),
            _by_channel(config.std),
            "pillow-bilinear" if config.interpolation == "bilinear" else "pillow-bicubic",
            None if config.resize_mode == "squash" else 1.0,
        ),
        image_transform_v2(config, is_train=False),
    )


def transformers_preprocessing(processor: Any) -> tuple[Preprocessing, Transform]:
    """Translate an image processor of transformers; also return it as a transform."""
    if hasattr(processor, "data_config"):  # a timm model
        return timm_preprocessing(processor.data_config)

    def transform(image: Image.Image) -> Tensor:
        values: Tensor = processor(images=image, return_tensors="pt")["pixel_values"]
        if len(values) != 1:
            raise ValueError(f"one image becomes values of shape {tuple(values.shape)}")
        return values[0]

    try:
        return _translate(processor), transform
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Untranslatable(f"its settings cannot be translated ({error!r})") from error


def _translate(processor: Any) -> Preprocessing:
    settings = processor.to_dict()
    size, crop, stretch = _transformers_geometry(settings, type(processor).__name__)
    if settings.get("resample") not in BY_NUMBER:
        raise Untranslatable(f"it resizes images by Pillow's method number {settings['resample']}")
    interpolation = BY_NUMBER[settings.get("resample")]
    if getattr(processor, "backend", None) == "pil":
        interpolation = BY_PILLOW[interpolation]
    mean, std = _transformers_scale(settings)
    return Preprocessing(size, 3, mean, std, interpolation, crop, stretch, crop_rounding="down")


def _transformers_geometry(
    settings: Mapping[str, Any], kind: str
) -> tuple[tuple[int, int], float | None, bool]:
    """Return size, crop and stretch of an image processor, given its settings and class name."""
    if not settings.get("do_resize"):
        raise Untranslatable("it does not resize images")
    resized, share = settings["size"], settings.get("crop_pct")
    crops = bool(settings.get("do_center_crop"))
    if "shortest_edge" not in resized:
        scaled = int(resized["height"]), int(resized["width"])
        if not crops:
            return scaled, None, False
        size = _height_and_width(settings["crop_size"])
        return size, None if size == scaled else _crop(size, scaled), size != scaled
    edge = int(resized["shortest_edge"])
    if not crops and share is None:
        raise Untranslatable("its images keep their proportions, and are not cropped to one size")
    if not crops:  # ConvNeXt
        return (edge, edge), None if edge >= 384 else share, False
    size = _height_and_width(settings["crop_size"])
    if share is not None:  # PoolFormer
        edge = int(edge / share)
    elif kind.startswith("Levit"):
        edge = int(256 / 224 * edge)
    return size, _crop(size, (edge, edge)), False


def _height_and_width(size: Mapping[str, int]) -> tuple[int, int]:
    if "shortest_edge" in size:
        return int(size["shortest_edge"]), int(size["shortest_edge"])
    return int(size["height"]), int(size["width"])


def _crop(size: tuple[int, int], scaled: tuple[int, int]) -> float:
    """Return the share by which `Resizing` scales to `scaled` before it cuts out `size`."""
    if size[0] > scaled[0] or size[1] > scaled[1]:
        raise Untranslatable(f"it pads images of {scaled} to {size}")
    share = size[0] / scaled[0]
    while int(size[0] / share) < scaled[0]:
        share = math.nextafter(share, 0)
    return share


def _transformers_scale(
    settings: Mapping[str, Any],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation for values in [0, 1]."""
    factor = settings["rescale_factor"] if settings.get("do_rescale") else 1.0
    mean: tuple[float, ...] = (0.0,) * 3
    std: tuple[float, ...] = (1.0,) * 3
    if settings.get("do_normalize"):
        mean, std = _by_channel(settings["image_mean"]), _by_channel(settings["image_std"])
    if settings.get("rescale_offset"):  # EfficientNet
        mean = tuple(value + 1 for value in mean)
    if settings.get("include_top"):  # EfficientNet divides twice
        std = tuple(np.multiply(std, _by_channel(settings["image_std"])).tolist())
    scale = 255 * factor
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _by_channel(values: float | list[float] | tuple[float, ...]) -> tuple[float, ...]:
    return (float(values),) * 3 if isinstance(values, int | float) else tuple(values)


def require_same_values(preprocessing: Preprocessing, transform: Transform) -> None:
    """Raise `Untranslatable` unless a translation equals the library's transform.

    They are compared on synthetic images, small and large, wide and tall.
    """
    for image in _synthetic_images(preprocessing.size):
        where = f"for an image of {image.width} x {image.height} pixels"
        try:
            expected = transform(image)
        except Exception as error:  # each library raises its own
            raise Untranslatable(f"its transform fails {where}: {error}") from error
        values = preprocessing(np.asarray(image)[None])[0]
        if expected.shape != values.shape:
            raise Untranslatable(
                f"its values have shape {tuple(expected.shape)} {where}, not {tuple(values.shape)}"
            )
        difference = difference_in_deviations(preprocessing, values, expected)
        if not difference <= MAX_DIFFERENCE:  # NaN is refused
            raise Untranslatable(
                f"its values differ by up to {difference:.3f} standard deviations {where}"
            )


def difference_in_deviations(
    preprocessing: Preprocessing, values: Tensor, expected: Tensor
) -> float:
    """Return the largest difference of two preprocessed images, in standard deviations of images.

    The deviation is that of the model, or `IMAGE_STD` if it does not scale grey levels from 0 to
    255.
    """
    std = torch.tensor(preprocessing.std)[:, None, None]
    scale = torch.where(std > 0.01, 1, std / IMAGE_STD)
    return ((values - expected).abs() * scale).max().item()


def _synthetic_images(size: tuple[int, int]) -> Iterator[Image.Image]:
    rng = np.random.default_rng(0)
    for scale, ratio in zip(SCALES, RATIOS, strict=True):
        side = max(1, round(scale * min(size)))
        for height, width in ((side, round(ratio * side)), (round(ratio * side), side)):
            yield Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
