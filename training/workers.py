"""The processes that train together, and their communication."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ray.train
import ray.train.torch
import torch
import torch.distributed
from torch import Tensor

from rcir.errors import InvalidConfig

CPU = torch.device("cpu")
Message = TypeVar("Message")


@dataclass(frozen=True)
class Workers:
    """This process among those that train together; alone, everything here is at once done.

    Attributes:
        rank: of this process, from 0.
        count: of all.
        device: that this process computes on.
    """

    rank: int
    count: int
    device: torch.device

    @classmethod
    def joined(cls, use_gpu: bool) -> Workers:
        """Join the workers of the Ray training; `InvalidConfig` if there is no GPU to use."""
        _check_gpu(use_gpu)
        device = ray.train.torch.get_device() if use_gpu else CPU
        if use_gpu:  # where torch puts the objects that workers exchange
            torch.cuda.set_device(device)
        context = ray.train.get_context()
        return cls(context.get_world_rank(), context.get_world_size(), device)

    @classmethod
    def alone(cls, use_gpu: bool) -> Workers:
        """This process without others; `InvalidConfig` if there is no GPU to use."""
        _check_gpu(use_gpu)
        return cls(0, 1, torch.device("cuda", torch.cuda.current_device()) if use_gpu else CPU)

    def shard(self, n: int) -> range:
        """The run of 0, ..., n - 1 that is for this process; runs follow each other by rank."""
        return range(n * self.rank // self.count, n * (self.rank + 1) // self.count)

    def all_gather(self, own: Tensor, shared: bool = False) -> Tensor:
        """The rows of all processes, by rank; each may bring another number of them.

        Args:
            own: (n, ...) rows of this process.
            shared: processes on the CPUs of a node hold one copy together: it must not be changed.
        """
        if self.count == 1:
            return own
        own = own.to(self.device).contiguous()
        counts = torch.empty(self.count, dtype=torch.int64, device=self.device)
        torch.distributed.all_gather_into_tensor(counts, counts.new_full((1,), len(own)))
        lengths = counts.cpu().tolist()
        shape = (sum(lengths), *own.shape[1:])
        if shared and self.device.type == "cpu":
            rows = self._of_node(shape, own.dtype)
        else:
            rows = own.new_empty(shape)
            if min(lengths) == max(lengths):
                torch.distributed.all_gather_into_tensor(rows, own)
                return rows
        # One after the other needs no padding, nor Gloo's copy, which would double the memory.
        for rank, part in enumerate(rows.split(lengths)):
            if rank == self.rank:
                part.copy_(own)
            if len(part):
                torch.distributed.broadcast(part, rank)
        return rows

    def _of_node(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory in common with the other processes of the node; all write the same to it.

        Where a process cannot have it, its memory is its own.
        """
        path = Path(self.broadcast(f"/dev/shm/rcir-{uuid4().hex}"))
        values = torch.empty(shape, dtype=dtype)
        with contextlib.suppress(OSError):  # no such folder, or too little room there
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, values.nbytes)
            common = torch.from_file(str(path), shared=True, size=values.numel(), dtype=dtype)
            values = common.view(shape)
        torch.distributed.barrier()
        path.unlink(missing_ok=True)  # it stays until the last process has dropped its tensor
        return values

    def share(self, n: int, function: Callable[[int], Message]) -> list[Message]:
        """The values (without GPU tensors) of a function of 0, ..., n - 1, on every process."""
        own = [function(number) for number in range(self.rank, n, self.count)]
        everyone: list[Any] = [own]
        if self.count > 1:
            everyone = [None] * self.count
            torch.distributed.all_gather_object(everyone, own)
        return [everyone[number % self.count][number // self.count] for number in range(n)]

    def all_reduce(self, own: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count > 1:
            own = own.clone()
            torch.distributed.all_reduce(own)
        return own

    def broadcast(self, own: Message | None) -> Message:
        """Send an object of the first process (without GPU tensors) to all; others give None."""
        objects: list[Any] = [own]
        if self.count > 1:
            torch.distributed.broadcast_object_list(objects, device=self.device)
        first: Message = objects[0]
        return first


ALONE = Workers(0, 1, CPU)


def _check_gpu(use_gpu: bool) -> None:
    if use_gpu and not torch.cuda.is_available():
        raise InvalidConfig("use_gpu is true, but torch finds no CUDA device: set use_gpu=false")
