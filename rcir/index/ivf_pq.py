"""Inverted lists of codes: FAISS's IVF-PQ, its candidates ranked by their vectors on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import faiss

from rcir.errors import InvalidConfig
from rcir.index.inverted_lists import InvertedLists
from rcir.index.ranges import require_range

# As FAISS has it, the distances of a batch to all codes of long vectors would take gigabytes.
faiss.cvar.product_quantizer_compute_codes_bs = 4096


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
    SEARCHED = ("nprobe", "k_factor")

    def _made(self, dim: int) -> Any:
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
