"""Indexes of FAISS: presets over `faiss.index_factory`, and any string of it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, StaleCalibration, as_option
from rcir.index.base import Neighbours, check_vectors, no_neighbours, require_range
from rcir.index.faiss_files import FaissContents
from rcir.index.flat import search_by_subtraction
from rcir.index.gpu import configure_clustering, draw_sample, gpu_resources
from rcir.stored_vectors import StoredVectors, batches

logger = logging.getLogger(__name__)
# The place in FAISS's source, and the condition that failed, which precede its message.
_PLACE = re.compile(r"^Error in .*? at \S+:\d+: (Error: '.*?' failed: ?)?", re.DOTALL)
_RANKED_NUMBERS = 1 << 24  # numbers of candidates that are ranked at a time: 64 MiB of float32
SEARCH_PARAMETERS: dict[str, type[int] | type[float]] = {
    **{"nprobe": int, "max_codes": int, "quantizer_efSearch": int},
    **{"efSearch": int, "k_factor": float},
}
RANGES: dict[str, tuple[float, float]] = {
    **{"M": (2, 256), "ef_construction": (1, 1 << 16), "ef_search": (1, 1 << 20)},
    **{"nlist": (1, 1 << 20), "nprobe": (1, 1 << 20), "m": (1, 1 << 14), "nbits": (4, 12)},
    **{"k_factor": (1, 1000), "train_size": (1, 1 << 30), "random_seed": (0, (1 << 31) - 1)},
}
# By FAISS's default, the distances of a batch to all codes of long vectors would take gigabytes.
faiss.cvar.product_quantizer_compute_codes_bs = 4096


class FaissOptions:
    """Options of a FAISS index, which are the fields of a subclass, within `RANGES`.

    A subclass states a string of `faiss.index_factory` and search parameters; `configure` sets
    what the string cannot express.
    """

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
        """Return search parameters by name, of `SEARCH_PARAMETERS`; others have FAISS's values."""
        raise NotImplementedError

    def configure(self, index: Any) -> None:
        """Set attributes of a new index of FAISS."""


