"""Memory of tensors on the CPU, and copies of it to a GPU."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> None:
    """Let this process keep what it frees for what it allocates next, from now on.

    glibc gives every freed block of more than 32 MiB back to the system, and each new one is
    cleared page by page: of networks on photographs, that takes as long as the arithmetic. Nothing
    happens where another library allocates.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def copied(values: NDArray[Any], device: torch.device) -> Tensor:
    """Values on a device; to a GPU through page-locked memory, so that nothing waits for them."""
    tensor = torch.from_numpy(values)
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)
