"""Kinds of FAISS indexes: presets over `faiss.index_factory`, and any string of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, as_option
from rcir.index.faiss_indexes import FaissIndex, FaissOptions
from rcir.index.gpu import configure_clustering, gpu_resources

SEARCH_PARAMETERS: dict[str, type[int] | type[float]] = {
    **{"nprobe": int, "max_codes": int, "quantizer_efSearch": int},
    **{"efSearch": int, "k_factor": float},
}


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


@dataclass(frozen=True)
class IvfOptions(FaissOptions):
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

    def search_parameters(self) -> dict[str, float]:
        return {"nprobe": self.nprobe}

    def configure(self, index: Any) -> None:
        configure_clustering(index.cp, self.random_seed)


class IvfIndex(FaissIndex):
    """Float32 vectors in the lists of their nearest centroids.

    If FAISS finds a GPU, the first one trains the centroids and assigns vectors to them.
    """

    Options: ClassVar[type[FaissOptions]] = IvfOptions
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
class IvfPqOptions(IvfOptions):
    """The options of `IvfPqIndex`.

    Args:
        nlist, nprobe, train_size, random_seed: see `IvfOptions`.
        m: codes of each vector, which must divide its length.
        nbits: bits of each code, 4 to 12: a vector takes m nbits / 8 bytes, and 8 for its number.
        exact: keep the vectors in half precision on disk, and rank candidates by the distances to
            these; otherwise, distances are those to the codes.
        k_factor: ranked candidates for each requested neighbour, 1 to 1000.
    """

    m: int = 16
    nbits: int = 8
    exact: bool = True
    k_factor: float = 2.0

    def factory_string(self) -> str:
        return f"IVF{self.nlist},PQ{self.m}x{self.nbits}np"

    def configure(self, index: Any) -> None:
        super().configure(index)
        # More points than 64 would dominate the time to build.
        configure_clustering(index.pq.cp, self.random_seed, max_points=64)
        # Codes of the vectors themselves are faster, and suffice where vectors rank the candidates.
        index.by_residual = not self.exact

    @property
    def least_to_train(self) -> int:  # type: ignore[override]
        return 1 << self.nbits


class IvfPqIndex(IvfIndex):
    """Product-quantised vectors in lists.

    Jégou, Douze and Schmid, "Product quantization for nearest neighbor search" (TPAMI 2011).
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
        """Return the parameters that `search` names, by name."""
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
                raise InvalidConfig(f"search: {name} is {values[name]}; it must be at least 1")
        return values


class FactoryIndex(FaissIndex):
    """An index of `faiss.index_factory`, with L2 distances."""

    Options = FactoryOptions
