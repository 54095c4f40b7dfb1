"""The processes that train together: how they communicate, and their progress on the screen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from threading import Event, Thread, current_thread, main_thread
from typing import Any, TypeVar

import ray.train
import ray.train.torch
import torch
import torch.distributed
from torch import Tensor

from rcir.errors import InvalidConfig
from rcir.files import owner, remove_unfinished
from rcir.terminal import console, working

SHARED_MEMORY = Path("/dev/shm/rcir")  # beside it are files that processes of a node share
CPU = torch.device("cpu")
# In the folder of a run: the output of its first worker, and of the process that starts workers.
LOG_FILE = "training.log"
PROGRESS_FILE = "progress.json"  # what the first worker works on
FOLLOW_INTERVAL_S = 0.5
Message = TypeVar("Message")


@dataclass(frozen=True)
class Workers:
    """This process among those that train together."""

    rank: int  # of this process, from 0
    count: int  # of all
    device: torch.device  # that this process computes on

    @classmethod
    def join(cls, use_gpu: bool) -> Workers:
        """Join the workers of the Ray training; `InvalidConfig` if there is no GPU to use."""
        _check_gpu(use_gpu)
        device = ray.train.torch.get_device() if use_gpu else CPU
        if use_gpu:  # where torch puts the objects that workers exchange
            torch.cuda.set_device(device)
        context = ray.train.get_context()
        return cls(context.get_world_rank(), context.get_world_size(), device)

    @classmethod
    def alone(cls, use_gpu: bool) -> Workers:
        """Return this process without others; `InvalidConfig` if there is no GPU to use."""
        _check_gpu(use_gpu)
        return cls(0, 1, torch.device("cuda", torch.cuda.current_device()) if use_gpu else CPU)

    def shard(self, n: int) -> range:
        """Return the part of 0, ..., n - 1 for this process; parts follow each other by rank."""
        return range(n * self.rank // self.count, n * (self.rank + 1) // self.count)

    def all_gather(self, rows: Tensor, shared: bool = False) -> Tensor:
        """Return the rows (n, ...) of all processes, by rank; their numbers n may differ.

        If `shared`, processes on the CPUs of a node share one copy, which must not be changed.
        """
        if self.count == 1:
            return rows
        rows = rows.to(self.device).contiguous()
        counts = torch.empty(self.count, dtype=torch.int64, device=self.device)
        torch.distributed.all_gather_into_tensor(counts, counts.new_full((1,), len(rows)))
        lengths = counts.cpu().tolist()
        shape = (sum(lengths), *rows.shape[1:])
        if shared and self.device.type == "cpu":
            gathered = self.allocate_shared(shape, rows.dtype)
        else:
            gathered = rows.new_empty(shape)
            if min(lengths) == max(lengths):
                torch.distributed.all_gather_into_tensor(gathered, rows)
                return gathered
        # In turn: without padding or Gloo's copy, which would double the memory.
        for rank, part in enumerate(gathered.split(lengths)):
            if rank == self.rank:
                part.copy_(rows)
            if len(part):
                torch.distributed.broadcast(part, rank)
        return gathered

    def allocate_shared(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that the processes of a node share, or private memory if there is none."""
        remove_unfinished(SHARED_MEMORY)  # of workers that were killed
        # The processes of a node use the file of the first of them.
        names = self.share(self.count, lambda _: f"{owner()}-{token_hex(4)}")
        host = owner().partition("-")[0]
        name = next(name for name in names if name.startswith(f"{host}-"))
        path = SHARED_MEMORY.with_name(f".{SHARED_MEMORY.name}-{name}")
        values = torch.empty(shape, dtype=dtype)
        with suppress(OSError):  # no such folder, or too little room there
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, values.nbytes)
            common = torch.from_file(str(path), shared=True, size=values.numel(), dtype=dtype)
            values = common.view(shape)
        torch.distributed.barrier()
        path.unlink(missing_ok=True)  # it stays until the last process has dropped its tensor
        return values

    def share(self, n: int, function: Callable[[int], Message]) -> list[Message]:
        """Divide the calls of a function with 0, ..., n - 1 among the processes.

        Every process gets all n values, which must not contain GPU tensors.
        """
        results = [function(number) for number in range(self.rank, n, self.count)]
        everyone: list[Any] = [results]
        if self.count > 1:
            everyone = [None] * self.count
            torch.distributed.all_gather_object(everyone, results)
        return [everyone[number % self.count][number // self.count] for number in range(n)]

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.count > 1:
            values = values.clone()
            torch.distributed.all_reduce(values)
        return values

    def broadcast(self, value: Message | None) -> Message:
        """Return the object (without GPU tensors) of the first process; others pass None."""
        objects: list[Any] = [value]
        if self.count > 1:
            torch.distributed.broadcast_object_list(objects, device=self.device)
        result: Message = objects[0]
        return result


ALONE = Workers(0, 1, CPU)


def _check_gpu(use_gpu: bool) -> None:
    if use_gpu and not torch.cuda.is_available():
        raise InvalidConfig("use_gpu is true, but torch finds no CUDA device: set use_gpu=false")


@contextmanager
def follow(logs: Mapping[Path, str], state: Callable[[], str]) -> Iterator[None]:
    """Print lines that are appended to files inside the block; Ray would not forward all of them.

    `logs` has the files, which need not exist yet, and a prefix for their lines. The process that
    writes the first of them forwards its work to `PROGRESS_FILE` beside it; `state` describes what
    happens until it does. As with `working`, threads other than the main one show nothing.
    """
    if current_thread() is not main_thread():
        yield
        return
    read = {log: log.stat().st_size if log.is_file() else 0 for log in logs}
    forwarded = [log.with_name(PROGRESS_FILE) for log in logs]
    ended = Event()

    def print_lines() -> None:
        last = False
        while not last:
            last = ended.wait(FOLLOW_INTERVAL_S)
            for log, prefix in logs.items():
                with suppress(OSError), log.open("rb") as file:
                    file.seek(read[log])
                    lines, _, _ = file.read().rpartition(b"\n")
                    read[log] += len(lines) + 1 if lines else 0
                    for line in lines.decode().splitlines():
                        console.print(f"{prefix}{line}", soft_wrap=True)
            if path := next(filter(Path.is_file, forwarded), None):
                work.follow(path)
            else:
                work.become(state())

    for path in forwarded:  # of a process that was killed
        path.unlink(missing_ok=True)
    with working(state(), logged=True) as work:
        thread = Thread(target=print_lines, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for path in forwarded:
                path.unlink(missing_ok=True)
