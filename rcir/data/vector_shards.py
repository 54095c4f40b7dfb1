"""Folders of Parquet files, the shards of one set of vectors: read one by one, or as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rcir.data.vector_files import VectorTable, read_vectors
from rcir.errors import DataUnavailable, InvalidData
from rcir.stored_vectors import StoredVectors

SHARED_FIELDS = ("ids", "labels", "places", "uncertainty", "group", "cluster")


def shard_name(number: int) -> str:
    """The name of the file of a shard, by its number from 0.

    Example:
        >>> shard_name(3)
        'part-00003.parquet'
    """
    return f"part-{number:05d}.parquet"


def shards_of(path: Path) -> list[Path]:
    """The files of vectors that a path names: itself, or the shards in a folder, in order.

    Raises:
        DataUnavailable: the folder holds no shards.
        InvalidData: some shards of the row are missing.
    """
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("part-*.parquet"))
    if not found:
        raise DataUnavailable(
            f"the folder {path} holds no {shard_name(0)}: give a file of vectors, or a folder that "
            "`rcir embed --shards` wrote"
        )
    said = _number(found[0])
    if said not in (None, len(found)) or found[-1].name != shard_name(len(found) - 1):
        raise InvalidData(
            f"{path} holds {len(found)} shards{'' if said is None else f' of {said}'}, and others "
            "are missing: let `rcir embed` finish, with the arguments that it was begun with"
        )
    return found


def _number(file: Path) -> int | None:
    """How many shards there are, as one of them says; None where it does not."""
    from pyarrow import ArrowException, parquet

    try:
        said = (parquet.read_schema(file).metadata or {}).get(b"rcir.shards")
    except (ArrowException, OSError):
        return None  # whoever reads it refuses it
    return None if said is None else int(said)


def read_shards(path: Path) -> Iterator[VectorTable]:
    """The tables of a file of vectors, which is one, or of a folder of shards, one at a time.

    Raises:
        DataUnavailable, InvalidData: as `rcir.data.vector_files.read_vectors`; or the shards are
            not alike.
    """
    from pyarrow import default_memory_pool

    first: VectorTable | None = None
    for file in shards_of(path):
        table = read_vectors(file)
        if first is None:
            first = replace(table, vectors=table.vectors[:1].copy())
        for name in (*SHARED_FIELDS, "model"):
            known, other = getattr(first, name), getattr(table, name)
            if (known is None) != (other is None) or (name == "model" and known != other):
                raise InvalidData(
                    f"{file}: its {name} is not as in {first.file}: shards are of one set of "
                    "vectors, embedded by one model"
                )
        if table.vectors.shape[1] != first.vectors.shape[1]:
            raise InvalidData(
                f"{file} holds vectors of {table.vectors.shape[1]} numbers, {first.file} of "
                f"{first.vectors.shape[1]}"
            )
        yield table
        del table
        default_memory_pool().release_unused()  # keeps what was freed, shard by shard, otherwise


def read_all_vectors(path: Path) -> VectorTable:
    """The vectors of a file, or of all shards in a folder, as one table.

    Those of shards are mapped from a temporary file: one shard at a time is in memory.

    Raises:
        DataUnavailable, InvalidData: as `read_shards`; or an id comes twice.
    """
    tables: list[VectorTable] = []
    stored: StoredVectors | None = None
    for table in read_shards(path):
        if not path.is_dir():
            return table
        stored = stored or StoredVectors(table.vectors.shape[1])
        with np.errstate(over="ignore"):  # too large a number becomes infinite
            stored.append(table.vectors)
        tables.append(replace(table, vectors=table.vectors[:0].copy()))
    assert stored is not None
    joined: dict[str, Any] = {"vectors": stored.vectors}
    for name in SHARED_FIELDS:
        parts = [getattr(one, name) for one in tables]
        if parts[0] is not None:
            lists = isinstance(parts[0], list)
            joined[name] = [each for part in parts for each in part] if lists else None
            if not lists:
                joined[name] = np.concatenate(parts)
    ids = joined.get("ids")
    if ids is not None and len(set(ids)) < len(ids):
        raise InvalidData(f"{path}: an id comes in two shards: name each vector once")
    return VectorTable(path.name, model=tables[0].model, **joined)
