"""Exact search: every vector is compared, by FAISS."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.files import read_array
from rcir.index.base import check_vectors
from rcir.index.exact import nearest

VECTORS_FILE = "vectors.npy"


@dataclass(frozen=True)
class FlatOptions:
    """The options of `FlatIndex`: none."""


class FlatIndex:
    """Exact search: all vectors are compared one by one.

    Example:
        >>> import numpy as np
        >>> index = FlatIndex.build(np.array([[0, 0], [3, 4]]), FlatOptions())
        >>> index.search(np.array([[0, 1]], np.float32), k=3)[1]
        array([[ 0,  1, -1]])
    """

    Options = FlatOptions

    def __init__(self, dim: int, options: FlatOptions) -> None:
        self.options = options
        self._vectors = np.empty((0, dim), np.float32)  # owned, so that it grows where it lies
        self._digest: Any = None  # of the vectors, in SHA-256; None where it has to be made anew

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: FlatOptions) -> Self:
        vectors = check_vectors(vectors)
        index = cls(vectors.shape[1], options)
        index.add(vectors)
        return index

    def __copy__(self) -> Self:
        other = type(self)(self._vectors.shape[1], self.options)
        other._vectors = self._vectors.copy()  # one of them may grow where it lies
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_digest": None}  # neither copied nor shared by copies

    def __len__(self) -> int:
        return len(self._vectors)

    def add(self, vectors: NDArray[np.float32]) -> None:
        n, dim = self._vectors.shape
        vectors = check_vectors(vectors, dim)
        if not self._vectors.flags.owndata:
            self._vectors = self._vectors.copy()
        # FAISS's own index doubles what it holds, and copies it, where this is extended.
        self._vectors.resize((n + len(vectors), dim), refcheck=False)
        self._vectors[n:] = vectors
        if self._digest is not None:
            self._digest.update(vectors.data)

    def remove(self, positions: NDArray[np.int64]) -> None:
        self._vectors = np.delete(self._vectors, positions, axis=0)
        self._digest = None

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        queries = check_vectors(vectors, self._vectors.shape[1])
        squared, positions = nearest(queries, self._vectors, k)
        if k > len(self):
            squared[positions < 0] = np.inf
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), positions

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._vectors[np.asarray(positions, np.int64)]

    @property
    def version(self) -> str:
        """A digest of the vectors."""
        if self._digest is None:
            self._digest = hashlib.sha256(f"flat-l2 {self._vectors.shape[1]} ".encode())
            self._digest.update(self._vectors.data)
        return str(self._digest.hexdigest())

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory."""
        return self._vectors.nbytes

    def save(self, folder: Path) -> None:
        np.save(folder / VECTORS_FILE, self._vectors, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, options: FlatOptions) -> Self:
        # Vectors, not FAISS's own file: reading a damaged one of these ends the process.
        vectors = read_array(folder / VECTORS_FILE)
        if vectors.dtype != np.float32:
            raise InvalidData(f"{VECTORS_FILE} does not hold float32 vectors")
        vectors = check_vectors(vectors)
        index = cls(vectors.shape[1], options)
        index._vectors = vectors
        return index
