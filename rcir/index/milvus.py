"""Vectors in Milvus: the connection, and a collection as an index."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rcir.errors import DataUnavailable, InvalidConfig, RcirError, StaleCalibration
from rcir.files import read_array
from rcir.imports import naming_extras
from rcir.index.base import check_vectors

Consistency = Literal["Strong", "Bounded", "Session", "Eventually"]
RETRIED_FOR = 10.0  # seconds in which a call is tried again
RETRY_INTERVAL = 0.2  # seconds between two attempts
# A connection of its own; and as many pings as servers of gRPC take by default, which end the
# connection after more.
GRPC_OPTIONS = {"grpc.use_local_subchannel_pool": 1, "grpc.keepalive_time_ms": 300_000}
# What does the same when it is done twice.
REPEATABLE = {
    *("search", "query", "describe_collection", "describe_index", "has_collection"),
    *("delete", "alter_collection_properties", "flush"),
}
UNREACHABLE = "Fail connecting"  # how pymilvus says it


@dataclass(frozen=True)
class MilvusOptions:
    """The options of `MilvusIndex`.

    Args:
        uri: "http(s)://host:port" of a server, whose token MILVUS_TOKEN holds if it asks for one;
            or the path of Milvus Lite's files, which ends in .db, and becomes an absolute one.
        collection: its name, of letters, digits and underscores; it must not exist when it is
            built.
        index_type: Milvus's name: "FLAT", "HNSW", "IVF_FLAT", ...; of a path "FLAT" only.
        params: what it is built with, as {"M": 16, "efConstruction": 200} or {"nlist": 128}.
        search_params: what it is searched with, as {"ef": 400}, which is at least the search depth,
            or {"nprobe": 16}.
        consistency_level: what a search has to see: "Strong", all that was written before it;
            others may miss the last changes, and answer otherwise for a moment.
        timeout: seconds of each request; above 0.

    Raises:
        InvalidConfig: of one that is out of range.
    """

    uri: str = "milvus.db"
    collection: str = "rcir_vectors"
    index_type: str = "FLAT"
    params: dict[str, Any] = field(default_factory=dict)
    search_params: dict[str, Any] = field(default_factory=dict)
    consistency_level: Consistency = "Strong"
    timeout: float = 30.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.uri)
        if "@" in parts.netloc:
            raise InvalidConfig(
                "uri holds a user or a password, which would be stored with a retriever: leave "
                "them out, and give MILVUS_TOKEN, as user:password or a key"
            )
        if not (parts.scheme in ("http", "https") and parts.hostname) and (
            parts.scheme or not self.uri.endswith(".db")
        ):
            raise InvalidConfig(
                f"uri is {self.uri!r}; http://host:port, https://host:port, or a path that ends in "
                ".db"
            )
        if self.is_lite and self.index_type != "FLAT":
            raise InvalidConfig(
                f"index_type is {self.index_type!r}, and Milvus Lite searches by such an index "
                "seconds after it said that it was built, so that answers change by themselves: "
                'take "FLAT", or a server'
            )
        if self.is_lite:
            object.__setattr__(self, "uri", str(Path(self.uri).absolute()))
        if not re.fullmatch(r"[A-Za-z_]\w{0,99}", self.collection, re.ASCII):
            raise InvalidConfig(
                f"collection is {self.collection!r}; a name of letters, digits and underscores"
            )
        if self.consistency_level not in get_args(Consistency):
            raise InvalidConfig(
                f"consistency_level is {self.consistency_level!r}; one of "
                f"{', '.join(get_args(Consistency))}"
            )
        if not 0 < self.timeout < 1e6:
            raise InvalidConfig(f"timeout is {self.timeout}; seconds above 0")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The server that searches connect to, or the path of Milvus Lite's files."""
        return (self.uri if self.is_lite else str(urlsplit(self.uri).hostname),)

    @property
    def is_lite(self) -> bool:
        """Return whether it is a path, of Milvus Lite."""
        return not urlsplit(self.uri).scheme


