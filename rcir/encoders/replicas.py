"""Replicas of an encoder on Ray's workers, which embed blocks of images side by side."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save

from rcir.cluster import cpus_per_gpu, join_cluster, quiet
from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, Images
from rcir.encoders.batches import BATCH, embed_block
from rcir.errors import InvalidImage
from rcir.memory import keep_freed_memory

SHOWING = "ray.data._internal.progress"


def embed_on_replicas(
    encoder: Encoder,
    preprocessing: Preprocessing,
    blocks: Mapping[int, Images],
    count: int,
    use_gpu: bool = False,
    batch: int = BATCH,
) -> Iterator[tuple[int, Embedding]]:
    """The embedding of each block by its number, as they are finished.

    Paths are read where the replica is; arrays travel through Ray's object store, of which they
    fill at most half. A replica that dies is replaced. Ray is started, or the cluster that
    RAY_ADDRESS names is joined, unless the process has done so.

    Args:
        blocks: images, each block of them small enough for the memory of a replica.
        count: of replicas, each with one CPU; as many of them work as the cluster has room for.
        use_gpu: each replica has one GPU, and reads images in as many threads as there are CPUs to
            a GPU.
        batch: number of images in a forward pass.

    Raises:
        InvalidImage: of an image that cannot be read.
        InvalidConfig: a GPU is asked for and the cluster has none.
    """
    with _quiet():
        join_cluster()
        threads = max(1, int(cpus_per_gpu())) if use_gpu else 1
        model = ray.put((copy.deepcopy(encoder).cpu(), preprocessing, threads, batch))
        for window in _windows(blocks, ray.cluster_resources()["object_store_memory"] / 2):
            images = {number: blocks[number] for number in window}
            yield from _streamed(model, images, min(count, len(window)), use_gpu)


def _streamed(
    model: ray.ObjectRef[Any], blocks: Mapping[int, Images], count: int, use_gpu: bool
) -> Iterator[tuple[int, Embedding]]:
    """The embedding of blocks that fit into the object store together."""
    kept = {number: ray.put(_absolute(images)) for number, images in blocks.items()}
    rows = ray.data.from_items(
        [{"block": number} for number in kept], override_num_blocks=len(kept)
    )
    embedded = rows.map_batches(
        Replica,
        fn_constructor_args=(model, kept),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=count),
        num_cpus=1,
        num_gpus=1 if use_gpu else None,
    )
    for row in embedded.iter_rows():
        if row["refused"]:
            raise InvalidImage(row["refused"])
        yield row["block"], Embedding.from_arrays(load(row["embedding"]))


class Replica:
    """An encoder in a process of its own.

    Args:
        model: the encoder, its preprocessing, the number of threads and of images in a forward
            pass, in Ray's object store.
        blocks: the images of each block, there as well.
    """

    def __init__(self, model: ray.ObjectRef[Any], blocks: Mapping[int, ray.ObjectRef[Any]]) -> None:
        self.encoder, self.preprocessing, threads, self.batch = ray.get(model)
        self.blocks = blocks
        torch.set_num_threads(threads)
        if ray.get_gpu_ids():
            self.encoder.cuda()
        else:
            keep_freed_memory()

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """One row: the number of a block in, its embedding as bytes out, or why there is none."""
        (number,) = batch["block"].tolist()
        embedding, refused = b"", ""
        try:
            block = ray.get(self.blocks[number])
            embedded = embed_block(self.encoder, self.preprocessing, block, self.batch)
            embedding = save(embedded.arrays())
        except InvalidImage as error:
            # Raised here, it would arrive as Ray's report on a failed task.
            refused = str(error)
        return {
            "block": batch["block"],
            "embedding": np.array([embedding], object),
            "refused": np.array([refused]),
        }


def _windows(blocks: Mapping[int, Images], most: float) -> Iterator[list[int]]:
    """The numbers of blocks, in lists of which each holds at most so many bytes of images."""
    window: list[int] = []
    held = 0
    for number, images in blocks.items():
        size = _bytes(images)
        if window and held + size > most:
            yield window
            window, held = [], 0
        window.append(number)
        held += size
    if window:
        yield window


def _absolute(images: Images) -> Images:
    """Images whose paths are understood in other folders too."""
    if isinstance(images, np.ndarray):
        return images
    return [
        Path(image).absolute() if isinstance(image, str | os.PathLike) else image
        for image in images
    ]


def _bytes(images: Images | Sequence[Any]) -> int:
    """Return the bytes of arrays; paths count as none."""
    if isinstance(images, np.ndarray):
        return images.nbytes
    return sum(getattr(image, "nbytes", 0) for image in images)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray's notes on itself are for its log, not for the screen."""
    context = ray.data.DataContext.get_current()
    shown = context.enable_progress_bars
    context.enable_progress_bars = False
    try:
        # The last one warns that it shows none.
        with quiet("ray", "ray.data"), quiet(SHOWING, level=logging.ERROR):
            yield
    finally:
        context.enable_progress_bars = shown
