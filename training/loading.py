"""Training images on their way to the device, read while the device is busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.data import ImageSet, Preprocessing

AHEAD = 2  # batches that are read while one is computed


def loaded(
    images: ImageSet,
    preprocessing: Preprocessing,
    batches: Iterable[NDArray[np.int64]],
    device: torch.device,
) -> Iterator[Tensor]:
    """Batches of images, uint8 (n, channels, *size) on the device, in order.

    A thread reads ahead; for a GPU into page-locked memory, from where they are copied while the
    GPU computes. An image that a batch names twice is read once.
    """

    def read(rows: NDArray[np.int64]) -> Tensor:
        distinct, places = np.unique(rows, return_inverse=True)
        pixels = preprocessing.resized(images.pick(distinct))[torch.from_numpy(places)]
        return pixels.pin_memory() if device.type == "cuda" else pixels

    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(1) as reader:
        for rows in batches:
            pending.append(reader.submit(read, rows))
            if len(pending) > AHEAD:
                yield pending.popleft().result().to(device, non_blocking=True)
        while pending:
            yield pending.popleft().result().to(device, non_blocking=True)
