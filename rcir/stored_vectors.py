"""Vectors in a file that the system maps into memory as it is read."""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rcir.errors import InvalidData

_BATCH_NUMBERS = 1 << 22  # that are read or written at a time: 16 MiB of float32


def batches(n: int, dim: int) -> Iterator[slice]:
    """Yield the rows of vectors (n, d), as many at a time as take little memory."""
    step = max(1, _BATCH_NUMBERS // max(dim, 1))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


class StoredVectors:
    """Vectors (n, d) on disk; `vectors` is mapped into memory and must not be written to.

    Until they are saved they are in a temporary file (TMPDIR) that ends with the process.
    """

    def __init__(self, dim: int, dtype: DTypeLike = np.float32) -> None:
        self._file: IO[bytes] | None = None
        self.vectors: NDArray[Any] = np.empty((0, dim), dtype)
        self._watched: WatchedFile | None = None

    def __copy__(self) -> Self:
        # Vectors are never written to, and `append` starts a file of the copy's own.
        other = type(self)(self.dim, self.vectors.dtype)
        other.vectors, other._watched = self.vectors, self._watched
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {"vectors": np.array(self.vectors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vectors = state["vectors"]
        StoredVectors.__init__(self, vectors.shape[1], vectors.dtype)
        self.append(vectors)

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dim(self) -> int:
        """The length of the vectors."""
        return int(self.vectors.shape[1])

    @property
    def changed(self) -> bool:
        """Return whether the file that they were loaded from was written to."""
        return self._watched is not None and self._watched.changed

    def append(self, vectors: NDArray[np.floating[Any]]) -> None:
        """Add vectors (m, d); `check` says whether these may be stored."""
        if not len(vectors):
            return
        if self._file is None:
            file = tempfile.TemporaryFile(prefix="rcir-vectors-")  # noqa: SIM115
            weakref.finalize(self, file.close)
            self.vectors.tofile(file)
            self._file, self._watched = file, None
        self._file.seek(self.vectors.nbytes)  # behind it may lie what was not written to its end
        self._file.truncate()
        vectors.astype(self.vectors.dtype, copy=False).tofile(self._file)
        self._file.flush()
        shape = (len(self) + len(vectors), self.dim)
        self.vectors = np.memmap(self._file, self.vectors.dtype, "r", shape=shape)

    def check(self, vectors: NDArray[np.float32]) -> None:
        """Raise `InvalidData` if numbers of some vectors are too large, or too small, to store."""
        limits = np.finfo(self.vectors.dtype)
        longest = np.abs(vectors).max(axis=1, initial=0)
        wrong = (longest > limits.max) | ((longest > 0) & (longest < limits.tiny))
        if wrong.any():
            raise InvalidData(
                f"the largest number of some vectors is {longest[wrong][0]:g}, and half precision "
                f"keeps {limits.tiny:.2g} to {limits.max:g}: scale them, or use exact=False"
            )

    def digest(self) -> str:
        """Return the SHA-256 of the vectors."""
        sha256 = hashlib.sha256()
        for rows in batches(*self.vectors.shape):
            sha256.update(np.ascontiguousarray(self.vectors[rows]).data)
        return sha256.hexdigest()

    def save(self, path: Path) -> None:
        """Write them to a .npy file."""
        np.save(path, self.vectors, allow_pickle=False)

    @classmethod
    def load(cls, path: Path, dtype: DTypeLike) -> Self:
        """Map the vectors that `save` wrote; `InvalidData` if the file holds something else."""
        watched = WatchedFile(path)
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype != dtype:
            raise InvalidData(f"{path.name} does not hold {np.dtype(dtype)} vectors (n, d)")
        stored = cls(vectors.shape[1], dtype)
        stored.vectors, stored._watched = vectors, watched
        return stored


class WatchedFile:
    """A file that is mapped into memory: writing to it changes what was read."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        weakref.finalize(self, self._file.close)
        self._known = self._written()

    def _written(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_mtime_ns, stat.st_size

    @property
    def changed(self) -> bool:
        """Return whether it was written to or truncated; replacing the file does not count."""
        return self._written() != self._known