class FaissIndex:
    """An index in FAISS, trained on a sample of the first vectors that are added.

    Removed vectors take memory until the index is built again. A loaded index is mapped into
    memory, so that processes on one machine share it. This module's logger reports the progress
    of `add`.

    Attributes:
        options: build and search parameters; other options give another `version`.
    """

    Options: ClassVar[type[FaissOptions]]

    def __init__(self, dim: int, options: Any) -> None:
        self.options, self.dim = options, dim
        stored = StoredVectors(dim, np.float16) if options.exact else None
        factory = options.factory_string()
        with _faiss_errors(f"FAISS cannot create {factory!r} for vectors of {dim} numbers"):
            index = faiss.index_factory(dim, factory, faiss.METRIC_L2)
        lists = faiss.try_extract_index_ivf(index)
        if lists is not None and stored is None:
            lists.set_direct_map_type(faiss.DirectMap.Array)  # needed to return vectors
        options.configure(index)
        self._contents = FaissContents(index, stored)
        unused = options.search_parameters()
        _faiss_parameters(index, 1, None, unused)
        if unused:
            raise InvalidConfig(
                f"{factory!r} has no search parameter {', '.join(unused)}: "
                "lists have nprobe and max_codes (and quantizer_efSearch where a graph selects "
                "them), graphs efSearch, refined indexes k_factor"
            )

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
        contents.unmap()
        if not self._index.is_trained:
            self._train(vectors)
        first = int(self._index.ntotal)
        try:
            for batch in self._batches(vectors):
                if isinstance(self._index, faiss.IndexHNSW):
                    # FAISS's files lack the state of this generator: an index that was saved and
                    # loaded in between must grow to the same graph.
                    self._index.hnsw.rng = faiss.RandomGenerator(int(self._index.ntotal))
                if contents.stored is not None:
                    contents.stored.append(batch)
                with _faiss_errors("FAISS cannot add vectors to this index"):
                    self._add(batch)
                done = int(self._index.ntotal) - first
                logger.info("%s of %s vectors added", f"{done:,}", f"{len(vectors):,}")
        except BaseException:
            contents.grow(first, keep=False)
            raise
        contents.grow(first)

    def _add(self, batch: NDArray[np.float32]) -> None:
        self._index.add(batch)

    def _batches(self, vectors: NDArray[Any]) -> Iterator[NDArray[np.float32]]:
        if not len(vectors):
            check_vectors(vectors, self.dim)
        for rows in batches(len(vectors), self.dim):
            yield check_vectors(vectors[rows], self.dim)

    def _train(self, vectors: NDArray[np.float32]) -> None:
        lists = faiss.try_extract_index_ivf(self._index)
        least = max(self.options.least_to_train, 0 if lists is None else int(lists.nlist))
        sample = check_vectors(draw_sample(vectors, self.options, least), self.dim)
        with _faiss_errors(f"FAISS cannot train this index on {len(sample)} vectors"):
            self._index.train(sample)

    def remove(self, positions: NDArray[np.int64]) -> None:
        """See `Index.remove`.

        Raises:
            InvalidConfig: FAISS cannot skip vectors in an index of this kind; nothing changed.
        """
        if not len(positions):
            return
        with _faiss_errors(
            "nothing can be removed from an index of this kind: build it again without these "
            "vectors, or choose another kind"
        ):
            zero = np.zeros((1, self.dim), np.float32)
            self._nearest(zero, 1, self._contents.selector_without(positions))
        self._contents.remove(positions)

    def search(self, vectors: NDArray[np.float32], k: int) -> Neighbours:
        """See `Index.search`. If everything in the lists or the part of the graph that a query
        visits was removed, the query is searched again, as widely as possible.

        Raises:
            StaleCalibration: the files that it was loaded from were written to.
            InvalidConfig: FAISS cannot search it with these parameters.
        """
        queries = check_vectors(vectors, self.dim)
        if self._contents.changed:
            raise StaleCalibration(
                "somebody wrote to the files that the index was loaded from: load it again"
            )
        if not len(self) or not k:
            return no_neighbours(len(queries), k)
        selector = self._contents.selector
        with _faiss_errors("FAISS cannot search this index with these parameters"):
            squared, numbers = self._nearest(queries, k, selector)
            if numbers[:, 0].min(initial=0) < 0:
                none = numbers[:, 0] < 0
                squared[none], numbers[none] = self._nearest(
                    queries[none], k, selector, widest=True
                )
        if numbers[:, -1].min(initial=0) < 0:
            squared[numbers < 0] = np.inf
        positions = self._contents.positions(numbers)
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), positions

    def _nearest(
        self, queries: NDArray[np.float32], k: int, selector: Any, widest: bool = False
    ) -> Neighbours:
        """Return squared distances and numbers of the nearest vectors that a selector includes."""
        fetched, stored = k, self._contents.stored
        if stored is not None:
            fetched = max(k, min(round(k * self.options.k_factor), int(self._index.ntotal)))
        # `faiss.contrib.torch_utils` replaces `search` by a method without `params`.
        search = getattr(self._index, "search_numpy", self._index.search)
        parameters = self._parameters(fetched, selector, widest)
        # The matrix product of a transform (PCA, OPQ) rounds differently in a batch.
        transforms = isinstance(faiss.downcast_index(self._index), faiss.IndexPreTransform)
        squared, numbers = search_by_subtraction(
            lambda batch: search(batch, fetched, params=parameters),
            queries,
            largest=1 if transforms else None,
        )
        return (squared, numbers) if stored is None else _rank(stored, queries, numbers, k)

    def _parameters(self, k: int, selector: Any, widest: bool = False) -> Any:
        chosen = {} if widest else self.options.search_parameters()
        return _faiss_parameters(self._index, k, selector, chosen, widest)

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors (m, d) at positions (m,): in half precision if they are on disk,
        decoded if only codes are kept.
        """
        with _faiss_errors("this index cannot return vectors"):
            return self._contents.vectors_at(positions)

    @property
    def lossy(self) -> bool:
        """True if the vectors that it returns have less than half precision."""
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
        """A digest of FAISS's index, of what was removed, and of all options."""
        described = json.dumps([type(self).__name__, self.dim, asdict(self.options)])
        return hashlib.sha256(f"{described} {self._contents.digest}".encode()).hexdigest()

    def digests(self) -> list[str]:
        """See `KeepsDigests`."""
        return self._contents.digests()

    def restore_digests(self, digests: list[str]) -> None:
        """See `KeepsDigests`."""
        self._contents.restore_digests(digests)

    @property
    def memory(self) -> int:
        """Bytes in memory, without those of vectors on disk."""
        return self._contents.memory

    def save(self, folder: Path) -> None:
        self._contents.save(folder)

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        index = cls(FaissContents.dim(folder), options)
        index._contents.load(folder)
        return index


