"""Exact search: FAISS's flat L2 index."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Self

import torch  # noqa: F401  (before faiss: the other order has crashed with some OpenMP runtimes)

# isort: split
import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData


class FlatIndex:
    """All vectors, compared one by one.

    Example:
        >>> import numpy as np
        >>> index = FlatIndex(2)
        >>> index.add(np.array([[0, 0], [3, 4]], np.float32))
        >>> index.search(np.array([[0, 1]], np.float32), k=3)[1]
        array([[ 0,  1, -1]])
    """

    def __init__(self, dim: int) -> None:
        self._index: Any = faiss.IndexFlatL2(dim)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, vectors: NDArray[np.float32]) -> None:
        self._index.add(self._checked(vectors))

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        squared, positions = self._index.search(self._checked(vectors), k)
        if k > len(self):
            squared[positions < 0] = np.inf
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), positions

    def fingerprint(self) -> str:
        size = len(self) * self._index.d
        vectors = faiss.rev_swig_ptr(self._index.get_xb(), size) if size else np.empty(0)
        return hashlib.sha256(f"flat-l2 {self._index.d} ".encode() + vectors.tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        faiss.write_index(self._index, str(path))

    @classmethod
    def load(cls, path: Path) -> Self:
        index = cls.__new__(cls)
        index._index = faiss.read_index(str(path))
        return index

    def _checked(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        if vectors.ndim != 2 or vectors.shape[1] != self._index.d:
            raise InvalidData(
                f"vectors have shape {vectors.shape}; this index takes (n, {self._index.d})"
            )
        if not np.isfinite(vectors).all():
            raise InvalidData(
                "some vectors are NaN or infinite; an encoder that diverged in training does this"
            )
        return np.ascontiguousarray(vectors, np.float32)
