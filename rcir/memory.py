"""Memory of large tensors on the CPU."""

from __future__ import annotations

import ctypes
import sys

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
