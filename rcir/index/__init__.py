"""Nearest-neighbour indexes behind one protocol: `build_index` makes one of `INDEXES`."""

from rcir.index.attached import AttachedIndex
from rcir.index.base import (
    DEPTH,
    SAFE_LENGTHS,
    Index,
    KeepsDigests,
    Neighbours,
    check_depth,
    check_shape,
    check_vectors,
    lengths,
    nearest_others,
    no_neighbours,
    norms_of,
    one_minus_cosine,
    recall_of,
    require_finite,
    unit_vectors,
)
from rcir.index.table import INDEXES, IndexConfig, build_index, find_index

__all__ = [
    "DEPTH",
    "INDEXES",
    "SAFE_LENGTHS",
    "AttachedIndex",
    "Index",
    "IndexConfig",
    "KeepsDigests",
    "Neighbours",
    "build_index",
    "check_depth",
    "check_shape",
    "check_vectors",
    "find_index",
    "lengths",
    "nearest_others",
    "no_neighbours",
    "norms_of",
    "one_minus_cosine",
    "recall_of",
    "require_finite",
    "unit_vectors",
]
