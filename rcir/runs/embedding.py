"""Embed pictures into files of vectors, by a model of a hub or the encoder of a training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from pyarrow import ArrowException, parquet

from rcir.data.datasets.user_images import list_pictures
from rcir.data.folders import Pictures
from rcir.data.images import read_capture_times
from rcir.data.preprocessing import Preprocessing
from rcir.data.rejects import check_max_rejects, count_allowed, tolerate
from rcir.data.vector_files import MODEL_KEY, REJECTS_KEY, SOURCE_KEY, shard_name, write_vectors
from rcir.embedding import Embedding
from rcir.encoders import Encoder, EncoderConfig, build_encoder, model_preprocessing
from rcir.encoders.batches import BATCH
from rcir.encoders.embedder import Embedder, digest_blocks
from rcir.encoders.hub import is_of_hub
from rcir.encoders.memory import EMBEDDING_GIB, batch_within, check_memory, memory_budget
from rcir.errors import InvalidConfig, InvalidImage, printable
from rcir.retrieval.fingerprints import model_digest
from rcir.runs.config import EmbeddingConfig
from rcir.runs.folder import find_run
from rcir.terminal import console, working
from rcir.torch_settings import keep_freed_memory


@working("reading the pictures", logged=True)
def embed_pictures(options: EmbeddingConfig) -> tuple[Encoder, Preprocessing]:
    """Embed pictures and write their vectors; return the model. Finished shards are kept.

    Raises:
        DataUnavailable, InvalidData: of the pictures.
        InvalidConfig: there is no such model, or the output holds something else.
        InvalidImage: more pictures than `max_rejects` cannot be read.
    """
    output, shards = options.output, options.shards
    is_valid = output.suffix == ".parquet" if shards is None else output.suffix != ".parquet"
    if not is_valid or not output.parent.is_dir() or (shards is not None and shards < 1):
        raise InvalidConfig(
            f"--output is {output}; it must be a .parquet file in an existing folder, or with "
            "--shards, a number of at least 1, a folder"
        )
    check_max_rejects(options.max_rejects, "--max-rejects")
    check_memory("--memory-gib", options.memory_gib)
    pictures = list_pictures(options.pictures)
    for note in pictures.notes:
        console.print(f"note: {printable(note)}", soft_wrap=True)
    if "time" not in pictures.columns and any(times := read_capture_times(pictures.paths)):
        pictures = replace(pictures, columns=dict(pictures.columns) | {"time": times})
    files = _plan_files(output, shards, len(pictures))
    encoder, preprocessing, name = load_model(options.model, options.checkpoint, options.projected)
    if options.max_pixels is not None:
        preprocessing = replace(preprocessing, max_pixels=options.max_pixels)
    batch = _choose_batch(options, encoder, preprocessing)
    console.print(f"{batch} pictures in a forward pass")
    keep_freed_memory()
    dim = 0
    rejects: dict[str, str] = {}
    allowed = count_allowed(options.max_rejects, len(pictures))
    with Embedder(options.num_workers, options.use_gpu, batch=batch).open() as opened:
        for file, rows in files.items():
            part = pictures[rows]
            finished = file.with_name(f"{'' if shards is None else '.'}{file.name}.parts")
            embedder = replace(opened, folder=finished)
            source = None
            if shards is not None:
                source = _digest_source(encoder, preprocessing, part)
                if earlier := _read_shard(file, part, name, source, preprocessing):
                    dim, earlier_rejects = earlier
                    rejects |= earlier_rejects
                    embedder.clear()
                    continue
            vectors, unreadable = embedder.embed_readable(encoder, preprocessing, part.paths)
            reasons = {part.ids[row]: reason for row, reason in unreadable.items()}
            rejects |= reasons
            if len(rejects) <= allowed:  # or else finished blocks are kept for the next command
                if vectors is None:
                    raise InvalidImage(
                        f"none of the {len(part):,} pictures for {file} can be read, such as "
                        f"{part.ids[0]}: {unreadable[0]}; leave them out, or write fewer shards"
                    )
                part = part.without(unreadable)
                dim = _write(
                    vectors,
                    part,
                    file,
                    model=name,
                    shards=shards or 1,
                    source=source,
                    rejects=reasons,
                )
                embedder.clear()
    table = output.with_name(f"{output.name.removesuffix('.parquet')}.rejects.csv")
    if line := tolerate(rejects, len(pictures), options.max_rejects, table):
        console.print(printable(line), soft_wrap=True)
    contents = f"{len(pictures) - len(rejects):,} vectors of {dim} numbers, by {name}"
    console.print(f"{output}: {contents}", soft_wrap=True)
    return encoder, preprocessing


def _choose_batch(options: EmbeddingConfig, encoder: Encoder, preprocessing: Preprocessing) -> int:
    """Return the number of pictures in a forward pass, as requested or as fits into memory."""
    if options.batch is not None:
        return options.batch
    budget = memory_budget(options.memory_gib, EMBEDDING_GIB, options.use_gpu)
    image = torch.zeros(1, preprocessing.channels, *preprocessing.size)
    return batch_within(encoder, preprocessing.normalise(image), BATCH, budget)


def _write(
    embedding: Embedding,
    pictures: Pictures,
    file: Path,
    *,
    model: str,
    shards: int,
    source: str | None,
    rejects: Mapping[str, str],
) -> int:
    """Write the vectors of pictures to a file, and return their number of dimensions."""
    vectors = embedding.vectors.numpy()
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    uncertainty = None if embedding.uncertainty is None else embedding.uncertainty.numpy()
    write_vectors(
        file,
        vectors,
        pictures.ids,
        pictures.columns,
        model=model,
        uncertainty=uncertainty,
        shards=shards,
        source=source,
        rejects=rejects,
    )
    return int(vectors.shape[1])


def _plan_files(output: Path, shards: int | None, n: int) -> dict[Path, slice]:
    """Return the files to write, and the pictures of each."""
    if shards is None:
        return {output: slice(None)}
    if shards > n:
        raise InvalidConfig(f"--shards is {shards}, and there are fewer pictures: {n}")
    output.mkdir(exist_ok=True)
    ends = [n * number // shards for number in range(shards + 1)]
    rows = map(slice, ends, ends[1:])
    files = {output / shard_name(number): part for number, part in enumerate(rows)}
    written = (path for path in sorted(output.iterdir()) if not path.name.startswith("."))
    if other := next((path.name for path in written if path not in files), None):
        raise InvalidConfig(
            f"{output} contains {other}, which is not one of the {shards} files to write: choose "
            "another folder, or the --shards that it was started with"
        )
    return files


def _digest_source(encoder: Encoder, preprocessing: Preprocessing, pictures: Pictures) -> str:
    """Return a digest of all that determines the file of a shard."""
    (images,) = digest_blocks(encoder, preprocessing, [pictures.paths])

    def encode(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)

    state = json.dumps([images, list(pictures.ids), dict(pictures.columns)], default=encode)
    return hashlib.sha256(state.encode()).hexdigest()


def _read_shard(
    file: Path, pictures: Pictures, model: str, source: str, preprocessing: Preprocessing
) -> tuple[int, dict[str, str]] | None:
    """Return the dimensions of the vectors in a file of these pictures, and its rejects.

    None if there is no such file, or if one of its rejects is readable now.
    """
    if not file.exists():
        return None
    try:
        table = parquet.read_table(file, columns=["id"])
        dim = parquet.read_schema(file).field("vector").type.list_size
    except (ArrowException, OSError, KeyError, AttributeError) as error:
        raise InvalidConfig(f"{file} is not a shard of vectors ({error}): remove it") from error
    metadata = table.schema.metadata or {}
    same = metadata.get(MODEL_KEY.encode()) == model.encode()
    rejects: dict[str, str] = json.loads(metadata.get(REJECTS_KEY.encode(), "{}"))
    ids = [name for name in pictures.ids if name not in rejects]
    if not same or table["id"].to_pylist() != ids:
        raise InvalidConfig(
            f"{file} is of other pictures or another model: remove it, or choose another folder"
        )
    if metadata.get(SOURCE_KEY.encode()) != source.encode():
        return None
    rejected = [n for n, name in enumerate(pictures.ids) if name in rejects]
    faults = preprocessing.find_faults([pictures.paths[n] for n in rejected])
    if len(faults) < len(rejected):
        return None
    return int(dim), {pictures.ids[rejected[n]]: reason for n, reason in faults.items()}


def load_model(
    model: str, checkpoint: str | None = None, projected: bool = False
) -> tuple[Encoder, Preprocessing, str]:
    """Return an encoder, its preprocessing, and its name with a digest of both.

    Args:
        model, checkpoint, projected: see `EmbeddingConfig`.
    """
    if not Path(model).exists() and timm.is_model(model):
        raise InvalidConfig(f"--model {model} must be timm:{model}")
    encoder: Encoder
    if is_of_hub(model):
        config = EncoderConfig(
            "pretrained",
            model,
            "avg",
            pretrained=checkpoint is None,
            checkpoint_path=checkpoint,
            projected=projected,
        )
        preprocessing = model_preprocessing(config)
        encoder = build_encoder(config, preprocessing.channels, preprocessing.size).eval()
    else:
        if checkpoint is not None or projected:
            raise InvalidConfig(
                f"--checkpoint and --projected are for models of hubs, and {model} is not one: "
                "leave them out"
            )
        trained = find_run(model)
        encoder, preprocessing, model = trained.encoder(), trained.preprocessing, trained.path.name
    return encoder, preprocessing, f"{model}@{model_digest(encoder, preprocessing)}"
