"""Inverted lists: what FAISS's indexes of this kind have in common."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.index.faiss_index import FaissIndex


class InvertedLists(FaissIndex):
    """Vectors in the lists of their nearest centroids, of which a search looks through `nprobe`."""

    def _seeded(self, index: Any) -> Any:
        """The same index of FAISS, trained with the seed, on a GPU if FAISS finds one."""
        index.cp.seed = self.options.random_seed
        index.cp.min_points_per_centroid = 1
        index.cp.max_points_per_centroid = 1 << 20  # the sample is drawn here
        if faiss.get_num_gpus() > 0:
            index.clustering_index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatL2(index.d))
        return index

    def _add(self, batch: NDArray[np.float32]) -> None:
        """Into the lists that the centroids say, which a GPU finds faster if FAISS finds one."""
        if faiss.get_num_gpus() == 0:
            self._index.add(batch)
            return
        centroids = faiss.index_cpu_to_all_gpus(self._index.quantizer)
        nearest = np.ascontiguousarray(centroids.assign(batch, 1).ravel(), np.int64)
        add_core = self._index.add_core
        add_core(len(batch), *(faiss.swig_ptr(batch), None, faiss.swig_ptr(nearest)))

    def _needed(self) -> int:
        return int(self.options.nlist)

    def _parameters(self, k: int, selector: Any, widest: bool) -> Any:
        nlist = self.options.nlist
        nprobe = nlist if widest else min(self.options.nprobe, nlist)
        return faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)
