"""Embed a data set into memory, also on several workers; an interruption loses one block."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rcir import storage
from rcir.data.images import read_image
from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, Images
from rcir.encoders.batches import Block, EmbeddingModel
from rcir.encoders.pipeline import embed_here, embed_on_ray
from rcir.errors import InvalidConfig, InvalidImage
from rcir.files import write_file
from rcir.options import require_at_least
from rcir.terminal import working

PART = "part-"  # prefix of the file of a block


@dataclass(frozen=True)
class Embedder:
    """Embeds many images: on several workers, and resumes what was interrupted.

    Args:
        num_workers: encoders on Ray's workers; 0 embeds in this process.
        use_gpu: one GPU per worker; with 0 workers, the GPU of this process.
        folder: keeps a file of each finished block, named by a digest of encoder, preprocessing and
            images (files: their names, sizes and times).
        batch: number of images in a forward pass; None for as many as fit, see `batch_within`.

    Example:
        >>> from rcir.encoders import EncoderConfig, build_encoder
        >>> encoder = build_encoder(EncoderConfig("btl", dim=16), channels=1, size=(8, 16))
        >>> Embedder()(encoder, Preprocessing(), np.zeros((2000, 8, 16), np.uint8)).vectors.shape
        torch.Size([2000, 16])
    """

    num_workers: int = 0
    use_gpu: bool = False
    folder: Path | None = None
    batch: int | None = None

    def __post_init__(self) -> None:
        require_at_least(self, num_workers=0, batch=1)
        if self.use_gpu and self.num_workers == 0 and not torch.cuda.is_available():
            raise InvalidConfig("use_gpu is true, and this process has no CUDA device")

    def __call__(self, encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
        """Embed images, in their order, on the CPU; `InvalidImage` if one cannot be read."""
        model = EmbeddingModel(encoder, preprocessing, self.batch)
        starts = range(0, max(1, len(images)), model.block_size)
        blocks = [images[start : start + model.block_size] for start in starts]
        parts: list[Path] = []  # the file of each block
        if self.folder is not None:
            digests = _digest_blocks(encoder, preprocessing, blocks)
            parts = [self.folder / f"{PART}{digest}.safetensors" for digest in digests]
        done = {
            number: stored
            for number, part in enumerate(parts)
            if (stored := _read(part, len(blocks[number]))) is not None
        }
        missing = [number for number in range(len(blocks)) if number not in done]
        with working("embedding", len(images), has_rate=True) as work:
            for number in done:
                work.advance(len(blocks[number]), reused=True)
            # Closed at an error, too: a traceback would keep its progress and its workers alive.
            with closing(self._embed(model, blocks, missing)) as finished:
                for number, content in finished:
                    if isinstance(content, str):
                        raise InvalidImage(content)
                    if parts:
                        parts[number].parent.mkdir(parents=True, exist_ok=True)
                        write_file(parts[number], content)
                    done[number] = Embedding.from_arrays(load(content))
                    work.advance(len(blocks[number]))
        return Embedding.concatenate([done[number] for number in range(len(done))])

    def _embed(
        self, model: EmbeddingModel, blocks: Sequence[Images], numbers: Sequence[int]
    ) -> Generator[tuple[int, Any]]:
        # A single block on a CPU is not worth a worker.
        if self.num_workers and numbers and (self.use_gpu or len(numbers) > 1):
            kept = _InStore(blocks)
            return embed_on_ray(model, kept, numbers, self.num_workers, self.use_gpu)
        return embed_here(model, _InMemory(blocks), numbers, self.use_gpu and not self.num_workers)

    def clear(self) -> None:
        """Remove the blocks in the folder, and the folder if nothing else is left."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in [*self.folder.glob(f"{PART}*"), *self.folder.glob(f".{PART}*")]:
            path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


class _InMemory:
    """Blocks of images; the result of each are the bytes of its file, or why there are none."""

    def __init__(self, blocks: Sequence[Images]) -> None:
        self._blocks = blocks

    def load(self, number: int) -> tuple[Images, None]:
        return self._blocks[number], None

    def finish(self, number: int, block: Block, loaded: None) -> bytes | str:
        embedding, rejects = block
        if rejects or embedding is None:
            return next(iter(rejects.values()))
        return save(embedding.arrays())

    def describe(self, number: int) -> str:
        """Return the number of images of a block, and the first and the last file."""
        images = self.load(number)[0]
        is_file = isinstance(images[0], str | os.PathLike)
        return f"{len(images)} images" + (f", {images[0]!s} to {images[-1]!s}" if is_file else "")


class _InStore(_InMemory):
    """Blocks in Ray's object store, with absolute paths: workers run in other folders."""

    def __init__(self, blocks: Sequence[Images]) -> None:
        import ray

        from rcir.cluster import join_cluster

        join_cluster()
        references: Any = [ray.put(_absolute(block)) for block in blocks]
        super().__init__(references)

    def load(self, number: int) -> tuple[Images, None]:
        import ray

        reference: Any = self._blocks[number]
        return ray.get(reference), None


def _absolute(images: Images) -> Images:
    if isinstance(images, np.ndarray):
        return images
    return [
        Path(image).absolute() if isinstance(image, str | os.PathLike) else image
        for image in images
    ]


def _digest_blocks(
    encoder: Encoder, preprocessing: Preprocessing, blocks: Iterable[Images]
) -> Iterator[str]:
    """Yield a digest of encoder, preprocessing and images (files: names, sizes, times)."""
    encoded = encoder.fingerprint() + json.dumps(preprocessing.identity(), sort_keys=True)
    for block in blocks:
        digest = hashlib.sha256(encoded.encode())
        for content in _contents(block, preprocessing.channels):
            digest.update(content)
        yield digest.hexdigest()


def _contents(images: Images, channels: int) -> Iterator[Any]:
    """Yield bytes and arrays of bytes that identify images."""
    if isinstance(images, np.ndarray) and (images.dtype == np.uint8 or images.dtype.kind == "f"):
        yield str(images.shape).encode()
        yield np.ascontiguousarray(images)
        return
    for image in images:
        if isinstance(image, str | os.PathLike):
            yield identify_file(Path(image))
        else:
            pixels = read_image(image, channels)
            yield str(pixels.shape).encode()
            yield np.ascontiguousarray(pixels)


def identify_file(path: Path) -> bytes:
    """Return the name of a file, and its size and time (or ETag) if it can be read."""
    if storage.is_uri(path):
        identity = storage.as_text(path).encode() + b"\0"
        with contextlib.suppress(FileNotFoundError):
            info = storage.stat_object(path)
            identity += f"{info.size}\0{info.etag}\0".encode()
        return identity
    path = Path(path).absolute()
    identity = os.fsencode(path) + b"\0"  # a name need not be UTF-8
    with contextlib.suppress(OSError):  # reading a missing file will report it
        status = path.stat()
        identity += f"{status.st_size}\0{status.st_mtime_ns}\0".encode()
    return identity


def _read(part: Path, images: int) -> Embedding | None:
    """Read a finished block; None if it is missing or incomplete."""
    try:
        embedding = Embedding.from_arrays(load(part.read_bytes()))
    except (OSError, SafetensorError, TypeError, ValueError, KeyError):
        return None
    return embedding if len(embedding) == images else None
