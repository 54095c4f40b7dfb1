"""A client of Milvus: where it is, how it is asked, its errors in words."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from rcir.errors import DataUnavailable, InvalidConfig
from rcir.extras import naming_extras

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
        if not (parts.scheme in ("http", "https") and parts.netloc) and (
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
    def is_lite(self) -> bool:
        """Whether it is a path, of Milvus Lite."""
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
        """The result of a method of `pymilvus.MilvusClient`, which is told the timeout.

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
        said = " ".join(str(error).split())[:300]
        raise DataUnavailable(
            f"Milvus at {options.uri} cannot be reached, or refuses ({said}): see that it runs, "
            f"that the collection {options.collection} is there, and that MILVUS_TOKEN holds its "
            "token if it asks for one"
        ) from error
