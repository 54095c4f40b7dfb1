"""Indexes of FAISS: graphs, inverted lists, product quantisation, and any factory string."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, StaleCalibration, as_option
from rcir.index.base import check_vectors, require_range
from rcir.index.faiss_files import FaissContents
from rcir.index.flat import by_subtraction
from rcir.index.gpu import gpu_resources
from rcir.stored_vectors import StoredVectors, batches

logger = logging.getLogger(__name__)
# Before its words FAISS says where in its source, and which condition, failed.
_PLACE = re.compile(r"^Error in .*? at \S+:\d+: (Error: '.*?' failed: ?)?", re.DOTALL)
_HELD = 1 << 24  # numbers of candidates that are ranked exactly at a time: 64 MiB of float32
_FEWEST = 1024  # vectors to train on, more than codes of up to 10 bits need
_KINDS: dict[str, Callable[[str], float]] = {
    **{"nprobe": int, "max_codes": int, "quantizer_efSearch": int},
    **{"efSearch": int, "k_factor": float},
}
# By FAISS's default, the distances of a batch to all codes of long vectors would take gigabytes.
faiss.cvar.product_quantizer_compute_codes_bs = 4096


class FaissIndex:
    """An index that FAISS holds, trained on a sample of its first vectors.

    A kind says how the index is made (`_new_faiss_index`) and with which parameters it is searched
    (`_parameters`). What is removed takes memory until the index is built again. An index that was
    loaded is mapped into memory: processes on one machine share it. The logger of this module says
    how far adding is.

    Attributes:
        options: build and search parameters. Others in their place give another `version`.
    """

    Options: ClassVar[type]

    def __init__(self, dim: int, options: Any) -> None:
        self.options = options
        self.dim = dim
        exact = getattr(options, "exact", False)
        stored = StoredVectors(dim, np.float16) if exact else None
        try:
            self._contents = FaissContents(self._new_faiss_index(dim), stored)
        except RuntimeError as error:
            raise InvalidConfig(f"FAISS makes no such index: {_faiss_message(error)}") from None

    def _new_faiss_index(self, dim: int) -> Any:
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
                self._before_adding()
                if contents.stored is not None:
                    contents.stored.append(batch)
                self._add(batch)
                done = int(self._index.ntotal) - first
                logger.info("%s of %s vectors added", f"{done:,}", f"{len(vectors):,}")
        except BaseException as error:
            contents.grown(first, kept=False)
            if isinstance(error, RuntimeError):
                reason = f"FAISS adds nothing to this index: {_faiss_message(error)}"
                raise InvalidConfig(reason) from None
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
                f"FAISS cannot train such an index on {size} vectors: {_faiss_message(error)}"
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
        squared, positions = self._searched(queries, k, selector)
        if positions[:, 0].min(initial=0) < 0:
            none = positions[:, 0] < 0
            squared[none], positions[none] = self._searched(queries[none], k, selector, widest=True)
        if positions[:, -1].min(initial=0) < 0:
            squared[positions < 0] = np.inf
        positions = self._contents.positions(positions)
        return np.sqrt(np.maximum(squared, 0, out=squared), out=squared), positions

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
            squared, positions = by_subtraction(
                lambda batch: search(batch, fetched, params=parameters),
                queries,
                largest=1 if transforms else None,
            )
        except RuntimeError as error:
            raise InvalidConfig(
                f"FAISS cannot search this index so: {_faiss_message(error)}"
            ) from None
        if self._contents.stored is not None:
            return self._ranked(self._contents.stored, queries, positions, k)
        return squared, positions

    def _ranked(
        self,
        stored: StoredVectors,
        queries: NDArray[np.float32],
        positions: NDArray[np.int64],
        k: int,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Squared distances to the vectors themselves, and numbers, of the nearest k found."""
        squared = np.empty((len(positions), k), np.float32)
        nearest = np.empty((len(positions), k), np.int64)
        step = max(1, _HELD // (positions.shape[1] * self.dim))
        for start in range(0, len(positions), step):
            rows = slice(start, start + step)
            near = np.asarray(stored.vectors)[np.maximum(positions[rows], 0)]
            candidates = near.astype(np.float32)
            candidates -= queries[rows, None]
            exact = np.einsum("ncd,ncd->nc", candidates, candidates)
            exact[positions[rows] < 0] = np.inf
            order = np.argsort(exact, axis=1, kind="stable")[:, :k]
            squared[rows] = np.take_along_axis(exact, order, axis=1)
            nearest[rows] = np.take_along_axis(positions[rows], order, axis=1)
        return squared, nearest

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """(m, d) vectors at positions (m,): as they were given, in half precision where these are
        kept, decoded where codes are all that is kept.
        """
        try:
            return self._contents.vectors_at(positions)
        except RuntimeError as error:
            raise InvalidConfig(
                f"this index gives no vectors back: {_faiss_message(error)}"
            ) from None

    @property
    def lossy(self) -> bool:
        """True if the vectors that it gives back have less than half precision."""
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

    def digests(self) -> list[str]:
        """See `KeepsDigests`."""
        return self._contents.digests()

    def restore_digests(self, digests: list[str]) -> None:
        """See `KeepsDigests`."""
        self._contents.restore_digests(digests)

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory; those of vectors on disk are not counted."""
        return self._contents.memory

    def save(self, folder: Path) -> None:
        self._contents.save(folder)

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        index = cls(FaissContents.dim(folder), options)
        index._contents.load(folder)
        return index


def _faiss_message(error: RuntimeError) -> str:
    """The words of FAISS on an error, without the place in its source."""
    message = str(error)
    return (_PLACE.sub("", message) or message)[:200]


class InvertedLists(FaissIndex):
    """Vectors in the lists of their nearest centroids, of which a search looks through `nprobe`.

    Where FAISS finds a GPU, the first one trains the centroids and assigns vectors to them.
    """

    _centroids: Any = None  # on the GPU, with the resources that they need, while vectors are added

    def _seeded(self, index: Any) -> Any:
        """The same index of FAISS, trained with the seed."""
        index.cp.seed = self.options.random_seed
        index.cp.min_points_per_centroid = 1
        index.cp.max_points_per_centroid = 1 << 20  # the sample is drawn here
        return index

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
            on_gpu.this.own(True)  # which the assignment took, and FAISS would not free it

    def _add(self, batch: NDArray[np.float32]) -> None:
        if faiss.get_num_gpus() == 0:
            self._index.add(batch)
            return
        if self._centroids is None:
            resources = gpu_resources()
            quantizer = faiss.index_cpu_to_gpu(resources, 0, self._index.quantizer)
            self._centroids = resources, quantizer
        nearest = np.ascontiguousarray(self._centroids[1].assign(batch, 1).ravel(), np.int64)
        pointers = faiss.swig_ptr(batch), None, faiss.swig_ptr(nearest)
        self._index.add_core(len(batch), *pointers)

    def _needed(self) -> int:
        return int(self.options.nlist)

    def _parameters(self, k: int, selector: Any, widest: bool) -> Any:
        nlist = self.options.nlist
        nprobe = nlist if widest else min(self.options.nprobe, nlist)
        return faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)


def seed_levels(index: Any) -> None:
    """Have FAISS's HNSW draw the levels of what comes next by how many vectors it holds.

    FAISS draws them by a state that its files do not hold: what is added after loading would make
    another graph than before saving.
    """
    index.hnsw.rng = faiss.RandomGenerator(int(index.ntotal))


@dataclass(frozen=True)
class HnswOptions:
    """The options of `HnswIndex`.

    Args:
        M: neighbours of each vector in the graph (twice as many at its lowest level), 2 to 256.
        ef_construction: candidates that are kept while the graph is built, at least 1.
        ef_search: candidates that are kept while it is searched, at least 1; raised to k, the
            number of neighbours asked for, where it is below.
    """

    M: int = 32
    ef_construction: int = 40
    ef_search: int = 256

    def __post_init__(self) -> None:
        require_range(self, M=(2, 256), ef_construction=(1, 1 << 16), ef_search=(1, 1 << 20))


class HnswIndex(FaissIndex):
    """A graph of neighbours over float32 vectors.

    Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using
    hierarchical navigable small world graphs" (TPAMI 2020).

    Example:
        >>> import numpy as np
        >>> vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
        >>> HnswIndex.build(vectors, HnswOptions()).search(vectors[:2], 1)[1].ravel()
        array([0, 1])
    """

    Options = HnswOptions

    def _new_faiss_index(self, dim: int) -> Any:
        index = faiss.IndexHNSWFlat(dim, self.options.M)
        index.hnsw.efConstruction = self.options.ef_construction
        index.is_trained = True  # there is nothing to train
        return index

    def _before_adding(self) -> None:
        seed_levels(self._index)

    def _parameters(self, k: int, selector: Any, widest: bool) -> Any:
        ef_search = self._index.ntotal if widest else self.options.ef_search
        return faiss.SearchParametersHNSW(efSearch=max(ef_search, k), sel=selector)


@dataclass(frozen=True)
class IvfOptions:
    """The options of `IvfIndex`.

    Args:
        nlist: number of lists, 1 to 2^20; FAISS advises 4 to 16 times the root of the number of
            vectors.
        nprobe: lists that a search looks through, at least 1; `nlist` and more is all of them.
        train_size: vectors that the centroids are trained on, drawn at random, at least 1.
        random_seed: of that draw and of the training.
    """

    nlist: int = 1024
    nprobe: int = 32
    train_size: int = 1 << 18
    random_seed: int = 0

    def __post_init__(self) -> None:
        lists = (1, 1 << 20)
        require_range(
            self, nlist=lists, nprobe=lists, train_size=(1, 1 << 30), random_seed=(0, (1 << 31) - 1)
        )


class IvfIndex(InvertedLists):
    """Float32 vectors in lists.

    Example:
        >>> import numpy as np
        >>> vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
        >>> index = IvfIndex.build(vectors, IvfOptions(nlist=8, nprobe=2))
        >>> index.search(vectors[:2], 1)[1].ravel()
        array([0, 1])
    """

    Options = IvfOptions

    def _new_faiss_index(self, dim: int) -> Any:
        quantizer = faiss.IndexFlatL2(dim)
        index = faiss.IndexIVFFlat(quantizer, dim, self.options.nlist)
        index.set_direct_map_type(faiss.DirectMap.Array)  # by which vectors are given back
        return self._seeded(index)


@dataclass(frozen=True)
class IvfPqOptions:
    """The options of `IvfPqIndex`.

    Args:
        nlist, nprobe, train_size, random_seed: see `IvfOptions`.
        m: codes of each vector, which must divide its length.
        nbits: bits of each code, 4 to 12: a vector takes m nbits / 8 bytes, and 8 for its number.
        exact: keep the vectors in half precision on disk, and rank candidates by their distances
            to these; otherwise distances are those to the codes.
        k_factor: how many candidates are ranked so for each that is asked for, 1 to 1000.
    """

    nlist: int = 1024
    nprobe: int = 32
    m: int = 16
    nbits: int = 8
    exact: bool = True
    k_factor: float = 2.0
    train_size: int = 1 << 18
    random_seed: int = 0

    def __post_init__(self) -> None:
        lists = (1, 1 << 20)
        require_range(
            self, nlist=lists, nprobe=lists, train_size=(1, 1 << 30), random_seed=(0, (1 << 31) - 1)
        )
        require_range(self, m=(1, 1 << 14), nbits=(4, 12), k_factor=(1, 1000))


class IvfPqIndex(InvertedLists):
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

    def _new_faiss_index(self, dim: int) -> Any:
        options = self.options
        if dim % options.m:
            divisors = [str(m) for m in range(1, min(dim, 256) + 1) if dim % m == 0]
            raise InvalidConfig(
                f"m is {options.m}, which does not divide the length {dim} of the vectors; take "
                f"one of {', '.join(divisors)}"
            )
        quantizer = faiss.IndexFlatL2(dim)
        index = faiss.IndexIVFPQ(quantizer, dim, options.nlist, options.m, options.nbits)
        index.pq.cp.seed = options.random_seed
        index.pq.cp.min_points_per_centroid = 1
        index.pq.cp.max_points_per_centroid = 64  # its training would take longer than all else
        # Tables for codes of residuals would take nlist m 2^nbits numbers, more than the codes;
        # where vectors rank the candidates, codes of the vectors themselves do without.
        index.by_residual = not options.exact
        index.use_precomputed_table = -1
        if not options.exact:
            index.set_direct_map_type(faiss.DirectMap.Array)
        return self._seeded(index)

    def _needed(self) -> int:
        return int(max(self.options.nlist, 1 << self.options.nbits))


@dataclass(frozen=True)
class FactoryOptions:
    """The options of `FactoryIndex`.

    Args:
        factory: FAISS's string, such as "IVF4096,SQ8", "OPQ32,IVF1024,PQ32" or "HNSW32,SQfp16".
        search: search parameters by FAISS's names, such as "nprobe=16,quantizer_efSearch=64": of
            inverted lists `nprobe`, `max_codes` and `quantizer_efSearch`, of graphs `efSearch`,
            which is raised to k where it is below, of "RFlat" and the like `k_factor`.
        train_size: vectors to train on, drawn at random, at least 1.
        random_seed: of that draw.
    """

    factory: str = "HNSW32"
    search: str = ""
    train_size: int = 1 << 18
    random_seed: int = 0

    def __post_init__(self) -> None:
        require_range(self, train_size=(1, 1 << 30), random_seed=(0, (1 << 31) - 1))
        if not self.factory:
            raise InvalidConfig("factory is empty; give FAISS's string, such as 'IVF1024,SQ8'")
        self.search_parameters()

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
                values[name] = _KINDS[name](text)
            except (KeyError, ValueError):
                raise InvalidConfig(
                    f"search is {self.search!r}, and {part!r} is no search parameter; give "
                    f"NAME=NUMBER, separated by commas, of {', '.join(_KINDS)}"
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

    def _new_faiss_index(self, dim: int) -> Any:
        index = faiss.index_factory(dim, self.options.factory, faiss.METRIC_L2)
        names = _search_parameter_names(index)
        if other := [name for name in self.options.search_parameters() if name not in names]:
            raise InvalidConfig(
                f"an index {self.options.factory!r} has no search parameter {', '.join(other)}; it "
                f"has {', '.join(sorted(names)) or 'none'}"
            )
        lists = faiss.try_extract_index_ivf(index)
        if lists is not None:
            lists.set_direct_map_type(faiss.DirectMap.Array)  # by which vectors are given back
        return index

    def _needed(self) -> int:
        lists = faiss.try_extract_index_ivf(self._index)
        return max(_FEWEST, 0 if lists is None else int(lists.nlist))

    def _before_adding(self) -> None:
        if isinstance(self._index, faiss.IndexHNSW):
            seed_levels(self._index)

    def _parameters(self, k: int, selector: Any, widest: bool) -> Any:
        given = {} if widest else self.options.search_parameters()
        return _faiss_parameters(self._index, k, selector, given, widest)


def _search_parameter_names(index: Any) -> set[str]:
    """Names of the search parameters that an index has."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        for number in range(index.chain.size()):
            transform = faiss.downcast_VectorTransform(index.chain.at(number))
            if isinstance(transform, faiss.NormalizationTransform):
                raise InvalidConfig(
                    "L2norm makes distances those of other vectors: bring the vectors to unit "
                    f"length before, or pass {as_option('metric', 'cosine')}"
                )
        return _search_parameter_names(index.index)
    if isinstance(index, faiss.IndexRefine):
        return {"k_factor"} | _search_parameter_names(index.base_index)
    if isinstance(index, faiss.IndexIVF):
        graph = isinstance(faiss.downcast_index(index.quantizer), faiss.IndexHNSW)
        return {"nprobe", "max_codes"} | ({"quantizer_efSearch"} if graph else set())
    return {"efSearch"} if isinstance(index, faiss.IndexHNSW) else set()


def _faiss_parameters(
    index: Any, k: int, selector: Any, given: dict[str, float], widest: bool
) -> Any:
    """FAISS's search parameters for an index: it has a type for each kind."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = _faiss_parameters(index.index, k, selector, given, widest)
        return None if inner is None else faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        factor = given.get("k_factor", index.k_factor)
        inner = _faiss_parameters(index.base_index, round(k * factor), selector, given, widest)
        return faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        parameters = {
            "nprobe": index.nlist if widest else min(given.get("nprobe", index.nprobe), index.nlist)
        }
        parameters["max_codes"] = given.get("max_codes", index.max_codes)
        if "quantizer_efSearch" in given:
            ef_search = max(given["quantizer_efSearch"], parameters["nprobe"])
            parameters["quantizer_params"] = faiss.SearchParametersHNSW(efSearch=ef_search)
        return faiss.SearchParametersIVF(sel=selector, **parameters)
    if isinstance(index, faiss.IndexHNSW):
        ef_search = index.ntotal if widest else given.get("efSearch", index.hnsw.efSearch)
        return faiss.SearchParametersHNSW(efSearch=max(int(ef_search), k), sel=selector)
    return None if selector is None else faiss.SearchParameters(sel=selector)