class MilvusServer:
    """Calls of one server or of Milvus Lite, by a client that is made when needed."""

    def __init__(self, options: MilvusOptions) -> None:
        self.options = options
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "_client": None}

    def require_files(self) -> None:
        """Raise `DataUnavailable` where Milvus Lite, which makes its files, would find none."""
        if self.options.is_lite and not Path(self.options.uri).exists():
            raise DataUnavailable(
                f"there is no {self.options.uri}, in which the vectors lie: put it there again"
            )

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The result of a method of `pymilvus.MilvusClient`, with the timeout.

        Raises:
            DataUnavailable: the server cannot be reached, refuses, or takes too long.
        """
        until = time.monotonic() + min(self.options.timeout, RETRIED_FOR)
        with _in_words(self.options):
            from pymilvus.exceptions import MilvusException

            while True:
                try:
                    return self._try(method, *arguments, **named)
                except MilvusException as error:
                    # gRPC refuses for a while after a server was away.
                    away = UNREACHABLE in str(error) and method in REPEATABLE
                    if not away or time.monotonic() > until:
                        raise
                time.sleep(RETRY_INTERVAL)

    def _try(self, method: str, *arguments: Any, **named: Any) -> Any:
        if self._client is None:
            self._client = _connected(self.options)
        try:
            return getattr(self._client, method)(*arguments, timeout=self.options.timeout, **named)
        except BaseException:
            client, self._client = self._client, None  # the next call makes another one
            client.close()
            raise


def _connected(options: MilvusOptions) -> Any:
    with naming_extras():
        from pymilvus import MilvusClient

        if options.is_lite:
            import milvus_lite  # noqa: F401  (what is missing is named)
    token = os.environ.get("MILVUS_TOKEN", "")
    # A connection of its own, which knows nothing of one before that its server ended.
    client = MilvusClient(
        options.uri,
        token=token,
        timeout=options.timeout,
        dedicated=True,
        grpc_options=GRPC_OPTIONS,
    )
    if client.has_collection(options.collection, timeout=options.timeout):
        # Milvus Lite holds none in memory after it was started.
        client.load_collection(options.collection, timeout=options.timeout)
    return client


@contextmanager
def _in_words(options: MilvusOptions) -> Iterator[None]:
    """Errors of pymilvus as those of rcir."""
    with naming_extras():
        import grpc
        from pymilvus.exceptions import MilvusException
    try:
        yield
    except (MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
        message = " ".join(str(error).split())[:300]
        raise DataUnavailable(
            f"Milvus at {options.uri} cannot be reached, or refuses ({message}): see that it runs, "
            f"that the collection {options.collection} is there, and that MILVUS_TOKEN holds its "
            "token if it asks for one"
        ) from error


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
        """See `Index.search`; returns the requested number of rows, or all of the collection.

        Raises:
            DataUnavailable: the server cannot be reached, refuses, or takes too long.
            StaleCalibration: the collection was changed by someone else.
            InvalidConfig: the search found fewer, or k is above what Milvus searches.
            InvalidData: the queries are not such vectors.
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
        """Drop the collection, see `IsRemote.drop`."""
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
        values = {"version": self._version, "dim": self._dim, "index": self._described}
        (folder / COLLECTION_FILE).write_text(json.dumps(values))
        np.save(folder / IDS_FILE, self._ids, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, options: MilvusOptions) -> Self:
        """See `Index.load`.

        Raises:
            DataUnavailable: the server cannot be reached, or the collection is gone.
            StaleCalibration: the collection was changed since.
        """
        values = json.loads((folder / COLLECTION_FILE).read_text())
        index = cls(options)
        index._server.require_files()
        index._dim, index._version = int(values["dim"]), str(values["version"])
        index._described = dict(values["index"])
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
        present = self._read_version()
        if present == version:
            self._call("delete", filter=f"id >= {first}")
            self._write_version(self._version)
        elif present != self._version:  # by which nothing was inserted yet
            raise self._changed()
        self._unfinished = None

    def _read_version(self) -> str | None:
        properties: dict[str, str] = dict(self._call("describe_collection")["properties"])
        return properties.get(VERSION_PROPERTY)

    def _write_version(self, version: str) -> None:
        self._call("alter_collection_properties", {VERSION_PROPERTY: version})

    def _description(self) -> dict[str, str]:
        """Return what the server reports of the index and its parameters."""
        description = self._call("describe_index", "vector")
        names = ("index_type", "metric_type", *self.options.params)
        return {name: str(description[name]) for name in names if name in description}

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
        current = version, counted["count(*)"], self._description()
        if current != (self._version, len(self), self._described):
            raise self._changed()

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._server.call(method, self.options.collection, *arguments, **named)

    def _nearest(
        self, vectors: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids and squared L2 distances, each (n, count)."""
        chosen = self.options
        response = self._call(
            "search",
            data=list(vectors),
            anns_field="vector",
            limit=count,
            output_fields=["id"],
            search_params={"metric_type": "L2", "params": chosen.search_params},
            consistency_level=chosen.consistency_level,
        )
        short = min(map(len, response), default=0)
        if len(response) != len(vectors) or short < count:
            self._require_unchanged()
            raise InvalidConfig(
                f"{chosen.index_type} found {short} of the {count} nearest of {len(self)} vectors: "
                "search with larger search_params (ef, nprobe), or choose the index_type FLAT"
            )
        pairs = np.array(
            [[(hit["id"], hit["distance"]) for hit in hits] for hits in response],
            np.dtype([("id", np.int64), ("distance", np.float32)]),
        )
        return pairs["id"], pairs["distance"]

    def _changed(self) -> StaleCalibration:
        return StaleCalibration(
            f"the collection {self.options.collection} was changed by someone else, or a change of "
            "it was cut off: which of its rows is which item is no longer known; build the "
            "retriever anew from its vectors"
        )
