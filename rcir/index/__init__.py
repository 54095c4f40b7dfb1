"""Nearest-neighbour indexes behind one protocol: `build_index` makes one of `INDEXES`."""

from rcir.index.base import (
    DEPTH,
    SAFE_LENGTHS,
    Index,
    IsRemote,
    KeepsDigests,
    UnbuiltIndex,
    check_depth,
    check_shape,
    check_vectors,
    dropped_on_error,
    lengths,
    nearest_others,
    norms_of,
    one_minus_cosine,
    recall_of,
    require_finite,
)
from rcir.index.table import INDEXES, IndexConfig, build_index, find_index

__all__ = [
    "DEPTH",
    "INDEXES",
    "SAFE_LENGTHS",
    "Index",
    "IndexConfig",
    "IsRemote",
    "KeepsDigests",
    "UnbuiltIndex",
    "build_index",
    "check_depth",
    "check_shape",
    "check_vectors",
    "dropped_on_error",
    "find_index",
    "lengths",
    "nearest_others",
    "norms_of",
    "one_minus_cosine",
    "recall_of",
    "require_finite",
]