@contextmanager
def _faiss_errors(message: str) -> Iterator[None]:
    """Raise an error of FAISS as `InvalidConfig`, without the place in FAISS's source."""
    try:
        yield
    except RuntimeError as error:
        reason = _PLACE.sub("", str(error)) or str(error)
        raise InvalidConfig(f"{message} ({reason[:200]})") from None


def _faiss_parameters(
    index: Any, k: int, selector: Any, chosen: dict[str, float], widest: bool = False
) -> Any:
    """Return FAISS's search parameters, of a type for each kind of index.

    Those of `chosen` that the index has are removed from it. The widest search looks everywhere.
    """
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = _faiss_parameters(index.index, k, selector, chosen, widest)
        return None if inner is None else faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        factor = chosen.pop("k_factor", index.k_factor)
        inner = _faiss_parameters(index.base_index, round(k * factor), selector, chosen, widest)
        return faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        nprobe = min(chosen.pop("nprobe", index.nprobe), index.nlist)
        parameters = {
            "nprobe": index.nlist if widest else nprobe,
            "max_codes": chosen.pop("max_codes", index.max_codes),
        }
        graph = isinstance(faiss.downcast_index(index.quantizer), faiss.IndexHNSW)
        if graph and "quantizer_efSearch" in chosen:
            ef_search = max(chosen.pop("quantizer_efSearch"), nprobe)
            parameters["quantizer_params"] = faiss.SearchParametersHNSW(efSearch=ef_search)
        return faiss.SearchParametersIVF(sel=selector, **parameters)
    if isinstance(index, faiss.IndexHNSW):
        ef_search = chosen.pop("efSearch", index.hnsw.efSearch)
        ef_search = max(int(index.ntotal if widest else ef_search), k)
        return faiss.SearchParametersHNSW(efSearch=ef_search, sel=selector)
    return None if selector is None else faiss.SearchParameters(sel=selector)


