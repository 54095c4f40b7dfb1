"""FAISS's indexes as those of rcir: what all kinds have in common."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, StaleCalibration
from rcir.index.base import check_vectors
from rcir.index.exact import by_subtraction
from rcir.index.faiss_contents import FaissContents
from rcir.options import require_options
from rcir.stored_vectors import StoredVectors, batches

logger = logging.getLogger(__name__)
# Before its words FAISS says where in its source, and which condition, failed.
_PLACE = re.compile(r"^Error in .*? at \S+:\d+: (Error: '.*?' failed: ?)?", re.DOTALL)
_HELD = 1 << 24  # numbers of candidates that are ranked exactly at a time: 64 MiB of float32


class FaissIndex:
    """An index that FAISS holds, trained on a sample of its first vectors.

    A kind says how the index is made (`_made`) and with which parameters it is searched
    (`_parameters`). What is removed takes memory until the index is built again. An index that was
    loaded is mapped into memory: processes on one machine share it. The logger of this module says
    how far adding is.

    Attributes:
        options: build and search parameters. Others in their place give another `version`.
        SEARCHED: names of the search parameters.
    """

    Options: ClassVar[type]
    SEARCHED: ClassVar[tuple[str, ...]]

    def __init__(self, dim: int, options: Any) -> None:
        self.options = options
        self.dim = dim
        exact = getattr(options, "exact", False)
        stored = StoredVectors(dim, np.float16) if exact else None
        try:
            self._contents = FaissContents(self._made(dim), stored)
        except RuntimeError as error:
            raise InvalidConfig(f"FAISS makes no such index: {_said(error)}") from None

    def _made(self, dim: int) -> Any:
        """An empty index of FAISS for vectors of d numbers."""
        raise NotImplementedError

    def _parameters(self, k: int, selector: Any, widest: bool) -> Any:
        """FAISS's search parameters for k candidates, among those that a selector takes; those that
        find all there are, where nothing was found.
        """
        raise NotImplementedError

    def _needed(self) -> int:
        """The fewest vectors that FAISS trains on."""
        return 0

    def _before_adding(self) -> None:
        """Make what comes next depend on nothing that a file of the index does not hold."""

    @property
    def _index(self) -> Any:
        return self._contents.index

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
        if other := [name for name in parameters if name not in self.SEARCHED]:
            raise InvalidConfig(
                f"there is no search parameter {', '.join(other)}; there are "
                f"{', '.join(self.SEARCHED)}"
            )
        require_options("search parameters", self.Options, parameters)
        sharing = copy(self)
        sharing.options = replace(self.options, **parameters)
        return sharing

    def __len__(self) -> int:
        return len(self._contents)

    def add(self, vectors: NDArray[np.float32]) -> None:
        if not isinstance(vectors, np.ndarray) or vectors.ndim != 2:
            vectors = check_vectors(vectors, self.dim)
        contents = self._contents
        for batch in self._batches(vectors):
            if contents.stored is not None:
                contents.stored.check(batch)
        if not len(vectors):
            return
        contents.own()
        if not self._index.is_trained:
            self._train(vectors)
        first = int(self._index.ntotal)
        try:
            for batch in self._batches(vectors):
                self._before_adding()
                if contents.stored is not None:
                    contents.stored.append(batch)
                self._add(batch)
                done = int(self._index.ntotal) - first
                logger.info("%s of %s vectors added", f"{done:,}", f"{len(vectors):,}")
        except BaseException as error:
            contents.grown(first, kept=False)
            if isinstance(error, RuntimeError):
                said = f"FAISS adds nothing to this index: {_said(error)}"
                raise InvalidConfig(said) from None
            raise
        contents.grown(first)

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
        """See `Index.remove`.

        Raises:
            InvalidConfig: FAISS passes over no vectors in an index of this kind; nothing changed.
        """
        if not len(positions):
            return
        zero = np.zeros((1, self.dim), np.float32)
        try:
            self._searched(zero, 1, self._contents.without(positions))
        except InvalidConfig as error:
            raise InvalidConfig(
                f"{error}: nothing can be removed from an index of this kind; build it anew "
                "without these vectors, or take another"
            ) from None
        self._contents.remove(positions)

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `Index.search`. A query that finds nothing so, because all that its lists or its way
        through the graph hold was removed, is searched as widely as can be.

        Raises:
            StaleCalibration: somebody wrote to the files that it was loaded from.
            InvalidConfig: FAISS cannot search it with these parameters.
        """
        queries = check_vectors(vectors, self.dim)
        if self._contents.changed:
            raise StaleCalibration(
                "somebody wrote to the files that the index was loaded from: load it again"
            )
        if not len(self) or not k:
            shape = (len(queries), k)
            return np.full(shape, np.inf, np.float32), np.full(shape, -1, np.int64)
        selector = self._contents.selector
        squared, found = self._searched(queries, k, selector)
        if found[:, 0].min(initial=0) < 0:
            none = found[:, 0] < 0
            squared[none], found[none] = self._searched(queries[none], k, selector, widest=True)
        if found[:, -1].min(initial=0) < 0:
            squared[found < 0] = np.inf
        found = self._contents.positions(found)
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), found

    def _searched(
        self, queries: NDArray[np.float32], k: int, selector: Any, widest: bool = False
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Squared distances and numbers of the nearest that a selector takes."""
        fetched = k
        if self._contents.stored is not None:
            fetched = max(k, min(round(k * self.options.k_factor), int(self._index.ntotal)))
        try:
            # `faiss.contrib.torch_utils` puts a method without `params` in the place of this one.
            search = getattr(self._index, "search_numpy", self._index.search)
            parameters = self._parameters(fetched, selector, widest)
            # The matrix product of a transform (PCA, OPQ) rounds differently in a batch.
            transforms = isinstance(faiss.downcast_index(self._index), faiss.IndexPreTransform)
            squared, found = by_subtraction(
                lambda batch: search(batch, fetched, params=parameters),
                queries,
                largest=1 if transforms else None,
            )
        except RuntimeError as error:
            raise InvalidConfig(f"FAISS cannot search this index so: {_said(error)}") from None
        if self._contents.stored is not None:
            return self._ranked(self._contents.stored, queries, found, k)
        return squared, found

    def _ranked(
        self,
        stored: StoredVectors,
        queries: NDArray[np.float32],
        found: NDArray[np.int64],
        k: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Squared distances to the vectors themselves, and numbers, of the nearest k found."""
        squared = np.empty((len(found), k), np.float32)
        nearest = np.empty((len(found), k), np.int64)
        step = max(1, _HELD // (found.shape[1] * self.dim))
        for start in range(0, len(found), step):
            rows = slice(start, start + step)
            near = np.asarray(stored.vectors)[np.maximum(found[rows], 0)]
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
        try:
            return self._contents.vectors_at(positions)
        except RuntimeError as error:
            raise InvalidConfig(f"this index gives no vectors back: {_said(error)}") from None

    @property
    def lossy(self) -> bool:
        """Whether the vectors that it gives back have less than half precision."""
        if self._contents.stored is not None:
            return False
        index = faiss.downcast_index(self._index)
        if isinstance(index, faiss.IndexPreTransform) and index.index.d < self.dim:
            return True
        if isinstance(index, faiss.IndexHNSW):
            index = index.storage
        try:
            return int(index.sa_code_size()) < 2 * self.dim
        except RuntimeError:
            return True

    @property
    def version(self) -> str:
        """A digest of what FAISS holds, of what was removed, and of all options."""
        described = json.dumps([type(self).__name__, self.dim, asdict(self.options)])
        return hashlib.sha256(f"{described} {self._contents.digest}".encode()).hexdigest()

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory; those of vectors on disk are not counted."""
        return self._contents.memory

    def save(self, folder: Path) -> None:
        self._contents.save(folder)

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        made = cls(FaissContents.dim(folder), options)
        made._contents.load(folder)
        return made


def _said(error: RuntimeError) -> str:
    """The words of FAISS on an error, without the place in its source."""
    said = str(error)
    return (_PLACE.sub("", said) or said)[:200]
