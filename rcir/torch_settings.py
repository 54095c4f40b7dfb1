"""PyTorch in this process: precision, state shared by threads, memory and copies."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from threading import Lock
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.errors import InvalidConfig

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
# Mode of `torch.cdist`: products of vectors would lose the digits of small distances.
BY_DIFFERENCES = "donot_use_mm_for_euclid_dist"
_lock = Lock()
_shared: dict[Hashable, tuple[int, ExitStack]] = {}  # number of threads inside, and the undoing


@contextmanager
def shared_by_threads(
    key: Hashable, change: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Hold a change of state while any thread is inside: the first makes it, the last undoes it."""
    with _lock:
        count, stack = _shared.get(key, (0, ExitStack()))
        if not count:
            stack.enter_context(change())
        _shared[key] = count + 1, stack
    try:
        yield
    finally:
        with _lock:
            count, stack = _shared.pop(key)
            if count > 1:
                _shared[key] = count - 1, stack
            else:
                stack.close()


@contextmanager
def full_precision() -> Iterator[None]:
    """Plain float32, whatever the caller's autocast, TF32 or bfloat16 settings.

    The settings apply to all threads of the process until the last one leaves.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":  # which no setting of PyTorch overrides
        raise InvalidConfig(
            "the environment variable NVIDIA_TF32_OVERRIDE is 1, so that embeddings on GPUs would "
            "differ from those of the calibration: unset NVIDIA_TF32_OVERRIDE, or set it to 0"
        )
    with (
        shared_by_threads(full_precision, _ieee),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


@contextmanager
def _ieee() -> Iterator[None]:
    backends: Any = torch.backends
    # Each operation by itself, since the common getters raise if a caller set some of them.
    operations = (
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    )

    def set_ieee() -> None:
        for operation in operations:
            operation.fp32_precision = "ieee"

    before = [operation.fp32_precision for operation in operations]
    set_ieee()
    # The older settings have to agree with these, or reading them raises an error.
    matmul, tf32 = torch.get_float32_matmul_precision(), True
    with suppress(RuntimeError):  # the older setting contradicts the newer ones
        tf32 = backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    set_ieee()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        backends.cudnn.allow_tf32 = tf32
        for operation, precision in zip(operations, before, strict=True):
            operation.fp32_precision = precision


def keep_freed_memory() -> None:
    """Let this process reuse freed memory from now on.

    glibc returns every freed block of more than 32 MiB to the system, which clears new ones page by
    page: for networks on photographs, that takes as long as the arithmetic.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def copy_to(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy values to a device; to a GPU through page-locked memory, without waiting."""
    tensor = torch.from_numpy(values)
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)
