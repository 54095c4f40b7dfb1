"""Vectors in half precision, in a file that the system maps into memory as it is read."""

from __future__ import annotations

import hashlib
import tempfile
import weakref
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData

_LARGEST = float(np.finfo(np.float16).max)


class HalfVectors:
    """Vectors (n, d) as float16 on disk: twice d bytes each, none of them held in memory.

    Until they are saved they lie in a temporary file (TMPDIR) that goes with the process.

    Example:
        >>> kept = HalfVectors(2)
        >>> kept.append(np.array([[1, 2], [3, 4]], np.float32))
        >>> kept[np.array([1])]
        array([[3., 4.]], dtype=float16)
    """

    def __init__(self, dim: int) -> None:
        self._file: IO[bytes] | None = None
        self._vectors: NDArray[np.float16] = np.empty((0, dim), np.float16)

    def __getstate__(self) -> dict[str, Any]:
        return {"vectors": np.array(self._vectors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vectors = state["vectors"]
        HalfVectors.__init__(self, vectors.shape[1])
        self.append(vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def dim(self) -> int:
        """d."""
        return int(self._vectors.shape[1])

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.float16]:
        found: NDArray[np.float16] = np.asarray(self._vectors)[rows]
        return found

    def append(self, vectors: NDArray[np.floating[Any]]) -> None:
        """Add vectors (m, d), of which `check` said nothing."""
        if not len(vectors):
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="rcir-vectors-")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
            self._vectors.tofile(self._file)
        self._file.seek(0, 2)
        vectors.astype(np.float16).tofile(self._file)
        self._file.flush()
        shape = (len(self) + len(vectors), self._vectors.shape[1])
        self._vectors = np.memmap(self._file, np.float16, "r", shape=shape)

    @staticmethod
    def check(vectors: NDArray[np.float32]) -> None:
        """Raise `InvalidData` if some numbers are too large for half precision."""
        if vectors.size and max(vectors.max(), -vectors.min()) > _LARGEST:
            raise InvalidData(
                f"some vectors hold numbers beyond {_LARGEST:g}, which half precision cannot keep: "
                "scale them, or take exact=False"
            )

    def digest(self) -> str:
        """SHA-256 of the vectors."""
        found = hashlib.sha256()
        for start in range(0, len(self), 1 << 16):
            found.update(np.ascontiguousarray(self._vectors[start : start + (1 << 16)]).data)
        return found.hexdigest()

    def save(self, path: Path) -> None:
        """Write them to a .npy file."""
        np.save(path, self._vectors, allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Map the vectors that `save` wrote.

        Raises:
            InvalidData: the file holds something else.
        """
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype != np.float16:
            raise InvalidData(f"{path.name} does not hold float16 vectors (n, d)")
        kept = cls(vectors.shape[1])
        kept._vectors = vectors
        return kept
