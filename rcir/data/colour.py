"""Brightness, contrast, saturation and hue of batches of images.

The operations are those of torchvision's `ColorJitter`, image by image; values are rounded before
the contrast only. Each works in place on float32 images (n, C, H, W) in [0, 255], with parameters
(n, 1, 1, 1). An image's result is the same to the last bit whichever others are beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

LUMA = (0.2989, 0.587, 0.114)  # ITU-R BT.601


def adjust_brightness(images: Tensor, factor: Tensor) -> None:
    """Scale values by factors of at least 0."""
    images.mul_(factor).clamp_(0, 255)


def adjust_contrast(images: Tensor, factor: Tensor) -> None:
    """Scale differences to the mean of the grey image by factors of at least 0."""
    # Sums of whole numbers are exact: they do not depend on how threads share the work.
    sums = images.round_().sum(-1).sum(-1, dtype=torch.float64)
    if images.shape[1] == 3:
        sums = sums[:, :1] * LUMA[0] + sums[:, 1:2] * LUMA[1] + sums[:, 2:] * LUMA[2]
    mean = (sums / images.shape[2:].numel()).float().view(-1, 1, 1, 1)
    images.sub_(mean).mul_(factor).add_(mean).clamp_(0, 255)


def adjust_saturation(images: Tensor, factor: Tensor) -> None:
    """Scale differences to the grey image by factors of at least 0; grey images stay."""
    if images.shape[1] == 1:
        return
    red, green, blue = (images[:, i : i + 1] * weight for i, weight in enumerate(LUMA))
    grey = red.add_(green).add_(blue)
    images.sub_(grey).mul_(factor).add_(grey).clamp_(0, 255)


def shift_hue(images: Tensor, shift: Tensor) -> None:
    """Turn hues by shifts in [-0.5, 0.5] of the colour circle; grey images stay.

    Value and chroma of the HSV model stay. A channel is the largest value, less the chroma where
    the pixel's hue is far from the channel's own (2 to 3 sixths of the circle), less a part of it
    where it is 1 to 2 sixths away.
    """
    if images.shape[1] == 1:
        return
    red, green, blue = images.unbind(1)
    high = torch.maximum(torch.maximum(red, green), blue)
    chroma = high - torch.minimum(torch.minimum(red, green), blue)
    scale = torch.where(chroma > 0, chroma, 1).mul_(6).reciprocal_()
    hue = torch.where(
        green == high, (blue - red).mul_(scale).add_(1 / 3), (red - green).mul_(scale).add_(2 / 3)
    )
    hue = torch.where(red == high, (green - blue).mul_(scale), hue).add_(shift.view(-1, 1, 1))
    for channel, own in enumerate((0.0, 1 / 3, 2 / 3)):
        away = hue - own
        away.sub_(away.round()).abs_()  # of the circle, at most half
        torch.sub(high, away.mul_(6).sub_(1).clamp_(0, 1).mul_(chroma), out=images[:, channel])
