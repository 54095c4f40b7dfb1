"""Embed pictures into files of vectors, by a model of a hub or the encoder of a training.

A plan on disk lists the pictures. Each shard, a file to write, is embedded in parts, of which
workers write a file each; a finished shard joins its parts. An interruption loses unfinished parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from filelock import FileLock, Timeout
from pyarrow import ArrowException, Table, array, parquet, string

from rcir.data.images import read_capture_times
from rcir.data.manifest import THREADS, Plan, read_manifest, read_place, write_plan
from rcir.data.preprocessing import Preprocessing
from rcir.data.rejects import check_max_rejects, count_allowed, tolerate
from rcir.data.tables import read_schema
from rcir.data.vector_files import (
    MODEL_KEY,
    REJECTS_KEY,
    SHARDS_KEY,
    SOURCE_KEY,
    require_free_names,
    shard_name,
    vector_table,
    write_tables,
)
from rcir.encoders import Encoder, EncoderConfig, build_encoder, model_preprocessing
from rcir.encoders.base import Images
from rcir.encoders.batches import BATCH, Block, EmbeddingModel
from rcir.encoders.embedder import identify_file
from rcir.encoders.hub import is_of_hub
from rcir.encoders.memory import EMBEDDING_GIB, batch_within, check_memory, memory_budget
from rcir.encoders.pipeline import embed_here, embed_on_ray, run_on_ray
from rcir.errors import InvalidConfig, InvalidData, InvalidImage, printable
from rcir.retrieval.fingerprints import model_digest
from rcir.runs.config import EmbeddingConfig
from rcir.runs.folder import find_run
from rcir.storage import as_text, is_uri
from rcir.terminal import console, working
from rcir.torch_settings import keep_freed_memory

SHARD_SIZE = 10_000  # pictures in a file of vectors, unless their number is chosen
USUAL_PARTS, SMALLEST_PART = 64, 128  # so that workers share few pictures, and progress is seen
WORK = ".parts"  # end of the name of the folder of parts and plan, in or beside the output


@working("reading the pictures", logged=True)
def embed_pictures(options: EmbeddingConfig) -> tuple[Encoder, Preprocessing]:
    """Embed pictures and write their vectors; return the model. What is finished is kept.

    Raises:
        DataUnavailable, InvalidData: of the pictures.
        InvalidConfig: there is no such model, or the output holds something else.
        InvalidImage: more pictures than `max_rejects` cannot be read.
        WorkersLost: workers died repeatedly at the same pictures.
    """
    if is_uri(options.output):
        raise InvalidConfig(
            f"--output is {as_text(options.output)}; vectors are written to local files: choose a "
            "folder, and copy it to the bucket"
        )
    options = replace(options, output=options.output.absolute())  # workers run in other folders
    output, shards = options.output, options.shards
    is_file = output.suffix == ".parquet"
    if not output.parent.is_dir() or (shards is not None and (is_file or shards < 1)):
        raise InvalidConfig(
            f"--output is {output}; it must be a .parquet file in an existing folder, or a folder, "
            "for which --shards may be a number of at least 1"
        )
    if not is_file and output.suffix:
        raise InvalidConfig(f"--output is {output}; a file must end in .parquet")
    if options.use_gpu and not options.num_workers and not torch.cuda.is_available():
        raise InvalidConfig("use_gpu is true, and this process has no CUDA device")
    check_max_rejects(options.max_rejects, "--max-rejects")
    check_memory("--memory-gib", options.memory_gib)
    folder = output.with_name(f".{output.name}{WORK}") if is_file else output / WORK
    with _planned(folder, options.pictures) as plan:
        model, name = _load(options)
        console.print(f"{model.batch} pictures in a forward pass")
        shards = 1 if is_file else shards or -(-len(plan) // SHARD_SIZE)
        if shards > len(plan):
            raise InvalidConfig(f"--shards is {shards}, and there are fewer pictures: {len(plan)}")
        size = min(model.block_size, max(SMALLEST_PART, len(plan) // USUAL_PARTS))
        parts = Parts(plan, folder, name, size, shards)
        _embed_missing(options, model, parts, _name_files(output, shards))
    return model.encoder, model.preprocessing


@contextmanager
def _planned(folder: Path, pictures: Path) -> Iterator[Plan]:
    """Write the plan for the block; afterwards remove it and what is empty, or all when done.

    `InvalidConfig` while another command works in the folder.
    """
    manifest = read_manifest(pictures)
    is_new = not folder.parent.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path, lock = folder / "plan.parquet", FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InvalidConfig(
            f"another command works in {folder}: wait until it ends, or choose another --output"
        ) from None
    try:
        plan = write_plan(path, manifest)
        for note in manifest.notes:
            console.print(f"note: {printable(note)}", soft_wrap=True)
        require_free_names(plan.names)
        if "label" in plan.names and plan.unlabelled:  # no command would read the vectors
            raise InvalidData(
                f"{pictures}: {plan.unlabelled:,} of {len(plan):,} pictures have no label: leave "
                "them out, or embed them into another --output"
            )
        yield plan
        for left in {*folder.iterdir()} - {Path(lock.lock_file)}:
            left.unlink(missing_ok=True)
    finally:  # without the lock, the files are those of the next command
        path.unlink(missing_ok=True)
        Path(lock.lock_file).unlink()
        lock.release()
        with suppress(OSError):  # unless there are parts or files
            folder.rmdir()
            if is_new:
                folder.parent.rmdir()


def _load(options: EmbeddingConfig) -> tuple[EmbeddingModel, str]:
    """Return the model and its name, with the batch as requested or as fits into memory."""
    encoder, preprocessing, name = load_model(options.model, options.checkpoint, options.projected)
    if options.precision != "float32":
        name += f"-{options.precision}"  # vectors of another model
    if options.max_pixels is not None:
        preprocessing = replace(preprocessing, max_pixels=options.max_pixels)
    batch = options.batch
    if batch is None:
        budget = memory_budget(options.memory_gib, EMBEDDING_GIB, options.use_gpu)
        image = torch.zeros(1, preprocessing.channels, *preprocessing.size)
        batch = batch_within(encoder, preprocessing.normalise(image), BATCH, budget)
    return EmbeddingModel(encoder, preprocessing, batch, options.precision), name


def _name_files(output: Path, shards: int) -> list[Path]:
    """Return the files to write."""
    if output.suffix == ".parquet":
        return [output]
    files = [output / shard_name(number) for number in range(shards)]
    written = (path for path in sorted(output.iterdir()) if not path.name.startswith("."))
    if other := next((path.name for path in written if path not in files), None):
        raise InvalidConfig(
            f"{output} contains {other}, which is not one of the {shards} files to write: choose "
            "another folder, or the --shards that it was started with"
        )
    return files


class Result(NamedTuple):
    """The outcome of a part, or of several."""

    n: int  # vectors
    dim: int
    rejects: dict[str, str]  # ids and reasons
    source: tuple[str, str]  # digests of the ids, and of all else that it was made of


@dataclass(frozen=True)
class Parts:
    """The parts that are embedded one by one, numbered from 0, and their files.

    Args:
        model: its name.
        size: pictures of a part; the last one of a shard may have fewer.
    """

    plan: Plan
    folder: Path
    model: str
    size: int
    shards: int

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """The first row of each part, and the one behind its last."""
        return [bounds for shard in range(self.shards) for bounds in self._in_shard(shard)]

    @cached_property
    def of_shard(self) -> list[range]:
        """The numbers of the parts of each shard."""
        ends = [*accumulate(len(self._in_shard(shard)) for shard in range(self.shards))]
        return [range(start, end) for start, end in pairwise([0, *ends])]

    def _in_shard(self, shard: int) -> list[tuple[int, int]]:
        first, end = (len(self.plan) * number // self.shards for number in (shard, shard + 1))
        return [(row, min(row + self.size, end)) for row in range(first, end, self.size)]

    def file(self, number: int) -> Path:
        return self.folder / f"{number:07d}.parquet"

    def load(self, number: int) -> tuple[Images, tuple[tuple[str, str], list[str | None] | None]]:
        """Return the pictures of a part; what it is made of, and when they were taken."""
        source = self.source(number)  # before they are read: a later change is noticed
        images: Any = [read_place(*place) for place in self._rows(number)[0]]
        has_times = "time" in self.plan.names
        return images, (source, None if has_times else read_capture_times(images))

    def finish(self, number: int, block: Block, loaded: tuple[tuple[str, str], Any]) -> Result:
        """Write the vectors of a part to its file."""
        (embedding, unreadable), (source, times) = block, loaded
        rows = self._rows(number)[1]
        ids = rows["id"].to_pylist()
        rejects = {ids[row]: reason for row, reason in unreadable.items()}
        if times is not None:
            rows = rows.append_column("time", array(times, string()))
        kept = np.setdiff1d(np.arange(len(rows)), list(unreadable))
        rows, dim = rows.take(kept).combine_chunks(), 0
        if embedding is not None:
            vectors = embedding.vectors.cpu().numpy()
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            stated = embedding.uncertainty
            columns = {name: rows[name] for name in rows.column_names if name != "id"}
            uncertainty = None if stated is None else stated.cpu().numpy()
            rows, dim = vector_table(vectors, rows["id"], columns, uncertainty), vectors.shape[1]
        metadata = {MODEL_KEY: self.model, SOURCE_KEY: " ".join(source)}
        write_tables(self.file(number), [rows], metadata | {REJECTS_KEY: json.dumps(rejects)})
        return Result(len(kept), dim, rejects, source)

    def describe(self, number: int) -> str:
        """Return the number of pictures of a part, and the first and the last."""
        ids = self._rows(number)[1]["id"].to_pylist()
        return f"{len(ids)} pictures, {printable(ids[0])} to {printable(ids[-1])}"

    def source(self, number: int) -> tuple[str, str]:
        """Return digests of the ids of a part, and of all that determines its vectors."""
        places, rows = self._rows(number)
        with ThreadPoolExecutor(THREADS) as pool:  # a file system may be far away
            paths = dict.fromkeys(path for path, _, _ in places)
            states = dict(zip(paths, pool.map(identify_file, paths), strict=True))
        ids = hashlib.sha256(json.dumps(rows["id"].to_pylist()).encode())
        digest = hashlib.sha256(json.dumps([self.model, rows.to_pydict()], default=str).encode())
        for path, *span in places:
            digest.update(states[path] + str(span).encode())
        return ids.hexdigest(), digest.hexdigest()

    def still_rejected(
        self, numbers: Iterable[int], rejects: Mapping[str, str], preprocessing: Preprocessing
    ) -> dict[str, str] | None:
        """Return the reasons of rejects; None if one of them is readable now."""
        reasons: dict[str, str] = {}
        for number in numbers if rejects else ():
            places, rows = self._rows(number)
            ids = rows["id"].to_pylist()
            tried = [row for row, name in enumerate(ids) if name in rejects]
            faults = preprocessing.find_faults([read_place(*places[row]) for row in tried])
            reasons |= {ids[tried[row]]: reason for row, reason in faults.items()}
        return reasons if len(reasons) == len(rejects) else None

    def _rows(self, number: int) -> tuple[list[tuple[Path, int | None, int]], Table]:
        return self.plan.rows(*self.bounds[number])


def _join_sources(sources: Iterable[tuple[str, str]]) -> tuple[str, str]:
    ids, others = map("".join, zip(*sources, strict=True))
    return hashlib.sha256(ids.encode()).hexdigest(), hashlib.sha256(others.encode()).hexdigest()


def _read_stored(
    file: Path, parts: Parts, numbers: Sequence[int], preprocessing: Preprocessing, is_shard: bool
) -> Result | None:
    """Return what a file of some parts holds; None if it is missing or has to be made again.

    A shard that others made, or of other pictures, is not overwritten.
    """
    if not file.exists():
        return None
    try:
        with parquet.ParquetFile(file) as content:
            schema, n = content.schema_arrow, content.metadata.num_rows
        dim = schema.field("vector").type.list_size if n else 0
    except (ArrowException, OSError, KeyError, AttributeError) as error:
        if not is_shard:
            return None
        raise InvalidConfig(f"{file} is not a shard of vectors ({error}): remove it") from error
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    sources = [parts.source(number) for number in numbers]
    source = _join_sources(sources) if is_shard else sources[0]
    ids, _, rest = metadata.get(SOURCE_KEY, "").partition(" ")
    if is_shard and (metadata.get(MODEL_KEY) != parts.model or ids != source[0]):
        raise InvalidConfig(
            f"{file} is of other pictures or another model: remove it, or choose another folder"
        )
    if (ids, rest) != source:
        return None
    stored = json.loads(metadata.get(REJECTS_KEY, "{}"))
    rejects = parts.still_rejected(numbers, stored, preprocessing)
    return None if rejects is None else Result(n, dim, rejects, source)


def _embed_missing(
    options: EmbeddingConfig, model: EmbeddingModel, parts: Parts, files: Sequence[Path]
) -> None:
    """Embed the parts that are missing, and write the shards; state what was done."""
    n, output = len(parts.plan), options.output
    allowed = count_allowed(options.max_rejects, n)
    results: dict[int, Result] = {}  # of parts, or of the first part of a complete shard
    open_shards: dict[int, set[int]] = {}  # their missing parts
    joins: list[Any] = []

    def join(shard: int) -> None:
        """Write a shard whose parts are there, unless there are too many rejects."""
        numbers = parts.of_shard[shard]
        if n_rejects > allowed:  # the parts are kept for the next command
            return
        outcomes = [results[number] for number in numbers]
        rejects = {name: reason for result in outcomes for name, reason in result.rejects.items()}
        if not any(result.n for result in outcomes):
            name, reason = next(iter(rejects.items()))
            raise InvalidImage(
                f"none of the {len(rejects):,} pictures for {files[shard]} can be read, such as "
                f"{name}: {reason}; leave them out, or write fewer shards"
            )
        source = _join_sources(result.source for result in outcomes)
        metadata = {MODEL_KEY: parts.model, SOURCE_KEY: " ".join(source)}
        metadata |= {SHARDS_KEY: str(len(files))} if len(files) > 1 else {}
        metadata |= {REJECTS_KEY: json.dumps(rejects)} if rejects else {}
        stored = [parts.file(number) for number in numbers]
        full = [file for file, result in zip(stored, outcomes, strict=True) if result.n]
        if options.num_workers and missing:
            joins.append(run_on_ray(_join, full, stored, files[shard], metadata))
        else:
            _join(full, stored, files[shard], metadata)

    with working("reading what is there", logged=True):
        for shard, file in enumerate(files):
            numbers = parts.of_shard[shard]
            is_shard = len(files) > 1 or output.suffix != ".parquet"
            try:
                complete = _read_stored(file, parts, numbers, model.preprocessing, True)
            except InvalidConfig:
                if is_shard:
                    raise
                complete = None  # a file of other pictures is replaced
            if complete is not None:
                results[numbers[0]] = complete
                for number in numbers:
                    parts.file(number).unlink(missing_ok=True)
                continue
            open_shards[shard] = set()
            for number in numbers:
                place = parts.file(number)
                stored = _read_stored(place, parts, [number], model.preprocessing, False)
                if stored is None:
                    open_shards[shard].add(number)
                else:
                    results[number] = stored
    n_rejects = sum(len(result.rejects) for result in results.values())
    missing = sorted(number for numbers in open_shards.values() for number in numbers)
    if not open_shards:
        console.print(f"{output} is complete: nothing is embedded", soft_wrap=True)
    for shard, numbers_left in open_shards.items():
        if not numbers_left:
            join(shard)
    shard_of = {number: shard for shard, numbers in open_shards.items() for number in numbers}
    if missing:
        keep_freed_memory()
    with working("embedding", n, logged=True, has_rate=True) as work:
        rows = [end - start for start, end in parts.bounds]
        work.advance(n - sum(rows[number] for number in missing), reused=True)
        if options.num_workers and missing:
            results_of = embed_on_ray(model, parts, missing, options.num_workers, options.use_gpu)
        else:
            results_of = embed_here(model, parts, missing, options.use_gpu)
        with closing(results_of) as finished:
            for number, result in finished:
                results[number] = result
                n_rejects += len(result.rejects)
                work.advance(rows[number])
                open_shards[shard_of[number]].discard(number)
                if not open_shards[shard_of[number]]:
                    join(shard_of[number])
        work.become("writing files of vectors")
        for wait in joins:
            wait()
    ordered = [results[number] for number in sorted(results)]
    rejects = {name: reason for result in ordered for name, reason in result.rejects.items()}
    table = output.with_name(f"{output.name.removesuffix('.parquet')}.rejects.csv")
    if line := tolerate(rejects, n, options.max_rejects, table):
        console.print(printable(line), soft_wrap=True)
    dim = max(result.dim for result in ordered)
    contents = f"{n - len(rejects):,} vectors of {dim} numbers, by {parts.model}"
    console.print(f"{output}: {contents}", soft_wrap=True)


def _join(
    full: Sequence[Path], stored: Sequence[Path], file: Path, metadata: Mapping[str, str]
) -> None:
    """Write the tables of parts to one file, and remove the parts."""
    stored_metadata = None
    with suppress(OSError, ArrowException):
        stored_metadata = read_schema(file).metadata
    # A worker may have died after it wrote the file, and removed some parts.
    if stored_metadata != {key.encode(): value.encode() for key, value in metadata.items()}:
        write_tables(file, map(_read_table, full), metadata)
    for path in stored:
        path.unlink(missing_ok=True)


def _read_table(file: Path) -> Table:
    with parquet.ParquetFile(file) as content:
        return content.read()


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
