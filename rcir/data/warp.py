"""Rotation, crop and mirroring of batches of images, as one affine warp."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

RATIOS = (3 / 4, 4 / 3)


def draw_warps(
    n: int,
    size: tuple[int, int],
    rotation: float,
    crop: float,
    mirrored: NDArray[np.bool_],
    rng: np.random.Generator,
) -> NDArray[np.float32]:
    """Random warps: a rotation about the centre, then a crop resized to the whole, then mirroring.

    Args:
        n: number of warps.
        size: (height, width) of the images.
        rotation: degrees; angles are uniform in [-rotation, rotation], counterclockwise.
        crop: area is uniform in [crop, 1] of the image's, the ratio of width to height log-uniform
            in [3/4, 4/3] of the image's, as far as such a crop fits; its place is uniform.
        mirrored: (n,) which are mirrored left to right.
        rng: source of all randomness.

    Returns:
        (n, 2, 3), from places in the result to places in the image: both are (x, y, 1), where x and
        y run from -1 to 1 between the outer borders.
    """
    angle = np.radians(rng.uniform(-rotation, rotation, n))
    area = rng.uniform(crop, 1, n)
    low, high = np.maximum(RATIOS[0], area), np.minimum(RATIOS[1], 1 / area)
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
    """Images (n, C, H, W), float32, warped by matrices (n, 2, 3); bilinear, black outside."""
    height, width = images.shape[-2:]
    x, y = (
        (torch.arange(length, device=images.device) * 2 + (1 - length)) / length
        for length in (width, height)
    )
    a, b, c = matrices[:, :, :, None, None].unbind(2)  # each (n, 2, 1, 1)
    grid = (x * a + c) + y[:, None] * b
    return F.grid_sample(images, grid.permute(0, 2, 3, 1), "bilinear", "zeros", align_corners=False)
