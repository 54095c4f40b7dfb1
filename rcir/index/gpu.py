"""Search on a GPU by FAISS: the GPU finds candidates, whose distances the vectors then give."""

from __future__ import annotations

import hashlib
import json
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.files import read_array
from rcir.index.base import check_vectors, require_range
from rcir.index.flat import FlatIndex, FlatOptions, Found, ranked, squared_distances
from rcir.stored_vectors import batches

MOST = 2048  # neighbours, and lists, that FAISS looks through on a GPU
SPARE = 16  # candidates beyond those asked for
WORKSPACE = 256 << 20  # bytes of the GPU's memory that its searches take
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
        train_size: vectors that the centroids are trained on, drawn at random, at least 1.
        random_seed: of that draw and of the training.
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
            nprobe=(1, MOST),
            device=(0, 1 << 10),
            train_size=(1, 1 << 30),
            random_seed=(0, (1 << 31) - 1),
        )


class GpuIndex:
    """Float32 vectors, of which a GPU holds a copy.

    In single precision without lists it finds what `FlatIndex` finds, for a query alone and in a
    batch. With lists or in half precision, the GPU's rounding, which depends on the number of
    queries, may decide between candidates that are about equally near at the last rank, or between
    lists at the last one looked through. The GPU holds its copy from the first search on, until
    vectors are added or removed. A folder holds the vectors and the centroids: it can be loaded
    without a GPU, but not searched.

    Johnson, Douze and Jégou, "Billion-scale similarity search with GPUs" (IEEE Transactions on Big
    Data, 2021).
    """

    Options = GpuOptions

    def __init__(self, dim: int, options: GpuOptions) -> None:
        self.options = options
        self._flat = FlatIndex(dim, FlatOptions())
        self._dim = dim
        self._centroids = np.empty((0, dim), np.float32)  # none before the first vectors
        self._forget()

    def _forget(self) -> None:
        """Let the GPU's copy go."""
        self._on_gpu: Any = None  # FAISS's index, and the resources that it needs
        self._lock = Lock()  # FAISS's resources serve one thread at a time
        self._version: str | None = None

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: GpuOptions) -> Self:
        require_gpu(options.device)
        vectors = check_vectors(vectors)
        index = cls(vectors.shape[1], options)
        index.add(vectors)
        return index

    def __copy__(self) -> Self:
        other = type(self)(self._dim, self.options)
        other._flat, other._centroids = copy(self._flat), self._centroids
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_on_gpu": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return len(self._flat)

    def add(self, vectors: NDArray[np.float32]) -> None:
        vectors = check_vectors(vectors, self._dim)
        if self.options.nlist and len(vectors) and not len(self._centroids):
            self._centroids = self._trained(vectors)
        self._flat.add(vectors)
        self._forget()

    def remove(self, positions: NDArray[np.int64]) -> None:
        self._flat.remove(positions)
        self._forget()

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `Index.search`.

        Raises:
            InvalidConfig: k is too large for a GPU, or there is none.
        """
        queries = check_vectors(vectors, self._dim)
        fetched = k * (1 + self.options.float16) + SPARE
        if fetched > MOST:
            most = (MOST - SPARE) // (1 + self.options.float16)
            raise InvalidConfig(
                f"a query needs {k:,} neighbours, and a GPU finds at most {most:,}: reduce the "
                "search depth, or choose an index that is searched on the CPU, such as hnsw. With "
                "leave_one_out, the number of neighbours is the search depth plus the size of the "
                "largest cluster"
            )
        if len(self) <= fetched:  # not worth the way
            return self._flat.search(queries, k)
        with self._lock:
            squared, candidates = self._gpu_index().search(queries, fetched)
        squared, positions = self._nearest(queries, k, squared, candidates)
        return np.sqrt(squared, out=squared), positions

    def _nearest(
        self,
        queries: NDArray[np.float32],
        k: int,
        squared: NDArray[np.float32],
        candidates: NDArray[np.int64],
    ) -> Found:
        """The nearest of the candidates that the GPU found, by subtraction.

        The GPU multiplies matrices, whose rounding depends on the number of queries.
        """
        vectors = self._flat.vectors
        if not (self.options.nlist or self.options.float16):
            return ranked(queries, vectors, k, squared, candidates)
        exact = squared_distances(queries, vectors, candidates)
        order = exact.argsort(1)
        ordered = np.take_along_axis(exact, order, 1)
        # Only these need two keys, by which a sort takes much longer.
        tied = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(1))
        order[tied] = np.lexsort((candidates[tied], exact[tied]))
        order = order[:, :k]
        return np.take_along_axis(exact, order, 1), np.take_along_axis(candidates, order, 1)

    def _gpu_index(self) -> Any:
        """FAISS's index on the GPU, which is made when it is first needed."""
        if self._on_gpu is None:
            require_gpu(self.options.device)
            resources, options = gpu_resources(), faiss.GpuClonerOptions()
            options.useFloat16 = self.options.float16
            index = faiss.index_cpu_to_gpu(resources, self.options.device, self._empty(), options)
            for rows in batches(*self._flat.vectors.shape):
                index.add(self._flat.vectors[rows])
            self._on_gpu = resources, index
        return self._on_gpu[1]

    def _empty(self) -> Any:
        """An index of FAISS for the vectors, without them."""
        flat = faiss.IndexFlatL2(self._dim)
        if not self.options.nlist:
            return flat
        flat.add(self._centroids)
        shape = flat, self._dim, self.options.nlist
        if self.options.float16:
            half = faiss.ScalarQuantizer.QT_fp16
            index = faiss.IndexIVFScalarQuantizer(*shape, half, faiss.METRIC_L2, False)
        else:
            index = faiss.IndexIVFFlat(*shape)
        index.is_trained = True
        index.nprobe = min(self.options.nprobe, self.options.nlist)
        return index

    def _trained(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """(nlist, d) centroids of a sample of vectors; where there are too few some come again."""
        nlist, rng = self.options.nlist, np.random.default_rng(self.options.random_seed)
        size = max(min(self.options.train_size, len(vectors)), nlist)
        rows = np.sort(rng.choice(len(vectors), size, replace=size > len(vectors)))
        clustering = faiss.Clustering(self._dim, nlist)
        clustering.seed = self.options.random_seed
        clustering.min_points_per_centroid = 1
        clustering.max_points_per_centroid = 1 << 20  # the sample is drawn here
        require_gpu(self.options.device)
        resources, flat = gpu_resources(), faiss.IndexFlatL2(self._dim)
        on_gpu = faiss.index_cpu_to_gpu(resources, self.options.device, flat)
        clustering.train(vectors[rows], on_gpu)
        centroids: NDArray[np.float32] = faiss.vector_to_array(clustering.centroids)
        return centroids.reshape(nlist, self._dim)

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `HoldsVectors`."""
        return self._flat.vectors_at(positions)

    @property
    def version(self) -> str:
        """A digest of vectors, centroids and options; not of the number of the GPU."""
        if self._version is None:
            options = asdict(self.options) | {"device": None}
            digest = hashlib.sha256(f"gpu {json.dumps(options)} {self._flat.version} ".encode())
            digest.update(self._centroids.data)
            self._version = digest.hexdigest()
        return self._version

    def digests(self) -> list[str]:
        """See `KeepsDigests`."""
        return self._flat.digests()

    def restore_digests(self, digests: list[str]) -> None:
        """See `KeepsDigests`."""
        self._flat.restore_digests(digests)

    @property
    def memory(self) -> int:
        """Bytes that it takes in the processor's memory."""
        return self._flat.memory + self._centroids.nbytes

    def save(self, folder: Path) -> None:
        self._flat.save(folder)
        np.save(folder / CENTROIDS_FILE, self._centroids, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, options: GpuOptions) -> Self:
        flat = FlatIndex.load(folder, FlatOptions())
        index = cls(flat.vectors.shape[1], options)
        index._flat, index._centroids = flat, read_array(folder / CENTROIDS_FILE)
        return index


def require_gpu(device: int) -> None:
    """Raise `InvalidConfig` unless FAISS finds the GPU of a number."""
    count = faiss.get_num_gpus()
    if device >= count:
        found = f"only {count}" if count else "none"
        raise InvalidConfig(
            f"index.kind is gpu, on GPU number {device}, and FAISS finds {found}: name another "
            "device, install the extra gpu on a machine with a GPU, or give the retriever an index "
            "that needs none (rcir index RETRIEVER --index flat)"
        )


def gpu_resources() -> Any:
    """FAISS's memory and streams on a GPU, which are freed with this object."""
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(WORKSPACE)
    return resources
