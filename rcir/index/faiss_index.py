"""FAISS's indexes as those of rcir: what all kinds have in common."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData
from rcir.files import read_array
from rcir.index.base import check_vectors
from rcir.index.faiss_file import faiss_content, read_faiss, unmapped
from rcir.stored_vectors import StoredVectors, WatchedFile, batches

_FILE, _STATE, _LIVE, _HALF = "index.faiss", "index.json", "live.npy", "vectors.npy"
logger = logging.getLogger(__name__)
_HELD = 1 << 24  # numbers of candidates that are ranked exactly at a time: 64 MiB of float32


class FaissIndex:
    """An index that FAISS holds, trained on its first vectors.

    A kind says how the index is made (`_made`) and with which parameters it is searched
    (`_parameters`). What is removed stays in FAISS's index and is passed over in every search,
    because HNSW can lose no vector and an inverted list no number: it takes memory until the index
    is built again. An index that was loaded is mapped into memory: processes on one machine share
    it. The logger of this module says how far adding is.

    Attributes:
        options: build and search parameters. Others in their place give another `version`.
    """

    Options: ClassVar[type]

    def __init__(self, dim: int, options: Any) -> None:
        self.options = options
        self.dim = dim
        try:
            self._index: Any = self._made(dim)
        except RuntimeError as error:
            raise InvalidConfig(f"FAISS makes no such index: {_said(error)}") from None
        self._live: NDArray[np.int64] | None = None  # numbers in FAISS, ascending; None: all
        exact = getattr(options, "exact", False)
        self._kept = StoredVectors(dim, np.float16) if exact else None
        self._watched: WatchedFile | None = None  # where FAISS's index is mapped into memory
        self._content: tuple[str, int] | None = None

    def _made(self, dim: int) -> Any:
        """An empty index of FAISS for vectors of d numbers."""
        raise NotImplementedError

    def _parameters(self, k: int, selector: Any) -> Any:
        """FAISS's search parameters for k candidates, among those that a selector takes."""
        raise NotImplementedError

    def _needed(self) -> int:
        """The fewest vectors that FAISS trains on."""
        return 0

    def _before_adding(self) -> None:
        """Make what comes next depend on nothing that a file of the index does not hold."""

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: Any) -> Self:
        if not isinstance(vectors, np.ndarray):
            vectors = check_vectors(vectors)
        index = cls(check_vectors(vectors[:1]).shape[1], options)
        index.add(vectors)
        return index

    def searching(self, **parameters: Any) -> Self:
        """The same index with other search parameters, sharing all that it holds.

        Raises:
            InvalidConfig: of the parameters.
        """
        other = copy(self)
        other.options = replace(self.options, **parameters)
        return other

    def __copy__(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_watched": None}  # FAISS gives a copy memory of its own

    def __len__(self) -> int:
        return int(self._index.ntotal) if self._live is None else len(self._live)

    def add(self, vectors: NDArray[np.float32]) -> None:
        if not isinstance(vectors, np.ndarray) or vectors.ndim != 2:
            vectors = check_vectors(vectors, self.dim)
        for batch in self._batches(vectors):
            if self._kept is not None:
                self._kept.check(batch)
        if not len(vectors):
            return
        if self._watched is not None:
            self._index, self._watched = unmapped(self._index), None
        if not self._index.is_trained:
            self._train(vectors)
        first = int(self._index.ntotal)
        for batch in self._batches(vectors):
            self._before_adding()
            self._add(batch)
            if self._kept is not None:
                self._kept.append(batch)
            done = int(self._index.ntotal) - first
            logger.info("%s of %s vectors added", f"{done:,}", f"{len(vectors):,}")
        if self._live is not None:
            self._live = np.append(self._live, np.arange(first, self._index.ntotal))
        self._content = None

    def _add(self, batch: NDArray[np.float32]) -> None:
        self._index.add(batch)

    def _batches(self, vectors: NDArray[Any]) -> Iterator[NDArray[np.float32]]:
        if not len(vectors):
            check_vectors(vectors, self.dim)
        for rows in batches(len(vectors), self.dim):
            yield check_vectors(vectors[rows], self.dim)

    def _train(self, vectors: NDArray[np.float32]) -> None:
        """On a sample drawn with the seed; of fewer vectors than are needed some come again."""
        options, needed = self.options, self._needed()
        rng = np.random.default_rng(options.random_seed)
        size = max(min(options.train_size, len(vectors)), needed)
        rows = rng.choice(len(vectors), size, replace=size > len(vectors))
        try:
            self._index.train(check_vectors(vectors[np.sort(rows)], self.dim))
        except RuntimeError as error:
            raise InvalidConfig(
                f"FAISS cannot train such an index on {size} vectors: {_said(error)}"
            ) from None

    def remove(self, positions: NDArray[np.int64]) -> None:
        if not len(positions):
            return
        live = np.arange(self._index.ntotal) if self._live is None else self._live
        self._live = np.delete(live, positions)
        self._content = None

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        queries = check_vectors(vectors, self.dim)
        if not len(self):
            shape = (len(queries), k)
            return np.full(shape, np.inf, np.float32), np.full(shape, -1, np.int64)
        fetched = k
        if self._kept is not None:
            fetched = min(max(k, round(k * self.options.k_factor)), int(self._index.ntotal))
            fetched = max(k, fetched)
        selector = None
        if self._live is not None:
            mask = np.zeros(self._index.ntotal, bool)
            mask[self._live] = True
            selector = faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        try:
            # `faiss.contrib.torch_utils` puts a method without `params` in the place of this one.
            search = getattr(self._index, "search_numpy", self._index.search)
            squared, found = search(queries, fetched, params=self._parameters(fetched, selector))
        except RuntimeError as error:
            raise InvalidConfig(
                f"FAISS cannot search this index so: {_said(error)}; where vectors were removed, "
                "build it again"
            ) from None
        if self._kept is not None:
            squared, found = self._ranked(queries, found, k)
        if found[:, -1].min(initial=0) < 0:
            squared[found < 0] = np.inf
        if self._live is not None:
            found = np.where(found < 0, -1, np.searchsorted(self._live, found))
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), found

    def _ranked(
        self, queries: NDArray[np.float32], found: NDArray[np.int64], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Squared distances to the vectors themselves, and positions, of the nearest k found."""
        assert self._kept is not None
        squared = np.empty((len(found), k), np.float32)
        nearest = np.empty((len(found), k), np.int64)
        step = max(1, _HELD // (found.shape[1] * self.dim))
        for start in range(0, len(found), step):
            rows = slice(start, start + step)
            near = np.asarray(self._kept.vectors)[np.maximum(found[rows], 0)]
            candidates = near.astype(np.float32)
            candidates -= queries[rows, None]
            exact = np.einsum("ncd,ncd->nc", candidates, candidates)
            exact[found[rows] < 0] = np.inf
            order = np.argsort(exact, axis=1, kind="stable")[:, :k]
            squared[rows] = np.take_along_axis(exact, order, axis=1)
            nearest[rows] = np.take_along_axis(found[rows], order, axis=1)
        return squared, nearest

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """(m, d) vectors at positions (m,): as they were given, in half precision where these are
        kept, decoded where codes are all that is kept.
        """
        numbers = np.asarray(positions, np.int64)
        if self._live is not None:
            numbers = self._live[numbers]
        if self._kept is not None:
            return np.asarray(self._kept.vectors)[numbers].astype(np.float32)
        try:
            found: NDArray[np.float32] = self._index.reconstruct_batch(numbers.ravel())
        except RuntimeError as error:
            raise InvalidConfig(f"this index gives no vectors back: {_said(error)}") from None
        return found.reshape(*numbers.shape, self.dim)

    @property
    def version(self) -> str:
        """A digest of what FAISS holds, of what was removed, and of all options; none that was
        ever before where somebody wrote to the files that it was loaded from.
        """
        if self._written_to:
            return f"written to {secrets.token_hex()}"
        described = json.dumps([type(self).__name__, self.dim, asdict(self.options)])
        return hashlib.sha256(f"{described} {self._contents()[0]}".encode()).hexdigest()

    @property
    def _written_to(self) -> bool:
        kept = self._kept is not None and self._kept.changed
        return kept or (self._watched is not None and self._watched.changed)

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory; those of vectors on disk are not counted."""
        return self._contents()[1]

    def _contents(self) -> tuple[str, int]:
        if self._content is None:
            digest, size = faiss_content(self._index)
            if self._live is not None:
                digest += hashlib.sha256(self._live.data).hexdigest()
                size += self._live.nbytes
            if self._kept is not None:
                digest += self._kept.digest()
            self._content = digest, size
        return self._content

    def save(self, folder: Path) -> None:
        faiss.write_index(self._index, str(folder / _FILE))
        with (folder / _FILE).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        (folder / _STATE).write_text(json.dumps({"dim": self.dim, "sha256": digest}))
        if self._live is not None:
            np.save(folder / _LIVE, self._live, allow_pickle=False)
        if self._kept is not None:
            self._kept.save(folder / _HALF)

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        state = json.loads((folder / _STATE).read_text())
        read, watched = read_faiss(folder / _FILE, state["sha256"])
        made = cls(state["dim"], options)
        if type(read) is not type(made._index) or (read.d, read.metric_type) != (
            made.dim,
            faiss.METRIC_L2,
        ):
            raise InvalidData(f"{_FILE} holds another index than that of its options: build again")
        made._index, made._watched = read, watched
        if (folder / _LIVE).is_file():
            made._live = _numbers(read_array(folder / _LIVE), int(read.ntotal))
        if made._kept is not None:
            made._kept = StoredVectors.load(folder / _HALF, np.float16)
            if made._kept.dim != made.dim or len(made._kept) != read.ntotal:
                raise InvalidData(f"{_HALF} and {_FILE} do not hold the same vectors")
        return made


def _numbers(live: NDArray[Any], n: int) -> NDArray[np.int64]:
    """Numbers of vectors, checked: ascending, each there."""
    if live.dtype != np.int64 or live.ndim != 1 or (np.diff(live) <= 0).any():
        raise InvalidData(f"{_LIVE} does not hold ascending numbers of vectors")
    if len(live) and not 0 <= live[0] <= live[-1] < n:
        raise InvalidData(f"{_LIVE} holds numbers of vectors that are not there")
    found: NDArray[np.int64] = live
    return found


def _said(error: RuntimeError) -> str:
    """The words of FAISS on an error, without the place in its source."""
    return str(error).split(" at ")[0].rpartition("Error: ")[2][:200] or str(error)[:200]
