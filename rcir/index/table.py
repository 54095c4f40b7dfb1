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

INDEXES = {
    "flat": "rcir.index.flat:FlatIndex",
    "hnsw": "rcir.index.faiss_kinds:HnswIndex",
    "ivf": "rcir.index.faiss_kinds:IvfIndex",
    "ivf-pq": "rcir.index.faiss_kinds:IvfPqIndex",
    "factory": "rcir.index.faiss_kinds:FactoryIndex",
    "gpu": "rcir.index.gpu:GpuIndex",
    **{  # collections that exist, see `rcir.attach`
        "lancedb": "rcir.index.lance:LanceIndex",
        "qdrant": "rcir.index.qdrant:QdrantIndex",
        "pgvector": "rcir.index.pgvector:PgvectorIndex",
    },
}
PROTOCOL = ("Options", "build", "add", "remove", "search", "version", "save", "load", "__len__")


def find_index(kind: str) -> type[Index]:
    """Return the class of an index: one of `INDEXES`, or your own by its import path.

    Args:
        kind: a name in `INDEXES`, or "package.module:Class", which must also be importable where a
            retriever with such an index is loaded.

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
            f"index.kind {kind!r} is not an index: it has no {', '.join(missing)}; see "
            "rcir.index.Index"
        )
    return index


@dataclass(frozen=True)
class IndexConfig:
    """The kind of an index, and its options.

    Args:
        kind: a name in `INDEXES`: "flat" (exact), "hnsw", "ivf", "ivf-pq", "factory", "gpu"; for
            a gallery that is attached, "lancedb", "qdrant" or "pgvector"; or the import path of
            your own index, "package.module:Class"; see `rcir.index.Index`.
        options: of the index, see its `Options`, which have defaults.

    Raises:
        InvalidConfig: there is no such index, or it has no such option.

    Example:
        >>> IndexConfig(options={"lists": 100})
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: index.options of flat: there is no option lists; ...
    """

    kind: str = "flat"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {n: v.item() for n, v in self.options.items() if isinstance(v, np.generic)}
        object.__setattr__(self, "options", self.options | numbers)
        self.index_options()

    def index_options(self) -> Any:
        """Return all options, as the index's `Options`."""
        kind = find_index(self.kind).Options
        require_options(f"index.options of {self.kind}", kind, self.options)
        return kind(**self.options)

    @classmethod
    def of(cls, index: Index) -> IndexConfig:
        """Return the configuration that an index was built with.

        Raises:
            InvalidConfig: its class cannot be imported.
        """
        kind = type(index)
        path = import_path(kind)
        # A name that this program added to the table is unknown where the index is loaded.
        builtin = path.startswith("rcir.")
        name = next((name for name, known in INDEXES.items() if builtin and known == path), path)
        if kind.__module__ == "__main__" or find_index(name) is not kind:
            raise InvalidConfig(f"{path} cannot be imported by that name: move it to a module")
        return cls(name, asdict(index.options))


def build_index(vectors: NDArray[np.float32], config: IndexConfig | None = None) -> Index:
    """Build an index of vectors (n, d), by default the exact one, "flat".

    Example:
        >>> build_index(np.eye(3, dtype=np.float32)).search(np.ones((1, 3), np.float32), 1)[0]
        array([[1.4142135]], dtype=float32)
    """
    config = IndexConfig() if config is None else config
    if not isinstance(config, IndexConfig):
        raise InvalidConfig(f"index is {config!r}; pass an IndexConfig")
    return find_index(config.kind).build(vectors, config.index_options())
