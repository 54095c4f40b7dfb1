"""Embedding any number of images, block by block, so that an interruption loses one block."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from rcir.data.images import ImageLike, read_image
from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder
from rcir.errors import InvalidConfig

BATCH = 128  # images in a forward pass
CHUNK = 8 * BATCH  # images of a block: those in memory as bytes, and lost by an interruption
PART = "part-"  # how the name of the file of a block begins

Images: TypeAlias = "Sequence[ImageLike] | NDArray[np.uint8]"
Embed: TypeAlias = Callable[[Encoder, Preprocessing, Images], Embedding]


def embed(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
    """Embed any number of images in batches, on the device of the encoder."""
    blocks = _blocks(images)
    return Embedding.concatenate([embed_block(encoder, preprocessing, block) for block in blocks])


def embed_block(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
    """Embed images that fit into memory, in batches, on the device of the encoder."""
    device = next(encoder.parameters()).device
    batches = torch.split(preprocessing.resized(images), BATCH)
    return Embedding.concatenate(
        [encoder.embed(preprocessing.normalise(batch.to(device))) for batch in batches]
    )


def draw(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> torch.Tensor | None:
    """Draws (t, n, d) of the embeddings of n images, see `Encoder.samples`; None if it has none."""
    device = next(encoder.parameters()).device
    generator = torch.Generator().manual_seed(0)
    parts = []
    for batch in torch.split(preprocessing.resized(images), BATCH):
        drawn = encoder.samples(preprocessing.normalise(batch.to(device)), generator)
        if drawn is None:
            return None
        parts.append(drawn)
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Embedder:
    """`embed` for many images: on several workers, and without doing again what was done before.

    Args:
        num_workers: replicas of the encoder, on Ray's workers; 0 embeds in this process.
        use_gpu: one GPU per replica; with 0 workers, the GPU of this process.
        folder: keeps each finished block as a file, named by a digest of encoder, preprocessing and
            images (files: their names, sizes and times); a block found there is not embedded again.
        progress: told of each finished block how many images it has, and whether it was found.

    Example:
        >>> from rcir.encoders import EncoderConfig, build_encoder
        >>> encoder = build_encoder(EncoderConfig("btl", dim=16), channels=1, size=(8, 16))
        >>> Embedder()(encoder, Preprocessing(), np.zeros((2000, 8, 16), np.uint8)).mean.shape
        torch.Size([2000, 16])
    """

    num_workers: int = 0
    use_gpu: bool = False
    folder: Path | None = None
    progress: Callable[[int, bool], None] = lambda images, found: None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise InvalidConfig(f"num_workers is {self.num_workers}; at least 0")
        if self.use_gpu and self.num_workers == 0 and not torch.cuda.is_available():
            raise InvalidConfig("use_gpu is true, and this process has no CUDA device")

    def __call__(self, encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
        """Embed images, in their order; the result is on the CPU.

        Raises:
            InvalidImage: of an image that cannot be read.
            InvalidConfig: Ray's cluster has no GPU to use.
        """
        blocks = _blocks(images)
        parts = self._parts(encoder, preprocessing, blocks)
        done: dict[int, Embedding] = {}
        for number, part in parts.items():
            found = _read(part, len(blocks[number]))
            if found is not None:
                done[number] = found
                self.progress(len(found), True)
        missing = {number: block for number, block in enumerate(blocks) if number not in done}
        for number, embedding in self._embedded(encoder, preprocessing, missing):
            done[number] = embedding
            if number in parts:
                _write(parts[number], embedding)
            self.progress(len(embedding), False)
        return Embedding.concatenate([done[number] for number in range(len(blocks))])

    def clear(self) -> None:
        """Remove the blocks that the folder keeps, and the folder unless it holds anything else."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in [*self.folder.glob(f"{PART}*"), *self.folder.glob(f".{PART}*")]:
            path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _parts(
        self, encoder: Encoder, preprocessing: Preprocessing, blocks: Sequence[Images]
    ) -> dict[int, Path]:
        """Where each block is kept, if there is a folder."""
        if self.folder is None:
            return {}
        encoded = encoder.fingerprint() + json.dumps(asdict(preprocessing), sort_keys=True)
        parts = {}
        for number, block in enumerate(blocks):
            digest = hashlib.sha256(encoded.encode())
            for fact in _facts(block, preprocessing.channels):
                digest.update(fact)
            parts[number] = self.folder / f"{PART}{digest.hexdigest()}.safetensors"
        return parts

    def _embedded(
        self, encoder: Encoder, preprocessing: Preprocessing, blocks: Mapping[int, Images]
    ) -> Iterator[tuple[int, Embedding]]:
        """The embedding of each block by its number, in any order."""
        if self.num_workers > 0 and blocks:
            # Ray is imported where there is work for it only.
            from rcir.encoders.replicas import embed_on_replicas

            yield from embed_on_replicas(
                encoder, preprocessing, blocks, self.num_workers, self.use_gpu
            )
            return
        if self.use_gpu:
            encoder = copy.deepcopy(encoder).cuda()
        for number, block in blocks.items():
            yield number, from_arrays(to_arrays(embed_block(encoder, preprocessing, block)))


def to_arrays(embedding: Embedding) -> dict[str, NDArray[np.float32]]:
    """What an embedding has, as arrays in the memory of this process."""
    return {
        name: values.cpu().numpy() for name, values in vars(embedding).items() if values is not None
    }


def from_arrays(arrays: Mapping[str, NDArray[np.float32]]) -> Embedding:
    """The embedding of `to_arrays`."""
    return Embedding(**{name: torch.from_numpy(values) for name, values in arrays.items()})


def _blocks(images: Images) -> list[Images]:
    """Images in blocks of `CHUNK`; of none one block, which `Preprocessing.resized` refuses."""
    return [images[start : start + CHUNK] for start in range(0, max(1, len(images)), CHUNK)]


def _facts(images: Images, channels: int) -> Iterator[Any]:
    """What tells the images of a block from others, as bytes or arrays of bytes."""
    if isinstance(images, np.ndarray) and images.dtype == np.uint8:
        yield str(images.shape).encode()
        yield np.ascontiguousarray(images)
        return
    for image in images:
        if isinstance(image, str | os.PathLike):
            path = Path(image).absolute()
            yield f"{path}\0".encode()
            # Reading a file that is not there says so.
            with contextlib.suppress(OSError):
                status = path.stat()
                yield f"{status.st_size}\0{status.st_mtime_ns}\0".encode()
        else:
            pixels = read_image(image, channels)
            yield str(pixels.shape).encode()
            yield np.ascontiguousarray(pixels)


def _read(part: Path, images: int) -> Embedding | None:
    """A finished block; None if it is not there, or by half."""
    try:
        found = from_arrays(load_file(part))
    except (OSError, SafetensorError, TypeError, ValueError):
        return None
    return found if len(found) == images else None


def _write(part: Path, embedding: Embedding) -> None:
    """Write a block aside, then rename it into place."""
    part.parent.mkdir(parents=True, exist_ok=True)
    aside = part.with_name(f".{part.name}-{uuid.uuid4().hex}")
    aside.write_bytes(save(to_arrays(embedding)))
    aside.replace(part)
