"""`rcir embed FOLDER_OR_TABLE --model MODEL --output FILE_OR_FOLDER`"""

from __future__ import annotations

import hashlib
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rcir.data.folders import Pictures
    from rcir.data.preprocessing import Preprocessing
    from rcir.embedding import Embedding
    from rcir.encoders import Encoder


def add_embed_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: pictures, model, where to write to, and with what."""
    parser.add_argument(
        "pictures",
        type=Path,
        help="folder of pictures, or table (.csv, .tsv, .parquet) with their paths",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="timm:NAME, open_clip:NAME/TAG, transformers:NAME, or the folder of a training; "
        "repositories of the Hugging Face hub are timm:hf-hub:ORG/NAME and "
        "open_clip:hf-hub:ORG/NAME",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="Parquet file to write; with --shards a folder"
    )
    parser.add_argument(
        "--shards",
        type=int,
        help="files to write, each when its pictures are embedded; finished ones are kept",
    )
    add_max_pixels(parser)
    parser.add_argument(
        "--checkpoint",
        help=".safetensors file with the weights of the model, for a machine without a network",
    )
    parser.add_argument(
        "--projected",
        action="store_true",
        help="for a CLIP model of transformers, the vector that it compares with texts",
    )
    parser.add_argument(
        "--num-workers", type=int, default=0, help="Ray workers; 0 uses this process alone"
    )
    parser.add_argument("--use-gpu", action="store_true", help="one GPU per worker")
    parser.add_argument(
        "--max-rejects",
        type=float,
        default=0.01,
        help="unreadable pictures that are left out: a number, or a share below 1, of which any "
        "above 0 allows at least one (default: 0.01); more are an error; NAME.rejects.csv beside "
        "the output lists them",
    )
    parser.add_argument(
        "--batch", type=int, help="pictures in a forward pass (default: as many as fit)"
    )
    parser.add_argument(
        "--memory-gib",
        type=float,
        help="memory of a forward pass beside the weights, which limits the batch (default: 0.75, "
        "on a GPU 8)",
    )


def add_max_pixels(parser: ArgumentParser) -> None:
    """Add the option of the largest picture that is decoded."""
    parser.add_argument(
        "--max-pixels", type=int, help="larger pictures are refused (default: 200 million)"
    )


def run_embed(options: Namespace) -> None:
    """Embed the pictures, and write their vectors."""
    from rcir.data.datasets.user_images import list_pictures
    from rcir.data.images import read_capture_times
    from rcir.data.rejects import check_max_rejects, count_allowed, tolerate
    from rcir.encoders.embedder import Embedder
    from rcir.errors import InvalidConfig, InvalidImage, printable
    from rcir.terminal import console, progress_bar
    from rcir.torch_settings import keep_freed_memory

    output, shards = options.output, options.shards
    is_valid = output.suffix == ".parquet" if shards is None else output.suffix != ".parquet"
    if not is_valid or not output.parent.is_dir() or (shards is not None and shards < 1):
        raise InvalidConfig(
            f"--output is {output}; it must be a .parquet file in an existing folder, or with "
            "--shards, a number of at least 1, a folder"
        )
    check_max_rejects(options.max_rejects, "--max-rejects")
    pictures = list_pictures(options.pictures)
    for note in pictures.notes:
        console.print(f"note: {printable(note)}", soft_wrap=True)
    if "time" not in pictures.columns and any(times := read_capture_times(pictures.paths)):
        pictures = replace(pictures, columns=dict(pictures.columns) | {"time": times})
    files = _plan_files(output, shards, len(pictures))
    encoder, preprocessing, name = _load_model(options.model, options.checkpoint, options.projected)
    if options.max_pixels is not None:
        preprocessing = replace(preprocessing, max_pixels=options.max_pixels)
    batch = _choose_batch(options, encoder, preprocessing)
    console.print(f"{batch} pictures in a forward pass")
    bar = progress_bar()
    task = bar.add_task("pictures", total=len(pictures))
    keep_freed_memory()
    dim = 0
    rejects: dict[str, str] = {}
    allowed = count_allowed(options.max_rejects, len(pictures))
    embedding = Embedder(
        options.num_workers,
        options.use_gpu,
        progress=lambda images, _: bar.advance(task, images),
        batch=batch,
    )
    with bar, embedding.open() as opened:
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
                    bar.advance(task, len(part))
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


def _choose_batch(options: Namespace, encoder: Encoder, preprocessing: Preprocessing) -> int:
    """Return the number of pictures in a forward pass, as requested or as fits into memory."""
    import torch

    from rcir.encoders.batches import BATCH
    from rcir.encoders.memory import EMBEDDING_GIB, batch_within, check_memory, memory_budget

    check_memory("--memory-gib", options.memory_gib)
    if options.batch is not None:
        return int(options.batch)
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
    import numpy as np

    from rcir.data.vector_files import write_vectors

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
    from rcir.data.vector_files import shard_name
    from rcir.errors import InvalidConfig

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
    from rcir.encoders.embedder import digest_blocks

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
    from pyarrow import ArrowException, parquet

    from rcir.data.vector_files import MODEL_KEY, REJECTS_KEY, SOURCE_KEY
    from rcir.errors import InvalidConfig

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


def _load_model(
    model: str, checkpoint: str | None, projected: bool
) -> tuple[Encoder, Preprocessing, str]:
    """Return an encoder, its preprocessing, and its name with a digest of both."""
    import timm

    from rcir.encoders import EncoderConfig, build_encoder, model_preprocessing
    from rcir.encoders.hub import is_of_hub
    from rcir.errors import InvalidConfig
    from rcir.runs.folder import find_run

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
    described = encoder.weights_digest() + json.dumps(preprocessing.identity(), sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    return encoder, preprocessing, f"{model}@{digest}"
