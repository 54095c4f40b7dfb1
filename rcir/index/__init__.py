"""Nearest-neighbour indexes behind one protocol: `build_index` makes one of `INDEXES`."""

from rcir.index.base import (
    DEPTH,
    HoldsVectors,
    Index,
    IsRemote,
    KeepsDigests,
    UnbuiltIndex,
    check_depth,
    check_vectors,
    dropped_on_error,
    lengths,
    one_minus_cosine,
)
from rcir.index.table import INDEXES, IndexConfig, build_index, find_index, nearest_others

__all__ = [
    "DEPTH",
    "INDEXES",
    "HoldsVectors",
    "Index",
    "IndexConfig",
    "IsRemote",
    "KeepsDigests",
    "UnbuiltIndex",
    "build_index",
    "check_depth",
    "check_vectors",
    "dropped_on_error",
    "find_index",
    "lengths",
    "nearest_others",
    "one_minus_cosine",
]
