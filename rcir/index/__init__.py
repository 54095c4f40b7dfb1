"""Nearest-neighbour indexes behind one protocol: `build_index` makes one of `INDEXES`."""

from rcir.index.base import DEPTH, Index, check_vectors
from rcir.index.leave_one_out import nearest_others
from rcir.index.table import INDEXES, IndexConfig, build_index, find_index

__all__ = [
    "DEPTH",
    "INDEXES",
    "Index",
    "IndexConfig",
    "build_index",
    "check_vectors",
    "find_index",
    "nearest_others",
]
