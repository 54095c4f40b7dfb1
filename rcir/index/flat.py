"""Exact search: FAISS's flat L2 index."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.files import read_array
from rcir.index.base import check_vectors

VECTORS_FILE = "vectors.npy"


@dataclass(frozen=True)
class FlatOptions:
    """The options of `FlatIndex`: none."""


class FlatIndex:
    """All vectors, compared one by one.

    Example:
        >>> import numpy as np
        >>> index = FlatIndex.build(np.array([[0, 0], [3, 4]]), FlatOptions())
        >>> index.search(np.array([[0, 1]], np.float32), k=3)[1]
        array([[ 0,  1, -1]])
    """

    Options = FlatOptions

    def __init__(self, dim: int, options: FlatOptions) -> None:
        self.options = options
        self._index: Any = faiss.IndexFlatL2(dim)
        self._digest: Any = None  # of the vectors, in SHA-256; None where it has to be made anew

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: FlatOptions) -> Self:
        vectors = check_vectors(vectors)
        index = cls(vectors.shape[1], options)
        index.add(vectors)
        return index

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_digest": None}  # neither copied nor shared by copies

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, vectors: NDArray[np.float32]) -> None:
        vectors = check_vectors(vectors, self._index.d)
        self._index.add(vectors)
        if self._digest is not None:
            self._digest.update(vectors.data)

    def remove(self, positions: NDArray[np.int64]) -> None:
        self._index.remove_ids(np.ascontiguousarray(positions, np.int64))
        self._digest = None

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        squared, positions = self._index.search(check_vectors(vectors, self._index.d), k)
        if k > len(self):
            squared[positions < 0] = np.inf
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), positions

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._vectors()[positions]

    @property
    def version(self) -> str:
        """A digest of the vectors."""
        if self._digest is None:
            self._digest = hashlib.sha256(f"flat-l2 {self._index.d} ".encode())
            self._digest.update(np.ascontiguousarray(self._vectors()).data)
        return str(self._digest.hexdigest())

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory."""
        return 4 * len(self) * int(self._index.d)

    def save(self, folder: Path) -> None:
        np.save(folder / VECTORS_FILE, self._vectors(), allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, options: FlatOptions) -> Self:
        # Vectors, not FAISS's own file: reading a damaged one of these ends the process.
        vectors = read_array(folder / VECTORS_FILE)
        if vectors.dtype != np.float32:
            raise InvalidData(f"{VECTORS_FILE} does not hold float32 vectors")
        return cls.build(vectors, options)

    def _vectors(self) -> NDArray[np.float32]:
        """(n, d), in the memory of the index."""
        size = len(self) * self._index.d
        stored = faiss.rev_swig_ptr(self._index.get_xb(), size) if size else np.empty(0, np.float32)
        vectors: NDArray[np.float32] = stored.reshape(len(self), self._index.d)
        return vectors
