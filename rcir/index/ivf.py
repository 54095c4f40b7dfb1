"""Inverted lists of the vectors themselves: FAISS's IVF-Flat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import faiss

from rcir.index.inverted_lists import InvertedLists
from rcir.index.ranges import require_range


@dataclass(frozen=True)
class IvfOptions:
    """The options of `IvfIndex`.

    Args:
        nlist: number of lists, 1 to 2^20; FAISS advises 4 to 16 times the root of the number of
            vectors.
        nprobe: lists that a search looks through, at least 1; `nlist` and more is all of them.
        train_size: vectors that the centroids are trained on, drawn at random, at least 1.
        random_seed: of that draw and of the training.
    """

    nlist: int = 1024
    nprobe: int = 32
    train_size: int = 1 << 18
    random_seed: int = 0

    def __post_init__(self) -> None:
        lists = (1, 1 << 20)
        require_range(
            self, nlist=lists, nprobe=lists, train_size=(1, 1 << 30), random_seed=(0, (1 << 31) - 1)
        )


class IvfIndex(InvertedLists):
    """Float32 vectors in lists.

    Example:
        >>> import numpy as np
        >>> vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
        >>> index = IvfIndex.build(vectors, IvfOptions(nlist=8, nprobe=2))
        >>> index.search(vectors[:2], 1)[1].ravel()
        array([0, 1])
    """

    Options = IvfOptions
    SEARCHED = ("nprobe",)

    def _made(self, dim: int) -> Any:
        quantizer = faiss.IndexFlatL2(dim)
        index = faiss.IndexIVFFlat(quantizer, dim, self.options.nlist)
        index.set_direct_map_type(faiss.DirectMap.Array)  # by which vectors are given back
        return self._seeded(index)
