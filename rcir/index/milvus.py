"""Vectors in a collection of Milvus: a server, or Milvus Lite in a folder."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, RcirError, StaleCalibration
from rcir.extras import naming_extras
from rcir.files import read_array
from rcir.index.base import check_vectors
from rcir.index.milvus_server import MilvusOptions, MilvusServer

COLLECTION_FILE, IDS_FILE = "collection.json", "ids.npy"
VERSION_PROPERTY = "rcir.version"  # a property of the collection
BYTES_AT_ONCE = 1 << 22  # bytes of vectors that are sent together
LARGEST_TOP_K = 16_384  # neighbours of a query
LARGEST_BATCH = 16_383  # queries of a search; of more, Milvus computes distances less accurately
FOUND_AT_ONCE = 1 << 18  # neighbours that one request asks for
POLL_INTERVAL = 0.05  # seconds


class MilvusIndex:
    """A collection of vectors with ids that rise, the position of one being the number of smaller.

    Milvus has neither transactions nor triggers. So a change by this class writes another version
    into the collection's properties before anything else, and an insertion that fails is taken
    back. After every search the version, the number of vectors and the index are asked for, and
    every id that was found is looked up: `StaleCalibration` where one is not as this object left
    it. By that are noticed: what another object of this class changes; rows that others insert or
    delete, a collection made anew, an index of another type, or of other parameters where the
    server says them (Milvus Lite does not). Not noticed are rows that others replace (upsert,
    or as many deleted as inserted, until a new id is found), and what the server does by itself to
    approximate indexes: it merges segments and indexes them anew, after which answers may differ.
    FLAT is exact, and does not depend on it.

    Replicas of one collection answer from the same segments, but may not have loaded the last
    changes: "Strong" waits for them, the other levels of consistency do not.
    """

    Options = MilvusOptions
    server = "Milvus"

    def __init__(self, options: MilvusOptions) -> None:
        self.options = options
        self._dim = 0
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._version = ""
        # Of an insertion that failed: the first id, and the version that was to be written before.
        self._unfinished: tuple[int, str] | None = None
        self._described: dict[str, str] = {}  # the index, as far as the server says
        self._server = MilvusServer(options)

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: MilvusOptions) -> Self:
        vectors = check_vectors(vectors)
        index = cls(options)
        index._dim = vectors.shape[1]
        index._create()
        try:
            index._insert(vectors, 0)
            index._described = index._description()
        except BaseException:
            with suppress(RcirError):
                index._call("drop_collection")
            raise
        return index

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, vectors: NDArray[np.float32]) -> None:
        vectors = check_vectors(vectors, self._dim)
        if not len(vectors):
            return
        self._require_unchanged()
        self._insert(vectors, int(self._ids[-1]) + 1 if len(self) else 0)

    def remove(self, positions: NDArray[np.int64]) -> None:
        gone = np.unique(self._ids[np.asarray(positions, np.int64)])
        if not len(gone):
            return
        self._require_unchanged()
        version = str(uuid.uuid4())
        self._write_version(version)
        for some in np.split(gone, range(LARGEST_TOP_K, len(gone), LARGEST_TOP_K)):
            self._call("delete", ids=some.tolist())
        self._version, self._ids = version, np.setdiff1d(self._ids, gone, assume_unique=True)
        self._wait()

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """As `Index.search`; of as many rows as were asked for, or as the collection holds.

        Raises:
            DataUnavailable: the server cannot be reached, refuses, or takes too long.
            StaleCalibration: the collection was changed by someone else.
            InvalidConfig: the search found fewer, or k is above what Milvus searches.
            InvalidData: the queries are no such vectors.
        """
        vectors = check_vectors(vectors, self._dim)
        distances = np.full((len(vectors), k), np.inf, np.float32)
        positions = np.full((len(vectors), k), -1, np.int64)
        count = min(k, len(self))
        if count > LARGEST_TOP_K:
            raise InvalidConfig(f"Milvus finds at most {LARGEST_TOP_K} neighbours, not {count}")
        self._take_back()
        together = max(1, min(LARGEST_BATCH, FOUND_AT_ONCE // max(count, 1)))
        for start in range(0, len(vectors) if count else 0, together):
            rows = slice(start, start + together)
            ids, squared = self._nearest(vectors[rows], count)
            at = np.minimum(np.searchsorted(self._ids, ids), len(self) - 1)
            if (self._ids[at] != ids).any():
                raise self._changed()
            order = np.lexsort((at, squared))
            nearest = np.take_along_axis(squared, order, axis=1)
            distances[rows, :count] = np.sqrt(np.maximum(nearest, 0))
            positions[rows, :count] = np.take_along_axis(at, order, axis=1)
        self._require_unchanged()
        return distances, positions

    def drop(self) -> None:
        """As `IsRemote.drop`: the collection."""
        self._require_unchanged()
        self._call("drop_collection")

    @property
    def version(self) -> str:
        """A token of the collection when this object last changed it, and of how it is searched.

        The server is not asked: each `search` asks it.
        """
        chosen = self.options
        searched = json.dumps([chosen.search_params, chosen.consistency_level], sort_keys=True)
        return f"milvus {self._version} {len(self)} {searched}"

    def save(self, folder: Path) -> None:
        held = {"version": self._version, "dim": self._dim, "index": self._described}
        (folder / COLLECTION_FILE).write_text(json.dumps(held))
        np.save(folder / IDS_FILE, self._ids, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, options: MilvusOptions) -> Self:
        """As `Index.load`.

        Raises:
            DataUnavailable: the server cannot be reached, or the collection is gone.
            StaleCalibration: the collection was changed since.
        """
        held = json.loads((folder / COLLECTION_FILE).read_text())
        index = cls(options)
        index._server.require_files()
        index._dim, index._version = int(held["dim"]), str(held["version"])
        index._described = dict(held["index"])
        index._ids = read_array(folder / IDS_FILE)
        index._require_unchanged()
        return index

    def _create(self) -> None:
        with naming_extras():
            from pymilvus import DataType, MilvusClient

        chosen = self.options
        if self._call("has_collection"):
            raise InvalidConfig(
                f"the collection {chosen.collection} already exists, and is left alone: drop it, "
                "or choose another one by the option collection"
            )
        schema = MilvusClient.create_schema(auto_id=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self._dim)
        built = MilvusClient.prepare_index_params()
        built.add_index(
            "vector", index_type=chosen.index_type, metric_type="L2", params=chosen.params
        )
        level = chosen.consistency_level
        self._call("create_collection", schema=schema, index_params=built, consistency_level=level)

    def _insert(self, vectors: NDArray[np.float32], first: int) -> None:
        """Insert vectors with ids from the first one on; all of them, or none where that is in the
        server's power.
        """
        version = str(uuid.uuid4())
        self._unfinished = first, version
        try:
            self._write_version(version)
            together = max(1, BYTES_AT_ONCE // (4 * self._dim))
            for start in range(0, len(vectors), together):
                rows = [
                    {"id": first + start + row, "vector": vector}
                    for row, vector in enumerate(vectors[start : start + together])
                ]
                self._call("insert", rows)
            self._wait()
        except BaseException:
            with suppress(RcirError):
                self._take_back()
            raise
        self._unfinished = None
        self._version = version
        self._ids = np.concatenate([self._ids, np.arange(first, first + len(vectors))])

    def _take_back(self) -> None:
        """Delete what an insertion that failed left, in a collection that nobody else changed."""
        if self._unfinished is None:
            return
        first, version = self._unfinished
        there = self._read_version()
        if there == version:
            self._call("delete", filter=f"id >= {first}")
            self._write_version(self._version)
        elif there != self._version:  # by which nothing was inserted yet
            raise self._changed()
        self._unfinished = None

    def _read_version(self) -> str | None:
        found: dict[str, str] = dict(self._call("describe_collection")["properties"])
        return found.get(VERSION_PROPERTY)

    def _write_version(self, version: str) -> None:
        self._call("alter_collection_properties", {VERSION_PROPERTY: version})

    def _description(self) -> dict[str, str]:
        """What the server says of the index, of what it was built by."""
        said = self._call("describe_index", "vector")
        named = ("index_type", "metric_type", *self.options.params)
        return {name: str(said[name]) for name in named if name in said}

    def _wait(self) -> None:
        """Until all is written and indexed: what is not is searched otherwise than later."""
        self._call("flush")
        while int(self._call("describe_index", "vector").get("pending_index_rows", 0)):
            time.sleep(POLL_INTERVAL)

    def _require_unchanged(self) -> None:
        """See that the collection is as this object left it."""
        self._take_back()
        version = self._read_version()
        level = self.options.consistency_level
        (counted,) = self._call("query", output_fields=["count(*)"], consistency_level=level)
        held = version, counted["count(*)"], self._description()
        if held != (self._version, len(self), self._described):
            raise self._changed()

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._server.call(method, self.options.collection, *arguments, **named)

    def _nearest(
        self, vectors: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids and squared L2 distances, each (n, count)."""
        chosen = self.options
        found = self._call(
            "search",
            data=list(vectors),
            anns_field="vector",
            limit=count,
            output_fields=["id"],
            search_params={"metric_type": "L2", "params": chosen.search_params},
            consistency_level=chosen.consistency_level,
        )
        short = min(map(len, found), default=0)
        if len(found) != len(vectors) or short < count:
            self._require_unchanged()
            raise InvalidConfig(
                f"{chosen.index_type} found {short} of the {count} nearest of {len(self)} vectors: "
                "search with larger search_params (ef, nprobe), or choose the index_type FLAT"
            )
        pairs = np.array(
            [[(hit["id"], hit["distance"]) for hit in hits] for hits in found],
            np.dtype([("id", np.int64), ("distance", np.float32)]),
        )
        return pairs["id"], pairs["distance"]

    def _changed(self) -> StaleCalibration:
        return StaleCalibration(
            f"the collection {self.options.collection} was changed by someone else, or a change of "
            "it was cut off: which of its rows is which item is no longer known; build the "
            "retriever anew from its vectors"
        )
