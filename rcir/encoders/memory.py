"""Memory that an encoder takes per image, and how many images fit into a budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rcir.encoders.base import Encoder
from rcir.errors import InvalidConfig

GIB = 2**30
EMBEDDING_GIB = {"cpu": 0.75, "cuda": 8.0}  # for a forward pass, beside the weights
TRAINING_GIB = {"cpu": 4.0, "cuda": 16.0}  # for the activations of a micro-batch
# Resident memory grows by up to twice as much as the tensors that are alive: freed blocks of one
# size do not fit the next layer, and convolutions copy their input.
OVERHEAD = 2.0

_per_image: weakref.WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]]
_per_image = weakref.WeakKeyDictionary()


def check_memory(name: str, memory_gib: float | None) -> None:
    """Raise `InvalidConfig` unless a budget is None or a number of GiB above 0."""
    if memory_gib is not None and not 0 < memory_gib < float("inf"):
        raise InvalidConfig(f"{name} is {memory_gib}; it must be a number of GiB above 0")


def memory_budget(memory_gib: float | None, defaults: Mapping[str, float], gpu: bool) -> float:
    """Return a budget in GiB, or its default for the device."""
    return defaults["cuda" if gpu else "cpu"] if memory_gib is None else memory_gib


def batch_within(
    encoder: Encoder, image: Tensor, most: int, memory_gib: float | None = None
) -> int:
    """Return the number of images to embed together, from 1 to `most`, within a budget.

    The encoder embeds an image (1, ...) once to measure what a pass holds beside the weights.
    """
    sizes = _per_image.setdefault(encoder, {})
    shape = tuple(image.shape[1:])
    if shape not in sizes:
        with torch.no_grad(), _LiveBytes() as live:
            encoder.embed(image)
        sizes[shape] = live.peak
    budget = memory_budget(memory_gib, EMBEDDING_GIB, image.device.type == "cuda")
    return max(1, min(most, int(budget * GIB / (OVERHEAD * max(1, sizes[shape])))))


def saved_bytes(forward: Callable[[], Any]) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, without the weights."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not (tensor.is_leaf and tensor.requires_grad):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(storage.nbytes() for storage in storages.values())


class _LiveBytes(TorchFunctionMode):
    """Counts live bytes of tensors that torch functions return in this thread, up to `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outcome = function(*args, **(kwargs or {}))
        for value in outcome if isinstance(outcome, tuple | list) else (outcome,):
            if isinstance(value, Tensor):
                self._count(value)
        return outcome

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata  # not that of the data, which tensors of other devices may hide
        if address not in self._sizes:
            self._sizes[address] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(tensor, self._freed, address)

    def _freed(self, address: int) -> None:
        self._now -= self._sizes.pop(address, 0)
