"""Contents of FAISS's indexes, and their files."""

from __future__ import annotations

import hashlib
import json
import secrets
import tempfile
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.files import read_array
from rcir.stored_vectors import StoredVectors, WatchedFile

_FILE, _STATE, _LIVE, _STORED = "index.faiss", "index.json", "live.npy", "vectors.npy"
# The file is mapped into memory, so that processes share it.
FLAGS = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE


def faiss_content(index: Any) -> tuple[str, int]:
    """SHA-256 and number of bytes of the file that FAISS writes of an index; none is written.

    Example:
        >>> faiss_content(faiss.IndexFlatL2(3))[1] > 0
        True
    """
    digest, size = hashlib.sha256(), 0

    def take(part: bytes) -> None:
        nonlocal size
        digest.update(part)
        size += len(part)

    writer = faiss.PyCallbackIOWriter(take, 1 << 20)
    faiss.write_index(index, writer)
    return digest.hexdigest(), size


def unmapped(index: Any) -> Any:
    """The same index in memory of its own: FAISS ends the process that adds to a mapped one."""
    with tempfile.TemporaryFile() as file:  # without a name, which a killed process would leave
        path = f"/dev/fd/{file.fileno()}"
        faiss.write_index(index, path)
        file.seek(0)
        return faiss.read_index(path, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)


class FaissContents:
    """Vectors by number in FAISS's index, of which removed ones have no position.

    HNSW can lose no vector and an inverted list no number: what is removed stays and is passed over
    in every search. Indexes with different search parameters share their contents.

    Attributes:
        index: FAISS's own, on which no search parameter is ever set.
        stored: the same vectors by number, in half precision on disk; None where they are not kept.
    """

    def __init__(self, index: Any, stored: StoredVectors | None) -> None:
        self.index = index
        self.stored = stored
        self._live: NDArray[np.int64] | None = None  # numbers, ascending; None: all
        self._selector: Any = None  # of these
        self._watched: WatchedFile | None = None  # where the index is mapped into memory
        # Until something is added: digests of FAISS's index and of the stored vectors; the size of
        # FAISS's index. And of what was not removed, until something is.
        self._digests: list[str] | None = None
        self._size: int | None = None
        self._live_digest: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # FAISS gives a copy memory of its own.
        return self.__dict__ | dict.fromkeys(("_watched", "_selector", "_digests", "_size"))

    def __len__(self) -> int:
        return int(self.index.ntotal) if self._live is None else len(self._live)

    @property
    def selector(self) -> Any:
        """FAISS's selector of what was not removed; None where that is all."""
        if self._selector is None and self._live is not None:
            self._selector = self._selecting(self._live)
        return self._selector

    def _selecting(self, live: NDArray[np.int64]) -> Any:
        mask = np.zeros(self.index.ntotal, bool)
        mask[live] = True
        return faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))

    def without(self, positions: NDArray[np.int64]) -> Any:
        """The selector that there would be without some positions."""
        return self._selecting(np.delete(self._numbers(), positions))

    def remove(self, positions: NDArray[np.int64]) -> None:
        """Pass over what is at positions from now on."""
        self._changed(np.delete(self._numbers(), positions))

    def grown(self, first: int, kept: bool = True) -> None:
        """Give positions to the numbers from the first one on, or pass over them."""
        self._digests = self._size = None
        if kept and self._live is None:
            self._changed(None)
            return
        if self.stored is not None:
            self.stored.vectors = self.stored.vectors[: self.index.ntotal]
        old = np.arange(first) if self._live is None else self._live
        new = np.arange(first, self.index.ntotal if kept else first)
        self._changed(np.append(old, new))

    def _changed(self, live: NDArray[np.int64] | None) -> None:
        self._live, self._selector, self._live_digest = live, None, None

    def _numbers(self) -> NDArray[np.int64]:
        return np.arange(self.index.ntotal) if self._live is None else self._live

    def positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return positions of numbers that were not removed; -1 stays."""
        if self._live is None:
            return numbers
        return np.where(numbers < 0, -1, np.searchsorted(self._live, numbers))

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """(..., d) stored vectors, or what FAISS makes of its codes; RuntimeError: of nothing."""
        numbers = np.asarray(positions, np.int64)
        if self._live is not None:
            numbers = self._live[numbers]
        if self.stored is not None:
            return np.asarray(self.stored.vectors)[numbers].astype(np.float32)
        vectors: NDArray[np.float32] = self.index.reconstruct_batch(numbers.ravel())
        return vectors.reshape(*numbers.shape, self.index.d)

    def unmap(self) -> None:
        """Take FAISS's index into memory of its own: FAISS ends a process that changes others'."""
        if self._watched is not None:
            self.index, self._watched = unmapped(self.index), None
            self._digests = self._size = None

    @property
    def digest(self) -> str:
        """Digest of the contents; a new one each time if the files were written to."""
        if self.changed:
            return f"written to {secrets.token_hex()}"
        first, *stored = self.digests()
        if self._live is not None and self._live_digest is None:
            self._live_digest = hashlib.sha256(self._live.data).hexdigest()
        return "".join([first, self._live_digest or "", *stored])

    def digests(self) -> list[str]:
        """Return the digests of FAISS's index and, if there are any, of the stored vectors."""
        digests = None if self.changed else self._digests
        if digests is None:
            digest, self._size = faiss_content(self.index)
            digests = [digest] if self.stored is None else [digest, self.stored.digest()]
            self._digests = digests
        return digests

    def restore_digests(self, digests: list[str]) -> None:
        """See `KeepsDigests`."""
        if len(digests) != 1 + (self.stored is not None):
            raise InvalidData(f"{len(digests)} digests of an index of another kind")
        self._digests = digests

    @property
    def changed(self) -> bool:
        """Return whether somebody wrote to the files that it was loaded from."""
        stored = self.stored is not None and self.stored.changed
        return stored or (self._watched is not None and self._watched.changed)

    @property
    def memory(self) -> int:
        """Bytes in memory; those of vectors on disk are not counted."""
        if self._size is None:
            self._size = faiss_content(self.index)[1]
        return self._size + (0 if self._live is None else self._live.nbytes)

    def save(self, folder: Path) -> None:
        """Write files into an empty folder."""
        faiss.write_index(self.index, str(folder / _FILE))
        with (folder / _FILE).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        (folder / _STATE).write_text(json.dumps({"dim": self.index.d, "sha256": digest}))
        if self._live is not None:
            np.save(folder / _LIVE, self._live, allow_pickle=False)
        if self.stored is not None:
            self.stored.save(folder / _STORED)

    @staticmethod
    def dim(folder: Path) -> int:
        """d, of the vectors that were saved to a folder."""
        return int(json.loads((folder / _STATE).read_text())["dim"])

    def load(self, folder: Path) -> None:
        """Hold what was saved to a folder, in place of nothing: an index of the same kind.

        Raises:
            InvalidData, and other exceptions: a file was changed, or is missing.
        """
        path = folder / _FILE
        self._watched = WatchedFile(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != json.loads((folder / _STATE).read_text())["sha256"]:
            raise InvalidData(f"{_FILE} was changed since it was written: build the index again")
        self.index = faiss.read_index(str(path), FLAGS)
        if self.stored is not None:
            self.stored = StoredVectors.load(folder / _STORED, self.stored.vectors.dtype)
        if (folder / _LIVE).is_file():
            self._live = read_array(folder / _LIVE)
