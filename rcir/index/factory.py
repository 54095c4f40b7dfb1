"""Any other index of FAISS, by its factory string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import faiss

from rcir.errors import InvalidConfig
from rcir.index.faiss_index import FaissIndex
from rcir.index.hnsw import seed_levels
from rcir.index.ranges import require_range

_FEWEST = 1024  # vectors to train on, more than codes of up to 10 bits need


@dataclass(frozen=True)
class FactoryOptions:
    """The options of `FactoryIndex`.

    Args:
        factory: FAISS's string, such as "IVF4096,SQ8", "OPQ32,IVF1024,PQ32" or "HNSW32,SQfp16".
        search: search parameters as FAISS's ParameterSpace takes them, such as
            "nprobe=16,quantizer_efSearch=64"; efSearch is raised to k where it is below.
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

    def _made(self, dim: int) -> Any:
        index = faiss.index_factory(dim, self.options.factory, faiss.METRIC_L2)
        if self.options.search:
            faiss.ParameterSpace().set_index_parameters(index, self.options.search)
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

    def _parameters(self, k: int, selector: Any) -> Any:
        # On the index, for those that take none with a search.
        if self.options.search:
            faiss.ParameterSpace().set_index_parameters(self._index, self.options.search)
        hnsw = isinstance(self._index, faiss.IndexHNSW)
        return _own(self._index, k, selector) if hnsw or selector is not None else None


def _own(index: Any, k: int, selector: Any) -> Any:
    """The search parameters that an index has, with a selector: FAISS has a type for each kind."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return faiss.SearchParametersPreTransform(index_params=_own(index.index, k, selector))
    if isinstance(index, faiss.IndexRefine):
        inner = _own(index.base_index, round(k * index.k_factor), selector)
        return faiss.IndexRefineSearchParameters(k_factor=index.k_factor, base_index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=index.nprobe, sel=selector)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=max(index.hnsw.efSearch, k), sel=selector)
    return faiss.SearchParameters(sel=selector)
