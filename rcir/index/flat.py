"""Exact search, with the same results for a query alone and in a batch, and its index."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.files import read_array
from rcir.index.base import Neighbours, check_vectors

VECTORS_FILE = "vectors.npy"
CHUNK = 1 << 24  # numbers (64 MiB) that have a digest; others change the version of large indexes
_SPARE = 16  # candidates that are preselected beyond k
_MAX_PADDING = 4  # a batch is repeated at most so often to reach FAISS's matrix products
_TINY = float(np.finfo(np.float32).tiny)
_NO_POSITION = 0xFFFFFFFF  # the lower half of -1


def search_by_subtraction(
    search: Callable[[NDArray[np.float32]], Neighbours],
    queries: NDArray[np.float32],
    largest: int | None = None,
) -> Neighbours:
    """Search with FAISS in batches so small that it computes distances by subtraction.

    For larger ones, by the number of queries times d (before version 1.15 of queries), it
    multiplies matrices, |x|^2 + |y|^2 - 2xy in float32, and small distances lose digits.
    """
    step = largest or max(1, (faiss.cvar.distance_compute_blas_threshold - 1) // queries.shape[1])
    if len(queries) <= step:
        return search(queries)
    parts = [search(queries[start : start + step]) for start in range(0, len(queries), step)]
    squared, positions = zip(*parts, strict=True)
    return np.concatenate(squared), np.concatenate(positions)


def find_nearest(queries: NDArray[np.float32], vectors: NDArray[np.float32], k: int) -> Neighbours:
    """Return squared L2 distances and positions, each (n, k), of the k nearest of vectors (m, d).

    All distances are computed by subtraction. For speed, matrix products preselect more than k
    candidates; where rounding may have excluded one of the k nearest, the query is searched again
    by subtraction only. Positions are -1 where m < k.
    """
    if len(queries) == 1 or not 0 < k <= len(vectors) - _SPARE:
        return search_by_subtraction(lambda batch: faiss.knn(batch, vectors, k), queries)
    n, batch = len(queries), queries
    needed = max(1, -(-faiss.cvar.distance_compute_blas_threshold // queries.shape[1]))
    if n < needed <= _MAX_PADDING * n:
        batch = queries[np.arange(needed) % n]  # matrix products of more queries are faster
    preselected, candidates = faiss.knn(batch, vectors, k + _SPARE)
    return rank_candidates(queries, vectors, k, preselected[:n], candidates[:n])


def rank_candidates(
    queries: NDArray[np.float32],
    vectors: NDArray[np.float32],
    k: int,
    preselected: NDArray[np.float32],
    candidates: NDArray[np.int64],
) -> Neighbours:
    """Return what `find_nearest` does, from distances and positions that matrix products found."""
    squared, positions = sort_candidates(queries, vectors, k, candidates)
    excluded_from = preselected[:, -1].astype(np.float64)
    unsure = ~(excluded_from > squared[:, -1] + _rounding(queries, squared[:, -1]))
    if unsure.any():
        squared[unsure], positions[unsure] = search_by_subtraction(
            lambda batch: faiss.knn(batch, vectors, k), queries[unsure]
        )
    return squared, positions


def sort_candidates(
    queries: NDArray[np.float32],
    vectors: NDArray[np.float32],
    k: int,
    candidates: NDArray[np.int64],
) -> Neighbours:
    """Return the nearest k of candidates (n, c), by squared distance and position; -1 comes last.

    Distances are computed by subtraction.
    """
    squared = np.empty(candidates.shape, np.float32)
    arrays = [faiss.swig_ptr(array) for array in (squared, queries, vectors, candidates)]
    faiss.fvec_L2sqr_by_idx(*arrays, queries.shape[1], *squared.shape)
    squared[candidates < 0] = np.inf
    # One sort of integers: nonnegative floats are in the order of their bits.
    bits = squared.view(np.int32).astype(np.int64)
    keys = np.sort((bits << 32) | (candidates & _NO_POSITION), axis=1)[:, :k]
    positions = keys & _NO_POSITION
    positions[positions == _NO_POSITION] = -1
    return (keys >> 32).astype(np.int32).view(np.float32), positions


def _rounding(queries: NDArray[np.float32], squared: NDArray[np.float32]) -> NDArray[np.float64]:
    """Bound the rounding errors of the squared distances (n,) to items within `squared`.

    Such an item y of a query x has |y| <= |x| + r for r^2 = `squared`. Sums of d products in
    float32 are off by d 2^-24 of the sum of their absolute values, (|x| + |y|)^2 at most.
    """
    dim = queries.shape[1]
    norms = np.linalg.norm(queries.astype(np.float64), axis=1)
    longest = 2 * norms + np.sqrt(squared.astype(np.float64))
    return np.asarray((dim + 8) * (2.0**-23 * longest**2 + _TINY))


@dataclass(frozen=True)
class FlatOptions:
    """The options of `FlatIndex`: none."""


class FlatIndex:
    """Exact search: all vectors are compared one by one.

    Attributes:
        vectors: (n, d), read-only: changes replace the array, which copies share.
    """

    Options: ClassVar[type] = FlatOptions

    def __init__(self, dim: int, options: Any) -> None:
        self.options = options
        self.vectors = np.empty((0, dim), np.float32)
        # Of the first chunks. A change of the vectors replaces the list, so that a thread that is
        # still digesting the old vectors extends the old list.
        self._digests: list[str] = []

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: Any) -> Self:
        vectors = check_vectors(vectors)
        index = cls(vectors.shape[1], options)
        index.add(vectors)
        return index

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.vectors)] = self.vectors
        other = type(self).__new__(type(self))
        other.__setstate__(deepcopy(self.__getstate__(), memo))
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.vectors.setflags(write=False)  # unpickled ones are writable

    def __len__(self) -> int:
        return len(self.vectors)

    def add(self, vectors: NDArray[np.float32]) -> None:
        n, dim = self.vectors.shape
        vectors = check_vectors(vectors, dim)
        self.vectors = np.concatenate([self.vectors, vectors])
        self.vectors.setflags(write=False)
        self._digests = self._digests[: n // self._chunk_rows]

    def remove(self, positions: NDArray[np.int64]) -> None:
        self.vectors = np.delete(self.vectors, positions, axis=0)
        self.vectors.setflags(write=False)
        first = np.min(positions, initial=len(self))
        self._digests = self._digests[: first // self._chunk_rows]

    def search(self, vectors: NDArray[np.float32], k: int) -> Neighbours:
        queries = check_vectors(vectors, self.vectors.shape[1])
        squared, positions = find_nearest(queries, self.vectors, k)
        if k > len(self):
            squared[positions < 0] = np.inf
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), positions

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.vectors.take(np.asarray(positions, np.int64), axis=0)

    @property
    def version(self) -> str:
        """The digest of the only chunk, or a digest of the digests of all."""
        digests = self.digests()
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256(" ".join(["flat-l2 chunks", *digests]).encode()).hexdigest()

    @property
    def _chunk_rows(self) -> int:
        return max(1, CHUNK // self.vectors.shape[1])

    def digests(self) -> list[str]:
        """Return a SHA-256 digest of each chunk of rows; only changed chunks are digested again."""
        rows, cache = self._chunk_rows, self._digests
        starts, digests = range(0, max(len(self), 1), rows), cache.copy()
        for start in starts[len(digests) :]:
            digest = hashlib.sha256(f"flat-l2 {self.vectors.shape[1]} ".encode())
            digest.update(self.vectors[start : start + rows].data)
            digests.append(digest.hexdigest())
        cache[:] = digests
        return digests

    def restore_digests(self, digests: list[str]) -> None:
        """See `KeepsDigests`."""
        if len(digests) != -(-max(len(self), 1) // self._chunk_rows):
            raise InvalidData(f"{len(digests)} digests do not match the chunks of the vectors")
        self._digests = digests.copy()

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        return self.vectors.nbytes

    def save(self, folder: Path) -> None:
        np.save(folder / VECTORS_FILE, self.vectors, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        vectors = read_array(folder / VECTORS_FILE)
        if vectors.dtype != np.float32:
            raise InvalidData(f"{VECTORS_FILE} does not contain float32 vectors")
        vectors = check_vectors(vectors)
        vectors.setflags(write=False)
        index = cls(vectors.shape[1], options)
        index.vectors = vectors
        return index
