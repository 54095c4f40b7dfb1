"""Replicas of an encoder on Ray's workers that embed blocks of images in parallel."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError

from rcir.cluster import cpus_per_gpu, join_cluster
from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, Images
from rcir.encoders.batches import Block, embed_readable
from rcir.errors import RcirError, WorkersLost
from rcir.torch_settings import keep_freed_memory

MAX_DEATHS = 4  # of replicas that embed the same block


class Replicas:
    """Processes on Ray's workers, `count` at most, that embed blocks of images by any encoder.

    They start with the first blocks, stay from call to call, and end with the `with` statement. A
    replica that dies is replaced, and its block embedded again, up to `MAX_DEATHS` times. Each has
    one CPU; with `use_gpu` also a GPU, and a thread for each of the CPUs per GPU to read images.
    """

    def __init__(self, count: int, use_gpu: bool = False) -> None:
        self._count, self._use_gpu = count, use_gpu
        self._replicas: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._replicas:
            ray.kill(self._replicas.pop())

    def embed(
        self,
        encoder: Encoder,
        preprocessing: Preprocessing,
        blocks: Mapping[int, Images],
        batch: int | None = None,
    ) -> Iterator[tuple[int, Block]]:
        """Yield the number and the content of each block as it is finished, see `embed_readable`.

        Raises `InvalidConfig` if the cluster has no GPU to use, and `WorkersLost` if a block has
        ended `MAX_DEATHS` replicas.
        """
        self._start(min(self._count, len(blocks)))
        # In a list, since Ray would pass the value of a bare reference.
        model = [ray.put((copy.deepcopy(encoder).cpu(), preprocessing, batch))]
        numbers, n_missing = iter(blocks), len(blocks)
        # A replica gets its first block once it has started, which may never happen.
        pending: dict[Any, tuple[Any, int | None]] = {
            replica.ready.remote(): (replica, None) for replica in self._replicas
        }
        while n_missing:
            (finished,), _ = ray.wait(list(pending))
            replica, number = pending.pop(finished)
            try:
                block = _result(finished)
            except RayActorError as error:
                what, advice = "started", "check the memory of the nodes, and Ray's logs of workers"
                if number is not None:
                    what = f"embedded {_describe(blocks[number])}"
                    advice = "check these images and the memory of the nodes, or lower the batch"
                raise WorkersLost(
                    f"{MAX_DEATHS} replicas died, one after the other, as they {what}: {advice}"
                ) from error
            if (following := next(numbers, None)) is not None:
                result = replica.embed.remote(model, _absolute(blocks[following]))
                pending[result] = (replica, following)
            if number is not None:
                n_missing -= 1
                # Copied, since the memory of Ray's object store is read-only.
                arrays, rejects = block
                copied = {k: v.copy() for k, v in arrays.items()}
                yield number, (Embedding.from_arrays(copied) if copied else None, rejects)

    def _start(self, count: int) -> None:
        """Start replicas until there are so many."""
        join_cluster()
        threads = max(1, int(cpus_per_gpu())) if self._use_gpu else 1
        kind: Any = ray.remote(
            num_cpus=1,
            num_gpus=1 if self._use_gpu else 0,
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_task_retries=MAX_DEATHS - 1,
        )(Replica)
        while len(self._replicas) < count:
            self._replicas.append(kind.remote(threads))


class Replica:
    """An encoder in its own process with some number of threads."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        if not ray.get_gpu_ids():
            keep_freed_memory()
        self._reference: ray.ObjectRef[Any] | None = None

    def ready(self) -> None:
        """Return once the process has started."""

    def embed(
        self, model: list[ray.ObjectRef[Any]], images: Images
    ) -> tuple[dict[str, NDArray[Any]], dict[int, str]]:
        """Return the arrays of the embedding of a block, and the rejects; load a model once."""
        if model[0] != self._reference:
            self._model = ray.get(model[0])
            if ray.get_gpu_ids():
                self._model[0].cuda()
            self._reference = model[0]
        encoder, preprocessing, batch = self._model
        embedding, rejects = embed_readable(encoder, preprocessing, images, batch)
        return {} if embedding is None else embedding.arrays(), rejects


def _result(reference: ray.ObjectRef[Any]) -> Any:
    """Return the result of a task, or raise its error as it was raised there."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, RcirError) else error from None


def _describe(images: Images) -> str:
    """Return the number of images of a block, and the first and the last file."""
    is_file = isinstance(images[0], str | os.PathLike)
    return f"{len(images)} images" + (f", {images[0]!s} to {images[-1]!s}" if is_file else "")


def _absolute(images: Images) -> Images:
    """Return images with absolute paths, for processes in other folders."""
    if isinstance(images, np.ndarray):
        return images
    return [
        Path(image).absolute() if isinstance(image, str | os.PathLike) else image
        for image in images
    ]
