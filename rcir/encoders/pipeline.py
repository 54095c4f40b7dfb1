"""Embed blocks of images: in this process, or by Ray Data, whose tasks decode and actors encode."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from rcir.encoders.base import Images
from rcir.encoders.batches import Block, EmbeddingModel, decode, embed_block, embed_pixels
from rcir.errors import RcirError, WorkersLost
from rcir.torch_settings import keep_freed_memory

MAX_DEATHS = 4  # of workers that decode or embed the same block, or start, for each encoder
START = ("start", -1)  # the step of an encoder that starts


class Blocks(Protocol):
    """Numbered blocks of images; workers get a copy of this object."""

    def load(self, number: int) -> tuple[Images, Any]:
        """Return the images of a block, and what `finish` needs; called where they are decoded."""

    def finish(self, number: int, block: Block, loaded: Any) -> Any:
        """Return the result of a block; called where it was embedded."""

    def describe(self, number: int) -> str:
        """Return a description of a block, for messages."""


def embed_here(
    model: EmbeddingModel, blocks: Blocks, numbers: Sequence[int], use_gpu: bool = False
) -> Generator[tuple[int, Any]]:
    """Yield the number and the result of each block, embedded in this process."""
    model = _on_device(model, use_gpu)
    for number in numbers:
        images, loaded = blocks.load(number)
        yield number, blocks.finish(number, embed_block(model, images), loaded)


def embed_on_ray(
    model: EmbeddingModel,
    blocks: Blocks,
    numbers: Sequence[int],
    num_workers: int,
    use_gpu: bool = False,
) -> Generator[tuple[int, Any]]:
    """Yield the number and the result of each block as it is finished, embedded by Ray's workers.

    With GPUs, tasks on CPUs decode. Without, each worker decodes what it encodes: Ray Data fuses
    both steps. A lost block is embedded again, with the same batches.

    Raises:
        InvalidConfig: the cluster has no GPU to use.
        WorkersLost: a block has ended `MAX_DEATHS` workers.
    """
    import ray.data
    from ray.exceptions import RayError

    from rcir.cluster import cpus_per_gpu, join_cluster

    join_cluster()
    if use_gpu:
        cpus_per_gpu()  # refuses a cluster without GPUs
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised
    starts: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Starts).remote()
    on_cpu = replace(model, encoder=copy.deepcopy(model.encoder).cpu())
    resources: dict[str, Any] = {"num_cpus": 0, "num_gpus": 1} if use_gpu else {"num_cpus": 1}
    size = min(num_workers, len(numbers))
    shared = _Shared(ray.put(on_cpu), ray.put((model.preprocessing, blocks)), starts, size)
    pool = ray.data.ActorPoolStrategy(min_size=1, max_size=size, initial_size=size)
    dataset = ray.data.from_items([*numbers], override_num_blocks=len(numbers))
    settings = dataset.context  # those of the steps below, too
    settings.enable_progress_bars = settings.print_on_execution_start = False
    settings.target_max_block_size = None  # a block stays whole
    rows = (
        dataset.map_batches(partial(_decode, shared), batch_size=1, num_cpus=1)
        .map_batches(_Encode, fn_constructor_args=[shared], batch_size=1, compute=pool, **resources)
        .iter_rows()
    )
    try:
        for row in rows:
            result = pickle.loads(row["result"])
            if isinstance(result, Exception):
                raise result
            yield int(row["number"]), result
    except RayError as error:
        raise _lost(error) from error
    finally:
        ray.kill(starts)


def _lost(error: Exception) -> WorkersLost:
    reason = str(getattr(error, "cause", None) or error).strip().partition("\n")[0]
    return WorkersLost(
        f"workers that embed failed ({reason}): check the memory and disks of the nodes, and Ray's "
        "logs of workers"
    )


def run_on_ray(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """Start a function on a node of the cluster; return a function that waits for its end."""
    import ray

    from rcir.cluster import join_cluster

    join_cluster()  # Ray itself would join any cluster of the machine
    started = ray.remote(num_cpus=0)(function).remote(*arguments)

    def wait() -> None:
        try:
            ray.get(started)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise _lost(error) from error

    return wait


def _on_device(model: EmbeddingModel, use_gpu: bool) -> EmbeddingModel:
    return replace(model, encoder=copy.deepcopy(model.encoder).cuda()) if use_gpu else model


class _Shared(NamedTuple):
    """What the workers of an embedding share; in a tuple, Ray does not replace references."""

    model: Any  # reference of the model
    blocks: Any  # reference of preprocessing and blocks: decoding needs no copy of the weights
    starts: Any  # the actor `_Starts`
    size: int  # encoders


class _Starts:
    """An actor that counts how often work on a block, or an encoder, has started."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}

    def count(self, step: str, number: int) -> int:
        if step == "encode":  # an encoder has started
            self._counts.pop(START, None)
        self._counts[step, number] = self._counts.get((step, number), 0) + 1
        return self._counts[step, number]


def _begin(shared: _Shared, step: str, blocks: Blocks, number: int) -> None:
    """Raise `WorkersLost` if workers died `MAX_DEATHS` times at this block."""
    import ray

    if ray.get(shared.starts.count.remote(step, number)) > MAX_DEATHS:
        raise WorkersLost(
            f"{MAX_DEATHS} workers died, one after the other, as they embedded "
            f"{blocks.describe(number)}: check these images and the memory of the nodes, or lower "
            "the batch"
        )


def _decode(shared: _Shared, rows: dict[str, Any]) -> dict[str, Any]:
    """Return the pixels of the block with the number in the only row."""
    import ray

    (number,) = rows["item"].tolist()
    preprocessing, blocks = ray.get(shared.blocks)
    pixels: Any = torch.empty(0)
    try:
        _begin(shared, "decode", blocks, number)
        images, loaded = blocks.load(number)
        pixels, rejects = decode(preprocessing, images)
        state: Any = rejects, loaded
    except (RcirError, OSError) as error:  # Ray would wrap it
        state = error
    return {"number": rows["item"], "pixels": pixels.numpy()[None], "state": [pickle.dumps(state)]}


class _Encode:
    """An encoder in a worker of Ray Data."""

    def __init__(self, shared: _Shared) -> None:
        import ray

        # Ray Data would replace it for ever.
        if ray.get(shared.starts.count.remote(*START)) > MAX_DEATHS * shared.size:
            raise WorkersLost("workers died repeatedly while they loaded the encoder")
        self._shared = shared
        self._blocks = ray.get(shared.blocks)[1]
        model = ray.get(shared.model)
        use_gpu = bool(ray.get_gpu_ids())
        if not use_gpu:
            torch.set_num_threads(1)
            keep_freed_memory()
        self._model = _on_device(model, use_gpu)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the block in the only row."""
        (number,) = rows["number"].tolist()
        state = pickle.loads(rows["state"][0])
        try:
            if isinstance(state, Exception):
                raise state
            _begin(self._shared, "encode", self._blocks, number)
            rejects, loaded = state
            block = embed_pixels(self._model, rows["pixels"][0], rejects), rejects
            result = self._blocks.finish(number, block, loaded)
        except (RcirError, OSError) as error:
            result = error
        return {"number": rows["number"], "result": [pickle.dumps(result)]}
