"""Search on a GPU by FAISS: the GPU finds candidates, whose distances the vectors then give."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.files import read_array
from rcir.index.base import Neighbours, check_vectors, require_range
from rcir.index.flat import FlatIndex, rank_candidates, sort_candidates
from rcir.stored_vectors import batches

MAX_ON_GPU = 2048  # neighbours, and lists, that FAISS looks through on a GPU
SPARE_CANDIDATES = 16  # candidates beyond the requested neighbours
WORKSPACE_BYTES = 256 << 20  # of the GPU's memory for temporary results of searches
CENTROIDS_FILE = "centroids.npy"


@dataclass(frozen=True)
class GpuOptions:
    """The options of `GpuIndex`.

    Args:
        nlist: number of lists, each with the vectors near its centroid; 0 compares all vectors.
        nprobe: lists that a search looks through, 1 to 2,048.
        float16: hold the vectors in half precision on the GPU, where they then take 2 d bytes
            each instead of 4 d.
        device: number of the GPU.
        train_size: size of the random sample that the centroids are trained on, at least 1.
        random_seed: of the sample and of the training.
    """

    nlist: int = 0
    nprobe: int = 32
    float16: bool = False
    device: int = 0
    train_size: int = 1 << 18
    random_seed: int = 0

    def __post_init__(self) -> None:
        require_range(
            self,
            nlist=(0, 1 << 20),
            nprobe=(1, MAX_ON_GPU),
            device=(0, 1 << 10),
            train_size=(1, 1 << 30),
            random_seed=(0, (1 << 31) - 1),
        )


class GpuIndex(FlatIndex):
    """Float32 vectors, of which a GPU holds a copy.

    In single precision without lists it finds what `FlatIndex` finds. With lists or in half
    precision, the GPU's rounding, which depends on the number of queries, may decide between
    candidates that are about equally near at the last rank, or between lists at the last one looked
    through. The GPU holds its copy from the first search on, until vectors are added or removed. A
    folder can be loaded without a GPU, but not searched.

    Johnson, Douze and Jégou, "Billion-scale similarity search with GPUs" (IEEE Transactions on Big
    Data, 2021).
    """

    Options: ClassVar[type] = GpuOptions

    def __init__(self, dim: int, options: Any) -> None:
        super().__init__(dim, options)
        self._centroids = np.empty((0, dim), np.float32)  # none before the first vectors
        self._forget()

    def _forget(self) -> None:
        """Free the GPU's copy."""
        self._on_gpu: Any = None  # FAISS's index, and the resources that it needs
        self._lock = Lock()  # FAISS's resources serve one thread at a time
        self._version: str | None = None

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: Any) -> Self:
        require_gpu(options.device)
        return super().build(vectors, options)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_on_gpu": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def add(self, vectors: NDArray[np.float32]) -> None:
        vectors = check_vectors(vectors, self.vectors.shape[1])
        if self.options.nlist and len(vectors) and not len(self._centroids):
            self._centroids = self._train(vectors)
        super().add(vectors)
        self._forget()

    def remove(self, positions: NDArray[np.int64]) -> None:
        super().remove(positions)
        self._forget()

    def search(self, vectors: NDArray[np.float32], k: int) -> Neighbours:
        """See `Index.search`.

        Raises:
            InvalidConfig: k is too large for a GPU, or there is none.
        """
        queries = check_vectors(vectors, self.vectors.shape[1])
        fetched = k * (1 + self.options.float16) + SPARE_CANDIDATES
        if fetched > MAX_ON_GPU:
            largest = (MAX_ON_GPU - SPARE_CANDIDATES) // (1 + self.options.float16)
            raise InvalidConfig(
                f"a query needs {k:,} neighbours, and a GPU finds at most {largest:,}: reduce the "
                "search depth, or choose an index that is searched on the CPU, such as hnsw. With "
                "leave_one_out, the number of neighbours is the search depth plus the size of the "
                "largest cluster"
            )
        if len(self) <= fetched:  # the GPU would return all of them
            return super().search(queries, k)
        with self._lock:
            squared, candidates = self._gpu_index().search(queries, fetched)
        # Distances are computed again, by subtraction: the GPU multiplies matrices, whose rounding
        # depends on the number of queries.
        if self.options.nlist or self.options.float16:
            squared, positions = sort_candidates(queries, self.vectors, k, candidates)
        else:
            squared, positions = rank_candidates(queries, self.vectors, k, squared, candidates)
        return np.sqrt(squared), positions

    def _gpu_index(self) -> Any:
        """Return FAISS's index on the GPU, made on first use."""
        if self._on_gpu is None:
            require_gpu(self.options.device)
            resources, options = gpu_resources(), faiss.GpuClonerOptions()
            options.useFloat16 = self.options.float16
            index = faiss.index_cpu_to_gpu(resources, self.options.device, self._empty(), options)
            for rows in batches(*self.vectors.shape):
                index.add(self.vectors[rows])
            self._on_gpu = resources, index
        return self._on_gpu[1]

    def _empty(self) -> Any:
        """Return an empty index of FAISS for the vectors, with their centroids."""
        dim, nlist = self.vectors.shape[1], self.options.nlist
        if not nlist:
            return faiss.IndexFlatL2(dim)
        codes = "SQfp16" if self.options.float16 else "Flat"
        index = faiss.index_factory(dim, f"IVF{nlist},{codes}", faiss.METRIC_L2)
        index.by_residual = False
        index.quantizer.add(self._centroids)
        index.is_trained = True
        index.nprobe = min(self.options.nprobe, nlist)
        return index

    def _train(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return centroids (nlist, d) of a random sample, in which few vectors recur."""
        dim, nlist, device = self.vectors.shape[1], self.options.nlist, self.options.device
        sample = draw_sample(vectors, self.options, nlist)
        clustering = faiss.Clustering(dim, nlist)
        configure_clustering(clustering, self.options.random_seed)
        require_gpu(device)
        resources, flat = gpu_resources(), faiss.IndexFlatL2(dim)
        clustering.train(sample, faiss.index_cpu_to_gpu(resources, device, flat))
        centroids: NDArray[np.float32] = faiss.vector_to_array(clustering.centroids)
        return centroids.reshape(nlist, dim)

    @property
    def version(self) -> str:
        """A digest of vectors, centroids and options except `device`."""
        if self._version is None:
            options = asdict(self.options) | {"device": None}
            digest = hashlib.sha256(f"gpu {json.dumps(options)} {super().version} ".encode())
            digest.update(self._centroids.data)
            self._version = digest.hexdigest()
        return self._version

    @property
    def memory(self) -> int:
        """Bytes in the processor's memory."""
        return super().memory + self._centroids.nbytes

    def save(self, folder: Path) -> None:
        super().save(folder)
        np.save(folder / CENTROIDS_FILE, self._centroids, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        index = super().load(folder, options)
        index._centroids = read_array(folder / CENTROIDS_FILE)
        return index


def require_gpu(device: int) -> None:
    """Raise `InvalidConfig` unless FAISS finds the GPU of a number."""
    count = faiss.get_num_gpus()
    if device >= count:
        available = f"only {count}" if count else "none"
        raise InvalidConfig(
            f"index.kind is gpu, on GPU number {device}, and FAISS finds {available}: name another "
            "device, install the extra gpu on a machine with a GPU, or give the retriever an index "
            "that needs none (rcir index RETRIEVER --index flat)"
        )


def gpu_resources() -> Any:
    """Return FAISS's memory and streams on a GPU, which are freed with this object."""
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(WORKSPACE_BYTES)
    return resources


def draw_sample(vectors: NDArray[Any], options: Any, least: int) -> NDArray[Any]:
    """Draw vectors to train on by `train_size` and `random_seed`; they recur if there are few."""
    size = max(min(options.train_size, len(vectors)), least)
    rng = np.random.default_rng(options.random_seed)
    rows = np.sort(rng.choice(len(vectors), size, replace=size > len(vectors)))
    return np.asarray(vectors[rows])


def configure_clustering(parameters: Any, seed: int, max_points: int = 1 << 20) -> None:
    """Seed FAISS's clustering, of a sample that is already drawn."""
    parameters.seed = seed
    parameters.min_points_per_centroid = 1
    parameters.max_points_per_centroid = max_points