def _rank(
    stored: StoredVectors, queries: NDArray[np.float32], candidates: NDArray[np.int64], k: int
) -> Neighbours:
    """Return squared distances to stored vectors, and numbers, of the nearest k candidates."""
    squared = np.empty((len(candidates), k), np.float32)
    numbers = np.empty((len(candidates), k), np.int64)
    step = max(1, _RANKED_NUMBERS // (candidates.shape[1] * stored.dim))
    for start in range(0, len(candidates), step):
        rows = slice(start, start + step)
        block = candidates[rows]
        differences = np.asarray(stored.vectors)[np.maximum(block, 0)].astype(np.float32)
        differences -= queries[rows, None]
        exact = np.einsum("ncd,ncd->nc", differences, differences)
        exact[block < 0] = np.inf
        order = np.argsort(exact, axis=1, kind="stable")[:, :k]
        squared[rows] = np.take_along_axis(exact, order, axis=1)
        numbers[rows] = np.take_along_axis(block, order, axis=1)
    return squared, numbers


@dataclass(frozen=True)
class HnswOptions(FaissOptions):
    """The options of `HnswIndex`.

    Args:
        M: neighbours of each vector in the graph (twice as many at its lowest level), 2 to 256.
        ef_construction: candidates that are kept while the graph is built, at least 1.
        ef_search: candidates that are kept in a search, at least 1; raised to the number of
            requested neighbours if it is smaller.
    """

    M: int = 32
    ef_construction: int = 40
    ef_search: int = 256

    def factory_string(self) -> str:
        return f"HNSW{self.M}"

    def search_parameters(self) -> dict[str, float]:
        return {"efSearch": self.ef_search}

    def configure(self, index: Any) -> None:
        index.hnsw.efConstruction = self.ef_construction


class HnswIndex(FaissIndex):
    """A graph of neighbours over float32 vectors.

    Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using
    hierarchical navigable small world graphs" (TPAMI 2020).
    """

    Options = HnswOptions


class ListOptions(FaissOptions):
    """Options of an index whose search looks through `nprobe` of `nlist` lists."""

    nlist: int
    nprobe: int

    def search_parameters(self) -> dict[str, float]:
        return {"nprobe": self.nprobe}

    def configure(self, index: Any) -> None:
        configure_clustering(index.cp, self.random_seed)


class ListIndex(FaissIndex):
    """Vectors in the lists of their nearest centroids.

    If FAISS finds a GPU, the first one trains the centroids and assigns vectors to them.
    """

    _centroids: Any = None  # on the GPU, with their resources, while vectors are added

    def add(self, vectors: NDArray[np.float32]) -> None:
        try:
            super().add(vectors)
        finally:
            self._centroids = None

    def _train(self, vectors: NDArray[np.float32]) -> None:
        if faiss.get_num_gpus() == 0:
            super()._train(vectors)
            return
        resources = gpu_resources()
        on_gpu = faiss.index_cpu_to_gpu(resources, 0, faiss.IndexFlatL2(self.dim))
        self._index.clustering_index = on_gpu
        try:
            super()._train(vectors)
        finally:
            self._index.clustering_index = None
            on_gpu.this.own(True)  # the assignment took the ownership, and FAISS does not free it

    def _add(self, batch: NDArray[np.float32]) -> None:
        if faiss.get_num_gpus() == 0:
            self._index.add(batch)
            return
        if self._centroids is None:
            resources = gpu_resources()
            quantizer = faiss.index_cpu_to_gpu(resources, 0, self._index.quantizer)
            self._centroids = resources, quantizer
        nearest = np.ascontiguousarray(self._centroids[1].assign(batch, 1).ravel(), np.int64)
        self._index.add_core(len(batch), faiss.swig_ptr(batch), None, faiss.swig_ptr(nearest))


@dataclass(frozen=True)
class IvfOptions(ListOptions):
    """The options of `IvfIndex`.

    Args:
        nlist: number of lists, 1 to 2^20; FAISS recommends 4 to 16 times the square root of the
            number of vectors.
        nprobe: lists that a search looks through, at least 1; all of them from `nlist` on.
        train_size: size of the random sample that the centroids are trained on, at least 1.
        random_seed: of the sample and of the training.
    """

    nlist: int = 1024
    nprobe: int = 32
    train_size: int = 1 << 18
    random_seed: int = 0

    def factory_string(self) -> str:
        return f"IVF{self.nlist},Flat"


class IvfIndex(ListIndex):
    """Float32 vectors in lists."""

    Options = IvfOptions


@dataclass(frozen=True)
class IvfPqOptions(ListOptions):
    """The options of `IvfPqIndex`.

    Args:
        nlist, nprobe, train_size, random_seed: see `IvfOptions`.
        m: codes of each vector, which must divide its length.
        nbits: bits of each code, 4 to 12: a vector takes m nbits / 8 bytes, and 8 for its number.
        exact: keep the vectors in half precision on disk, and rank candidates by the distances to
            these; otherwise, distances are those to the codes.
        k_factor: ranked candidates for each requested neighbour, 1 to 1000.
    """

    nlist: int = 1024
    nprobe: int = 32
    m: int = 16
    nbits: int = 8
    exact: bool = True
    k_factor: float = 2.0
    train_size: int = 1 << 18
    random_seed: int = 0

    def factory_string(self) -> str:
        return f"IVF{self.nlist},PQ{self.m}x{self.nbits}np"

    def configure(self, index: Any) -> None:
        super().configure(index)
        # More points than 64 would dominate the time to build.
        configure_clustering(index.pq.cp, self.random_seed, max_points=64)
        # Tables for codes of residuals would take nlist m 2^nbits numbers, more than the codes.
        # Codes of the vectors themselves need none, and suffice where vectors rank the candidates.
        index.by_residual = not self.exact
        index.use_precomputed_table = -1

    @property
    def least_to_train(self) -> int:  # type: ignore[override]
        return 1 << self.nbits


class IvfPqIndex(ListIndex):
    """Product-quantised vectors in lists.

    Jégou, Douze and Schmid, "Product quantization for nearest neighbor search" (TPAMI 2011).

    Example:
        >>> import numpy as np
        >>> vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
        >>> index = IvfPqIndex.build(vectors, IvfPqOptions(nlist=8, nprobe=4, m=4, nbits=5))
        >>> index.search(vectors[:2], 1)[1].ravel()
        array([0, 1])
    """

    Options = IvfPqOptions

    def __init__(self, dim: int, options: Any) -> None:
        if dim % options.m:
            divisors = ", ".join(str(m) for m in range(1, dim + 1) if dim % m == 0)
            raise InvalidConfig(
                f"m is {options.m}, which does not divide the length {dim} of the vectors; it must "
                f"be one of {divisors}"
            )
        super().__init__(dim, options)


@dataclass(frozen=True)
class FactoryOptions(FaissOptions):
    """The options of `FactoryIndex`.

    Args:
        factory: FAISS's string, such as "IVF4096,SQ8", "OPQ32,IVF1024,PQ32" or "HNSW32,SQfp16".
        search: search parameters by FAISS's names, such as "nprobe=16,quantizer_efSearch=64":
            lists have `nprobe`, `max_codes` and, if a graph selects them, `quantizer_efSearch`;
            graphs have `efSearch`, which is raised to the number of requested neighbours if it is
            smaller; "RFlat" and the like have `k_factor`.
        train_size: size of the random sample to train on, at least 1.
        random_seed: of the sample.
    """

    factory: str = "HNSW32"
    search: str = ""
    train_size: int = 1 << 18
    random_seed: int = 0
    least_to_train = 1024  # more than codes of up to 10 bits need

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factory:
            raise InvalidConfig("factory is empty; give FAISS's string, such as 'IVF1024,SQ8'")
        if "l2norm" in self.factory.lower():
            raise InvalidConfig(
                "L2norm makes distances those of other vectors: pass vectors of unit length, or "
                f"{as_option('metric', 'cosine')}"
            )
        self.search_parameters()

    def factory_string(self) -> str:
        return self.factory

    def search_parameters(self) -> dict[str, float]:
        """Return the parameters that `search` names, by name.

        Example:
            >>> FactoryOptions("IVF64,SQ8", search="nprobe=4").search_parameters()
            {'nprobe': 4}
        """
        values = {}
        for part in filter(None, self.search.split(",")):
            name, _, text = part.strip().partition("=")
            try:
                values[name] = SEARCH_PARAMETERS[name](text)
            except (KeyError, ValueError):
                raise InvalidConfig(
                    f"search is {self.search!r}, and {part!r} is not a search parameter; give "
                    f"NAME=NUMBER, separated by commas, of {', '.join(SEARCH_PARAMETERS)}"
                ) from None
            if values[name] < 1:
                raise InvalidConfig(f"search: {name} is {values[name]}; at least 1")
        return values


class FactoryIndex(FaissIndex):
    """An index of `faiss.index_factory`, with L2 distances.

    Example:
        >>> import numpy as np
        >>> vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
        >>> options = FactoryOptions("IVF8,SQ8", search="nprobe=4")
        >>> FactoryIndex.build(vectors, options).search(vectors[:2], 1)[1].ravel()
        array([0, 1])
    """

    Options = FactoryOptions
