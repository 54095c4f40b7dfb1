"""Vectors in an index of FAISS, and their files; `rcir.index.faiss_kinds` has its kinds."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.files import checksum, read_array
from rcir.index.base import Neighbours, check_vectors, no_neighbours, require_range
from rcir.index.flat import search_by_subtraction
from rcir.index.gpu import draw_sample
from rcir.stored_vectors import StoredVectors, WatchedFile, batches
from rcir.terminal import working

INDEX_FILE, STATE_FILE = "index.faiss", "index.json"
LIVE_FILE, STORED_FILE = "live.npy", "vectors.npy"
# A mapped file is shared by the processes that read it.
MAPPED_FLAGS = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
COPIED_FLAGS = faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
RANKED_NUMBERS = 1 << 24  # numbers of candidates that are ranked at a time: 64 MiB of float32
WIDEST_SEARCH = {"nprobe": math.inf, "efSearch": math.inf}
RANGES: dict[str, tuple[float, float]] = {
    **{"M": (2, 256), "ef_construction": (1, 1 << 16), "ef_search": (1, 1 << 20)},
    **{"nlist": (1, 1 << 20), "nprobe": (1, 1 << 20), "m": (1, 1 << 14), "nbits": (4, 12)},
    **{"k_factor": (1, 1000), "train_size": (1, 1 << 30), "random_seed": (0, (1 << 31) - 1)},
}
# The place in FAISS's source, and the condition that failed, which precede its message.
MESSAGE_PREFIX = re.compile(r"^Error in .*? at \S+:\d+: (Error: '.*?' failed: ?)?", re.DOTALL)
logger = logging.getLogger(__name__)
# By FAISS's default, the distances of a batch to all codes of long vectors would take gigabytes.
faiss.cvar.product_quantizer_compute_codes_bs = 4096


class FaissOptions:
    """Options of a FAISS index, which are the fields of a subclass, within `RANGES`."""

    exact = False  # True: vectors on disk rank the candidates
    least_to_train = 0  # vectors to train on at least, besides one for each list
    train_size: int
    random_seed: int

    def __post_init__(self) -> None:
        require_range(self, **{name: RANGES[name] for name in vars(self) if name in RANGES})

    def factory_string(self) -> str:
        """Return the string of `faiss.index_factory`."""
        raise NotImplementedError

    def search_parameters(self) -> dict[str, float]:
        """Return search parameters by FAISS's names; others have FAISS's values."""
        raise NotImplementedError

    def configure(self, index: Any) -> None:
        """Set what the string cannot express, as attributes of a new index of FAISS."""


class FaissIndex:
    """An index in FAISS, trained on a sample of the first vectors that are added.

    FAISS numbers vectors, and cannot delete them from all kinds: a removed vector is skipped in
    every search, and takes memory until the index is built again. A loaded index is mapped into
    memory, so that processes on one machine share it; copies share it, and the vectors on disk,
    until they grow. This module's logger reports the progress of `add`.
    """

    Options: ClassVar[type[FaissOptions]]

    def __init__(self, dim: int, options: Any) -> None:
        self.options, self.dim = options, dim
        # The vectors by number, in half precision on disk.
        self._stored = StoredVectors(dim, np.float16) if options.exact else None
        self._live: NDArray[np.int64] | None = None  # numbers not removed, ascending; None: all
        self._selector: Any = None  # of these
        self._watched: WatchedFile | None = None  # the file that the index is mapped from
        self._shared = False  # True: it is mapped, or copies have the same index of FAISS
        self._digests: dict[str, str] = {}  # of its parts, until they change
        factory = options.factory_string()
        with _faiss_errors(f"FAISS cannot create {factory!r} for vectors of {dim} numbers"):
            self._index = faiss.index_factory(dim, factory, faiss.METRIC_L2)
        lists = faiss.try_extract_index_ivf(self._index)
        if lists is not None and self._stored is None:
            lists.set_direct_map_type(faiss.DirectMap.Array)  # needed to return vectors
        options.configure(self._index)
        unused = options.search_parameters()
        _faiss_parameters(self._index, 1, None, unused)
        if unused:
            raise InvalidConfig(
                f"{factory!r} has no search parameter {', '.join(unused)}: "
                "lists have nprobe and max_codes (and quantizer_efSearch where a graph selects "
                "them), graphs efSearch, refined indexes k_factor"
            )

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: Any) -> Self:
        if not isinstance(vectors, np.ndarray):
            vectors = check_vectors(vectors)
        index = cls(check_vectors(vectors[:1]).shape[1], options)
        index.add(vectors)
        return index

    def __copy__(self) -> Self:
        return deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._shared = True
        shared = (self._index, self._stored, self._live, self._selector, self._watched)
        memo.update((id(part), part) for part in shared)
        other = type(self).__new__(type(self))
        other.__dict__.update(deepcopy(self.__dict__, memo))
        return other

    def __getstate__(self) -> dict[str, Any]:
        # A pickle does not depend on the file that the index is mapped from.
        state = self.__dict__ | {"_watched": None, "_shared": False, "_selector": None}
        return state | {"_digests": {}, "_index": faiss.serialize_index(self._index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        reader = faiss.VectorIOReader()
        faiss.copy_array_to_vector(state["_index"], reader.data)
        self.__dict__.update(state | {"_index": faiss.read_index(reader, COPIED_FLAGS)})

    def __len__(self) -> int:
        return int(self._index.ntotal) if self._live is None else len(self._live)

    def add(self, vectors: NDArray[np.float32]) -> None:
        if not isinstance(vectors, np.ndarray) or vectors.ndim != 2:
            vectors = check_vectors(vectors, self.dim)
        for batch in self._batches(vectors):
            if self._stored is not None:
                self._stored.check(batch)
        if not len(vectors):
            return
        self._stop_sharing()
        if not self._index.is_trained:
            self._train(vectors)
        first = int(self._index.ntotal)
        try:
            with working("adding vectors to the index", len(vectors)) as work:
                for batch in self._batches(vectors):
                    if isinstance(self._index, faiss.IndexHNSW):
                        # FAISS's files lack the state of this generator: an index that was saved
                        # and loaded in between must grow to the same graph.
                        self._index.hnsw.rng = faiss.RandomGenerator(int(self._index.ntotal))
                    if self._stored is not None:
                        self._stored.append(batch)
                    with _faiss_errors("FAISS cannot add vectors to this index"):
                        self._add(batch)
                    done = int(self._index.ntotal) - first
                    logger.info("%s of %s vectors added", f"{done:,}", f"{len(vectors):,}")
                    work.advance(len(batch))
        except BaseException:  # what was added is skipped
            self._set_live(np.arange(first) if self._live is None else self._live)
            if self._stored is not None:
                self._stored.vectors = self._stored.vectors[: self._index.ntotal]
            raise
        finally:
            self._digests = {}
        if self._live is not None:
            self._set_live(np.append(self._live, np.arange(first, self._index.ntotal)))

    def _add(self, batch: NDArray[np.float32]) -> None:
        self._index.add(batch)

    def _batches(self, vectors: NDArray[Any]) -> Iterator[NDArray[np.float32]]:
        if not len(vectors):
            check_vectors(vectors, self.dim)
        for rows in batches(len(vectors), self.dim):
            yield check_vectors(vectors[rows], self.dim, first=rows.start)

    def _train(self, vectors: NDArray[np.float32]) -> None:
        lists = faiss.try_extract_index_ivf(self._index)
        least = max(self.options.least_to_train, 0 if lists is None else int(lists.nlist))
        sample = check_vectors(draw_sample(vectors, self.options, least), self.dim)
        if isinstance(lists := faiss.downcast_index(lists), faiss.IndexIVFPQ):
            # Tables for codes of residuals would take nlist m 2^nbits numbers, more than the codes.
            # Files lack them, and distances are rounded differently without them.
            lists.use_precomputed_table = -1
        with _faiss_errors(f"FAISS cannot train this index on {len(sample)} vectors"):
            self._index.train(sample)

    def _stop_sharing(self) -> None:
        """Copy a shared index into memory: to add to a mapped one would end the process."""
        if not self._shared:
            return
        with tempfile.TemporaryFile() as file:  # unnamed, so that a killed process leaves no file
            path = f"/dev/fd/{file.fileno()}"
            faiss.write_index(self._index, path)
            file.seek(0)
            self._index = faiss.read_index(path, COPIED_FLAGS)
        self._stored = copy(self._stored)
        self._shared, self._watched, self._digests = False, None, {}

    def _set_live(self, live: NDArray[np.int64] | None) -> None:
        self._live, self._selector = live, None
        self._digests = {name: value for name, value in self._digests.items() if name != "live"}

    def _select(self, live: NDArray[np.int64]) -> Any:
        """Return FAISS's selector of numbers."""
        mask = np.zeros(self._index.ntotal, bool)
        mask[live] = True
        return faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))

    def remove(self, positions: NDArray[np.int64]) -> None:
        """See `Index.remove`.

        Raises:
            InvalidConfig: FAISS cannot skip vectors in an index of this kind; nothing changed.
        """
        if not len(positions):
            return
        live = np.arange(self._index.ntotal) if self._live is None else self._live
        live = np.delete(live, positions)
        with _faiss_errors(
            "nothing can be removed from an index of this kind: build it again without these "
            "vectors, or choose another kind"
        ):
            self._nearest(np.zeros((1, self.dim), np.float32), 1, self._select(live))
        self._set_live(live)

    def search(self, vectors: NDArray[np.float32], k: int) -> Neighbours:
        """See `Index.search`. If everything in the lists or the part of the graph that a query
        visits was removed, the query is searched again, as widely as possible.

        Raises:
            StaleCalibration: the files that it was loaded from were written to.
            InvalidConfig: FAISS cannot search it with these parameters.
        """
        queries = check_vectors(vectors, self.dim)
        if self._changed:
            raise StaleCalibration(
                "another process wrote to the files of the index after it was loaded: load it again"
            )
        if not len(self) or not k:
            return no_neighbours(len(queries), k)
        if self._live is not None and self._selector is None:
            self._selector = self._select(self._live)
        with _faiss_errors("FAISS cannot search this index with these parameters"):
            squared, numbers = self._nearest(queries, k, self._selector)
            empty = numbers[:, 0] < 0
            if empty.any():
                squared[empty], numbers[empty] = self._nearest(
                    queries[empty], k, self._selector, WIDEST_SEARCH
                )
        squared[numbers < 0] = np.inf
        if self._live is not None:
            numbers = np.where(numbers < 0, -1, np.searchsorted(self._live, numbers))
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), numbers

    def _nearest(
        self,
        queries: NDArray[np.float32],
        k: int,
        selector: Any,
        parameters: dict[str, float] | None = None,
    ) -> Neighbours:
        """Return squared distances and numbers of the nearest vectors that a selector includes."""
        fetched = k
        if self._stored is not None:
            fetched = max(k, min(round(k * self.options.k_factor), int(self._index.ntotal)))
        # `faiss.contrib.torch_utils` replaces `search` by a method without `params`.
        search = getattr(self._index, "search_numpy", self._index.search)
        chosen = dict(parameters or self.options.search_parameters())
        params = _faiss_parameters(self._index, fetched, selector, chosen)
        # The matrix product of a transform (PCA, OPQ) rounds differently in a batch.
        transforms = isinstance(faiss.downcast_index(self._index), faiss.IndexPreTransform)
        squared, numbers = search_by_subtraction(
            lambda batch: search(batch, fetched, params=params),
            queries,
            largest=1 if transforms else None,
        )
        return (squared, numbers) if self._stored is None else self._rank(queries, numbers, k)

    def _rank(
        self, queries: NDArray[np.float32], candidates: NDArray[np.int64], k: int
    ) -> Neighbours:
        """Return the nearest k candidates by squared distances to the stored vectors."""
        assert self._stored is not None
        stored = np.asarray(self._stored.vectors)
        squared = np.empty((len(candidates), k), np.float32)
        numbers = np.empty((len(candidates), k), np.int64)
        step = max(1, RANKED_NUMBERS // (candidates.shape[1] * self.dim))
        for start in range(0, len(candidates), step):
            rows = slice(start, start + step)
            block = candidates[rows]
            differences = stored[np.maximum(block, 0)].astype(np.float32)
            differences -= queries[rows, None]
            exact = np.einsum("ncd,ncd->nc", differences, differences)
            exact[block < 0] = np.inf
            order = np.argsort(exact, axis=1, kind="stable")[:, :k]
            squared[rows] = np.take_along_axis(exact, order, axis=1)
            numbers[rows] = np.take_along_axis(block, order, axis=1)
        return squared, numbers

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Index.vectors_at`: in half precision if on disk, decoded if only codes are kept."""
        numbers = np.asarray(positions, np.int64)
        if self._live is not None:
            numbers = self._live[numbers]
        if self._stored is not None:
            return np.asarray(self._stored.vectors)[numbers].astype(np.float32)
        with _faiss_errors("this index cannot return vectors"):
            vectors: NDArray[np.float32] = self._index.reconstruct_batch(numbers.ravel())
        return vectors.reshape(*numbers.shape, self.dim)

    @property
    def lossy(self) -> bool:
        """True if the vectors that it returns have less than half precision."""
        if self._stored is not None:
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
        """A digest of the contents and all options; a new one each time if files were changed."""
        contents = [secrets.token_hex()] if self._changed else self.digests()
        described = json.dumps([type(self).__name__, self.dim, asdict(self.options), contents])
        return hashlib.sha256(described.encode()).hexdigest()

    def digests(self) -> list[str]:
        """See `KeepsDigests`: of FAISS's index, stored vectors, and what was not removed."""
        digests = {} if self._changed else self._digests
        if "index" not in digests:
            digests["index"] = _describe_file(self._index)[0]
        if self._stored is not None and "stored" not in digests:
            digests["stored"] = self._stored.digest()
        if self._live is not None and "live" not in digests:
            digests["live"] = hashlib.sha256(self._live.data).hexdigest()
        return list(digests.values())

    def restore_digests(self, digests: list[str]) -> None:
        """See `KeepsDigests`."""
        parts = {"index": self._index, "stored": self._stored, "live": self._live}
        names = [name for name, part in parts.items() if part is not None]
        if len(digests) != len(names):
            raise InvalidData(f"got {len(digests)} digests, expected {len(names)}")
        self._digests = dict(zip(names, digests, strict=True))

    @property
    def memory(self) -> int:
        """Bytes in memory, without those of vectors on disk."""
        return _describe_file(self._index)[1] + (0 if self._live is None else self._live.nbytes)

    @property
    def _changed(self) -> bool:
        """True if somebody wrote to the files that it was loaded from."""
        stored = self._stored is not None and self._stored.changed
        return stored or (self._watched is not None and self._watched.changed)

    def save(self, folder: Path) -> None:
        faiss.write_index(self._index, str(folder / INDEX_FILE))
        state = {"dim": self.dim, "sha256": checksum(folder / INDEX_FILE)}
        (folder / STATE_FILE).write_text(json.dumps(state))
        if self._live is not None:
            np.save(folder / LIVE_FILE, self._live, allow_pickle=False)
        if self._stored is not None:
            self._stored.save(folder / STORED_FILE)

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        path, state = folder / INDEX_FILE, json.loads((folder / STATE_FILE).read_text())
        index = cls(int(state["dim"]), options)
        index._watched, index._shared = WatchedFile(path), True
        if checksum(path) != state["sha256"]:
            raise InvalidData(
                f"{INDEX_FILE} was changed since it was written: build the index again"
            )
        index._index = faiss.read_index(str(path), MAPPED_FLAGS)
        if index._stored is not None:
            index._stored = StoredVectors.load(folder / STORED_FILE, np.float16)
        if (folder / LIVE_FILE).is_file():
            index._live = read_array(folder / LIVE_FILE)
        return index


@contextmanager
def _faiss_errors(message: str) -> Iterator[None]:
    """Raise an error of FAISS as `InvalidConfig`, without the place in FAISS's source."""
    try:
        yield
    except RuntimeError as error:
        reason = MESSAGE_PREFIX.sub("", str(error)) or str(error)
        raise InvalidConfig(f"{message} ({reason[:200]})") from None


def _faiss_parameters(index: Any, k: int, selector: Any, chosen: dict[str, float]) -> Any:
    """Return FAISS's search parameters, of a type for each kind of index.

    Those of `chosen` that the index has are removed from it.
    """
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = _faiss_parameters(index.index, k, selector, chosen)
        return None if inner is None else faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        factor = chosen.pop("k_factor", index.k_factor)
        inner = _faiss_parameters(index.base_index, round(k * factor), selector, chosen)
        return faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        nprobe = min(chosen.pop("nprobe", index.nprobe), index.nlist)
        parameters = {"nprobe": nprobe, "max_codes": chosen.pop("max_codes", index.max_codes)}
        graph = isinstance(faiss.downcast_index(index.quantizer), faiss.IndexHNSW)
        if graph and "quantizer_efSearch" in chosen:
            ef_search = max(chosen.pop("quantizer_efSearch"), nprobe)
            parameters["quantizer_params"] = faiss.SearchParametersHNSW(efSearch=ef_search)
        return faiss.SearchParametersIVF(sel=selector, **parameters)
    if isinstance(index, faiss.IndexHNSW):
        ef_search = min(chosen.pop("efSearch", index.hnsw.efSearch), max(int(index.ntotal), 1))
        return faiss.SearchParametersHNSW(efSearch=max(ef_search, k), sel=selector)
    return None if selector is None else faiss.SearchParameters(sel=selector)


def _describe_file(index: Any) -> tuple[str, int]:
    """Return SHA-256 and size in bytes of the file that FAISS would write of an index."""
    digest, size = hashlib.sha256(), 0

    def write(part: bytes) -> None:
        nonlocal size
        digest.update(part)
        size += len(part)

    faiss.write_index(index, faiss.PyCallbackIOWriter(write, 1 << 20))
    return digest.hexdigest(), size
