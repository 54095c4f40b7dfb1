"""The table of indexes, and the configuration that names one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.imports import find_class, import_path
from rcir.index.base import Index
from rcir.options import require_options
from rcir.trust import allow_servers

INDEXES = {
    "flat": "rcir.index.flat:FlatIndex",
    "hnsw": "rcir.index.faiss_indexes:HnswIndex",
    "ivf": "rcir.index.faiss_indexes:IvfIndex",
    "ivf-pq": "rcir.index.faiss_indexes:IvfPqIndex",
    "factory": "rcir.index.faiss_indexes:FactoryIndex",
    "gpu": "rcir.index.gpu:GpuIndex",
    "pgvector": "rcir.index.pgvector:PgvectorIndex",
}
PROTOCOL = ("Options", "build", "add", "remove", "search", "version", "save", "load", "__len__")


def find_index(kind: str) -> type[Index]:
    """The class of an index: one of `INDEXES`, or one of yours by its import path.

    Args:
        kind: a name in `INDEXES`, or "package.module:Class". The module is imported, also by
            wherever a retriever with it is loaded: it must be importable there.

    Raises:
        InvalidConfig: there is no such name, module or class, or it lacks a part of `Index`.

    Example:
        >>> find_index("flat") is find_index("rcir.index.flat:FlatIndex")
        True
    """
    index = find_class("index.kind", kind, INDEXES)
    missing = [part for part in PROTOCOL if not hasattr(index, part)]
    if missing:
        raise InvalidConfig(
            f"index.kind {kind!r} is no index: it has no {', '.join(missing)}; see rcir.index.Index"
        )
    return index


@dataclass(frozen=True)
class IndexConfig:
    """The kind of an index, and its options.

    Args:
        kind: a name in `INDEXES`: "flat" (exact), "hnsw", "ivf", "ivf-pq", "factory", "gpu" or
            "pgvector" (on a server); or the import path of an index of your own,
            "package.module:Class"; see `rcir.index.Index`.
        options: of the index, see its `Options`; those that are left out are its defaults.

    Raises:
        InvalidConfig: there is no such index, or it has no such option.

    Example:
        >>> IndexConfig(options={"lists": 100})
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: index.options of flat: there is no option lists; there are none
    """

    kind: str = "flat"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in self.options.items()
        }
        object.__setattr__(self, "options", plain)
        self.index_options()

    def index_options(self) -> Any:
        """The options as the index's own type, all of them."""
        kind = find_index(self.kind).Options
        require_options(f"index.options of {self.kind}", kind, self.options)
        return kind(**self.options)

    @classmethod
    def of(cls, index: Index) -> IndexConfig:
        """The configuration that an index was built with.

        Raises:
            InvalidConfig: its class cannot be imported.
        """
        kind = type(index)
        path = import_path(kind)
        # A name that somebody put into the table is not in that of whoever loads it.
        own = path.startswith("rcir.")
        name = next((name for name, known in INDEXES.items() if own and known == path), path)
        if kind.__module__ == "__main__" or find_index(name) is not kind:
            raise InvalidConfig(
                f"{path} is defined where whoever loads it cannot import it: move the index to a "
                "module of its own"
            )
        return cls(name, asdict(index.options))


def build_index(vectors: NDArray[np.float32], config: IndexConfig | None = None) -> Index:
    """An index of vectors (n, d); the exact one, "flat", unless another is asked for.

    Example:
        >>> build_index(np.eye(3, dtype=np.float32)).search(np.ones((1, 3), np.float32), 1)[0]
        array([[1.4142135]], dtype=float32)
    """
    config = IndexConfig() if config is None else config
    if not isinstance(config, IndexConfig):
        raise InvalidConfig(f"index is {config!r}; give an IndexConfig, which names its kind")
    options = config.index_options()
    allow_servers(getattr(options, "hosts", ()))
    return find_index(config.kind).build(vectors, options)
