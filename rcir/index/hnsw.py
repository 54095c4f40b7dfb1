"""Hierarchical navigable small world graphs: FAISS's HNSW over the vectors themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import faiss

from rcir.index.faiss_index import FaissIndex
from rcir.index.ranges import require_range


def seed_levels(index: Any) -> None:
    """Have FAISS's HNSW draw the levels of what comes next by how many vectors it holds.

    FAISS draws them by a state that its files do not hold: what is added after loading would make
    another graph than before saving.
    """
    index.hnsw.rng = faiss.RandomGenerator(int(index.ntotal))


@dataclass(frozen=True)
class HnswOptions:
    """The options of `HnswIndex`.

    Args:
        M: neighbours of each vector in the graph (twice as many at its lowest level), 2 to 256.
        ef_construction: candidates that are kept while the graph is built, at least 1.
        ef_search: candidates that are kept while it is searched, at least 1; raised to k, the
            number of neighbours asked for, where it is below.
    """

    M: int = 32
    ef_construction: int = 40
    ef_search: int = 256

    def __post_init__(self) -> None:
        require_range(self, M=(2, 256), ef_construction=(1, 1 << 16), ef_search=(1, 1 << 20))


class HnswIndex(FaissIndex):
    """A graph of neighbours over float32 vectors.

    Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using
    hierarchical navigable small world graphs" (TPAMI 2020).

    Example:
        >>> import numpy as np
        >>> vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
        >>> HnswIndex.build(vectors, HnswOptions()).search(vectors[:2], 1)[1].ravel()
        array([0, 1])
    """

    Options = HnswOptions
    SEARCHED = ("ef_search",)

    def _made(self, dim: int) -> Any:
        index = faiss.IndexHNSWFlat(dim, self.options.M)
        index.hnsw.efConstruction = self.options.ef_construction
        index.is_trained = True  # there is nothing to train
        return index

    def _before_adding(self) -> None:
        seed_levels(self._index)

    def _parameters(self, k: int, selector: Any, widest: bool) -> Any:
        ef_search = self._index.ntotal if widest else self.options.ef_search
        return faiss.SearchParametersHNSW(efSearch=max(ef_search, k), sel=selector)
