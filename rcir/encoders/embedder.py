"""Embed a large set of images on several workers; an interruption loses one block."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from rcir.data.images import read_image
from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, Images
from rcir.encoders.batches import Block, embed_readable, split_blocks
from rcir.errors import InvalidConfig, InvalidImage
from rcir.files import write_file
from rcir.options import require_at_least
from rcir.terminal import working

if TYPE_CHECKING:
    from rcir.encoders.replicas import Replicas

PART = "part-"  # prefix of the file of a block
REJECTS = "rejects"  # in its metadata: rows and reasons of unreadable images


@dataclass(frozen=True)
class Embedder:
    """Embeds many images: on several workers, and resumes what was interrupted.

    Args:
        num_workers: replicas of the encoder on Ray's workers; 0 embeds in this process.
        use_gpu: one GPU per replica; with 0 workers, the GPU of this process.
        folder: keeps a file of each finished block, named by a digest of encoder, preprocessing and
            images (files: their names, sizes and times). Of a stored block, only images that could
            not be read are tried again.
        batch: number of images in a forward pass; None for as many as fit, see `batch_within`.
        replicas: of an `open` embedder; otherwise each call starts and ends its own.

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
    replicas: Replicas | None = None

    def __post_init__(self) -> None:
        require_at_least(self, num_workers=0, batch=1)
        if self.use_gpu and self.num_workers == 0 and not torch.cuda.is_available():
            raise InvalidConfig("use_gpu is true, and this process has no CUDA device")

    def __call__(self, encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
        """Embed images, in their order, on the CPU; `InvalidImage` if one cannot be read."""
        done: dict[int, Embedding] = {}
        # Closed at an error, too: a traceback would keep its progress and its workers alive.
        with closing(self._finish_blocks(encoder, preprocessing, split_blocks(images))) as finished:
            for number, (embedding, rejects) in finished:
                if rejects:
                    raise InvalidImage(next(iter(rejects.values())))
                assert embedding is not None
                done[number] = embedding
        return Embedding.concatenate([done[number] for number in range(len(done))])

    def embed_readable(
        self, encoder: Encoder, preprocessing: Preprocessing, images: Images
    ) -> Block:
        """Embed the readable images; see `rcir.encoders.batches.embed_readable`."""
        blocks = split_blocks(images)
        done = dict(self._finish_blocks(encoder, preprocessing, blocks))
        embeddings: list[Embedding] = []
        all_rejects: dict[int, str] = {}
        start = 0
        for number, block in enumerate(blocks):
            embedding, rejects = done[number]
            if embedding is not None:
                embeddings.append(embedding)
            all_rejects |= {start + row: reason for row, reason in rejects.items()}
            start += len(block)
        return Embedding.concatenate(embeddings) if embeddings else None, all_rejects

    def _finish_blocks(
        self, encoder: Encoder, preprocessing: Preprocessing, blocks: Sequence[Images]
    ) -> Generator[tuple[int, Block]]:
        """Yield the number and the content of each block, in any order, once it is stored."""
        parts: dict[int, Path] = {}  # the file of each block
        if self.folder is not None:
            digests = digest_blocks(encoder, preprocessing, blocks)
            parts = {n: self.folder / f"{PART}{d}.safetensors" for n, d in enumerate(digests)}
        incomplete: dict[int, Block] = {}
        missing: dict[int, Images] = dict(enumerate(blocks))
        with working("embedding", sum(map(len, blocks))) as work, self.open() as opened:
            for number, part in parts.items():
                stored = _read(part, len(blocks[number]))
                if stored is None:
                    continue
                if stored[1]:  # these may be readable by now, with a higher limit of pixels
                    incomplete[number] = stored
                    missing[number] = [blocks[number][row] for row in stored[1]]
                else:
                    del missing[number]
                    work.advance(len(blocks[number]), reused=True)
                    yield number, stored
            for number, block in opened._embed_blocks(encoder, preprocessing, missing):
                if number in incomplete:
                    block = _complete(incomplete[number], block)
                if number in parts:
                    _write(parts[number], block)
                work.advance(len(blocks[number]))
                yield number, block

    @contextmanager
    def open(self) -> Iterator[Embedder]:
        """Return the embedder with replicas that stay, with their CPUs and GPUs, during the block.

        Copies with another folder share them.
        """
        if self.num_workers == 0 or self.replicas is not None:
            yield self
            return
        from rcir.encoders.replicas import Replicas  # imports Ray

        with Replicas(self.num_workers, self.use_gpu) as replicas:
            yield replace(self, replicas=replicas)

    def clear(self) -> None:
        """Remove the blocks in the folder, and the folder if nothing else is left."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in [*self.folder.glob(f"{PART}*"), *self.folder.glob(f".{PART}*")]:
            path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _embed_blocks(
        self, encoder: Encoder, preprocessing: Preprocessing, blocks: Mapping[int, Images]
    ) -> Iterator[tuple[int, Block]]:
        """Yield the number and the content of each block, in any order."""
        # A single block on a CPU is not worth a replica.
        if self.replicas is not None and blocks and (self.use_gpu or len(blocks) > 1):
            yield from self.replicas.embed(encoder, preprocessing, blocks, self.batch)
            return
        if self.use_gpu:
            encoder = copy.deepcopy(encoder).cuda()
        for number, images in blocks.items():
            embedding, rejects = embed_readable(encoder, preprocessing, images, self.batch)
            if embedding is not None:  # with tensors that can be differentiated
                embedding = Embedding.from_arrays(embedding.arrays())
            yield number, (embedding, rejects)


def digest_blocks(
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
            path = Path(image).absolute()
            yield os.fsencode(path) + b"\0"  # a name need not be UTF-8
            with contextlib.suppress(OSError):  # reading a missing file will report it
                status = path.stat()
                yield f"{status.st_size}\0{status.st_mtime_ns}\0".encode()
        else:
            pixels = read_image(image, channels)
            yield str(pixels.shape).encode()
            yield np.ascontiguousarray(pixels)


def _complete(stored: Block, again: Block) -> Block:
    """Return a stored block after its rejected images were read again."""
    (before, stored_rejects), (embedding, rejects) = stored, again
    tried = list(stored_rejects)
    remaining = {tried[row]: reason for row, reason in rejects.items()}
    if embedding is None or before is None:
        return before if embedding is None else embedding, remaining
    n = len(before) + len(tried)
    rows = [row for row in range(n) if row not in stored_rejects]
    rows += [row for row in tried if row not in remaining]
    return Embedding.concatenate([before, embedding])[np.argsort(rows)], remaining


def _write(part: Path, block: Block) -> None:
    """Write a finished block and its rejects."""
    embedding, rejects = block
    part.parent.mkdir(parents=True, exist_ok=True)
    arrays = {} if embedding is None else embedding.arrays()
    write_file(part, save(arrays, {REJECTS: json.dumps(rejects)} if rejects else None))


def _read(part: Path, images: int) -> Block | None:
    """Read a finished block and its rejects; None if it is missing or incomplete."""
    try:
        arrays = load_file(part)
        with safe_open(part, "np") as file:
            stored = (file.metadata() or {}).get(REJECTS, "{}")
        rejects = {int(row): str(reason) for row, reason in json.loads(stored).items()}
        embedding = Embedding.from_arrays(arrays) if arrays else None
    except (OSError, SafetensorError, TypeError, ValueError):
        return None
    n = 0 if embedding is None else len(embedding)
    return (embedding, rejects) if n + len(rejects) == images else None
