"""HNSW whose graph a GPU builds: FAISS's CAGRA, of cuVS."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.index.base import check_vectors
from rcir.index.hnsw import HnswIndex

_ON_GPU = 1000  # vectors from which a GPU builds the graph; it hangs on a handful


class CagraIndex(HnswIndex):
    """A graph of neighbours built on a GPU, searched on the CPU, where it is added to as well.

    To be built it needs a FAISS that was built with cuVS, such as conda's `faiss-gpu-cuvs`; any
    loads it. Each vector has 2 `M` neighbours; fewer than 1,000 vectors are left to the CPU.

    Ootomo et al., "CAGRA: Highly parallel graph construction and approximate nearest neighbor
    search for GPUs" (ICDE 2024).

    Example:
        >>> vectors = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
        >>> CagraIndex.build(vectors, CagraIndex.Options()).search(vectors[:2], 1)[1].ravel()
        array([0, 1])
    """

    def _made(self, dim: int) -> Any:
        index = faiss.IndexHNSWCagra(dim, self.options.M)
        index.hnsw.efConstruction = self.options.ef_construction
        index.base_level_only = False  # so that it can be added to
        index.is_trained = True
        return index

    def add(self, vectors: NDArray[np.float32]) -> None:
        """See `Index.add`.

        Raises:
            InvalidConfig: there is no GPU, or a FAISS without cuVS.
        """
        if self._index.ntotal or len(vectors) < _ON_GPU:
            super().add(vectors)
            return
        checked = check_vectors(vectors, self.dim)
        if faiss.get_num_gpus() == 0 or not hasattr(faiss, "GpuIndexCagra"):
            raise InvalidConfig(
                "cagra needs a GPU and a FAISS built with cuVS, and there is none here: take "
                "hnsw, which builds such a graph on the CPU"
            )
        config = faiss.GpuIndexCagraConfig()
        config.graph_degree = 2 * self.options.M
        config.intermediate_graph_degree = 4 * self.options.M
        resources = faiss.StandardGpuResources()
        graph = faiss.GpuIndexCagra(resources, self.dim, faiss.METRIC_L2, config)
        graph.train(checked)
        graph.copyTo(self._index)
        self._contents.grown(0)
