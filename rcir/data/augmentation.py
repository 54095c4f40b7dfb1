"""Random changes of training images, drawn afresh at every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.errors import InvalidConfig


def occlude(
    images: NDArray[np.uint8], probability: float, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Hide part of some images behind black squares (Oh et al., ICLR 2019, appendix A).

    Each square tile of an image (a digit, or the whole of a square image) is hit with the given
    probability, on its own, by a square of side L in {0, ..., tile} at a uniform place inside it.

    Args:
        images: (n, ..., s, m * s) uint8, m tiles side by side.
        probability: of a tile to be hit, in [0, 1].
        rng: source of all randomness.

    Returns:
        The images (a copy), and for each whether a square of side 1 or more was drawn.
    """
    n, side, width = len(images), *images.shape[-2:]
    tiles = width // side
    hit = rng.random((n, tiles)) < probability
    length = np.where(hit, rng.integers(0, side + 1, (n, tiles)), 0)
    corner = np.floor(rng.random((2, n, tiles)) * (side - length + 1))
    rows, columns = (
        (np.arange(side) >= start[..., None]) & (np.arange(side) < (start + length)[..., None])
        for start in corner
    )
    hidden = rows[..., :, None] & columns[..., None, :]
    shape = (n, *(1,) * (images.ndim - 3), side, tiles * side)
    mask = hidden.transpose(0, 2, 1, 3).reshape(shape)
    return np.where(mask, 0, images).astype(np.uint8), np.any(length > 0, axis=1)


@dataclass(frozen=True)
class Augmentation:
    """What is done to a batch of training images.

    Args:
        occlusion: probability of a tile to be hit by a black square, see `occlude`; the width of
            the images must be a multiple of their height.
        flip: mirror every second image, on average, left to right.
    """

    occlusion: float = 0.0
    flip: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.occlusion <= 1:
            raise InvalidConfig(f"augmentation.occlusion is {self.occlusion}; it must be in [0, 1]")

    def __call__(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Augment uint8 images (n, C, H, W)."""
        if self.flip:
            chosen = torch.from_numpy(rng.random(len(images)) < 0.5)
            images = torch.where(chosen[:, None, None, None], images.flip(-1), images)
        if self.occlusion:
            images = torch.from_numpy(occlude(images.numpy(), self.occlusion, rng)[0])
        return images
