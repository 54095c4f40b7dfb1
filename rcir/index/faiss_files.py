"""Contents of the indexes of FAISS, and their files."""

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
# A mapped file is shared by the processes that read it.
FLAGS = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE


def faiss_content(index: Any) -> tuple[str, int]:
    """Return SHA-256 and size in bytes of the file that FAISS would write of an index."""
    digest, size = hashlib.sha256(), 0

    def write(part: bytes) -> None:
        nonlocal size
        digest.update(part)
        size += len(part)

    faiss.write_index(index, faiss.PyCallbackIOWriter(write, 1 << 20))
    return digest.hexdigest(), size


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FaissContents:
    """Vectors by number in an index of FAISS; removed vectors have no position.

    FAISS cannot delete from HNSW, nor renumber lists: removed vectors stay and are skipped in every
    search. Indexes with different search parameters share their contents.

    Attributes:
        index: of FAISS; search parameters are never set on it.
        stored: the same vectors by number, in half precision on disk; None if they are not kept.
    """

    def __init__(self, index: Any, stored: StoredVectors | None) -> None:
        self.index, self.stored = index, stored
        self._live: NDArray[np.int64] | None = None  # numbers not removed, ascending; None: all
        self._selector: Any = None  # of these
        self._watched: WatchedFile | None = None  # the file that the index is mapped from
        # Caches: of FAISS's index and the stored vectors until `grow`, of `_live` until it changes.
        self._digests: list[str] | None = None
        self._size: int | None = None
        self._live_digest: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy is in memory.
        return self.__dict__ | dict.fromkeys(("_watched", "_selector", "_digests", "_size"))

    def __len__(self) -> int:
        return int(self.index.ntotal) if self._live is None else len(self._live)

    @property
    def selector(self) -> Any:
        """FAISS's selector of vectors that were not removed; None if none was."""
        if self._selector is None and self._live is not None:
            self._selector = self._select(self._live)
        return self._selector

    def selector_without(self, positions: NDArray[np.int64]) -> Any:
        """Return the selector after a removal of positions."""
        return self._select(self._numbers_without(positions))

    def _select(self, live: NDArray[np.int64]) -> Any:
        mask = np.zeros(self.index.ntotal, bool)
        mask[live] = True
        return faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))

    def _numbers_without(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        numbers = np.arange(self.index.ntotal) if self._live is None else self._live
        return np.delete(numbers, positions)

    def remove(self, positions: NDArray[np.int64]) -> None:
        """Skip the vectors at positions from now on."""
        self._set_live(self._numbers_without(positions))

    def grow(self, first: int, keep: bool = True) -> None:
        """Give positions to the numbers from the first one on, or skip them from now on."""
        self._digests = self._size = None
        live = self._live
        if live is not None or not keep:
            if self.stored is not None:
                self.stored.vectors = self.stored.vectors[: self.index.ntotal]
            new = np.arange(first, self.index.ntotal if keep else first)
            live = np.append(np.arange(first) if live is None else live, new)
        self._set_live(live)

    def _set_live(self, live: NDArray[np.int64] | None) -> None:
        self._live, self._selector, self._live_digest = live, None, None

    def positions(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of numbers that were not removed; -1 remains -1."""
        if self._live is None:
            return numbers
        return np.where(numbers < 0, -1, np.searchsorted(self._live, numbers))

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return stored or decoded vectors (..., d); RuntimeError if FAISS cannot decode them."""
        numbers = np.asarray(positions, np.int64)
        if self._live is not None:
            numbers = self._live[numbers]
        if self.stored is not None:
            return np.asarray(self.stored.vectors)[numbers].astype(np.float32)
        vectors: NDArray[np.float32] = self.index.reconstruct_batch(numbers.ravel())
        return vectors.reshape(*numbers.shape, self.index.d)

    def unmap(self) -> None:
        """Copy a mapped index into memory: FAISS ends a process that adds to a mapped one."""
        if self._watched is None:
            return
        with tempfile.TemporaryFile() as file:  # unnamed, so that a killed process leaves no file
            path = f"/dev/fd/{file.fileno()}"
            faiss.write_index(self.index, path)
            file.seek(0)
            self.index = faiss.read_index(path, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)
        self._watched = self._digests = self._size = None

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
        """True if somebody wrote to the files that it was loaded from."""
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
        state = {"dim": self.index.d, "sha256": _file_digest(folder / _FILE)}
        (folder / _STATE).write_text(json.dumps(state))
        if self._live is not None:
            np.save(folder / _LIVE, self._live, allow_pickle=False)
        if self.stored is not None:
            self.stored.save(folder / _STORED)

    @staticmethod
    def dim(folder: Path) -> int:
        """Return d of the vectors that were saved to a folder."""
        return int(json.loads((folder / _STATE).read_text())["dim"])

    def load(self, folder: Path) -> None:
        """Read what was saved to a folder into the empty contents of an index of this kind."""
        path = folder / _FILE
        self._watched = WatchedFile(path)
        if _file_digest(path) != json.loads((folder / _STATE).read_text())["sha256"]:
            raise InvalidData(f"{_FILE} was changed since it was written: build the index again")
        self.index = faiss.read_index(str(path), FLAGS)
        if self.stored is not None:
            self.stored = StoredVectors.load(folder / _STORED, self.stored.vectors.dtype)
        if (folder / _LIVE).is_file():
            self._live = read_array(folder / _LIVE)
