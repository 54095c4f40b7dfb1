"""Any other index of FAISS, by its factory string."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import faiss

from rcir.errors import InvalidConfig
from rcir.index.faiss_index import FaissIndex
from rcir.index.hnsw import seed_levels
from rcir.index.ranges import require_range

_FEWEST = 1024  # vectors to train on, more than codes of up to 10 bits need
_KINDS: dict[str, Callable[[str], float]] = {
    **{"nprobe": int, "max_codes": int, "quantizer_efSearch": int},
    **{"efSearch": int, "k_factor": float},
}


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
        """Those that `search` names, by name.

        Example:
            >>> FactoryOptions("IVF64,SQ8", search="nprobe=4").search_parameters()
            {'nprobe': 4}
        """
        found = {}
        for part in filter(None, self.search.split(",")):
            name, _, text = part.strip().partition("=")
            try:
                found[name] = _KINDS[name](text)
            except (KeyError, ValueError):
                raise InvalidConfig(
                    f"search is {self.search!r}, and {part!r} is no search parameter; give "
                    f"NAME=NUMBER, separated by commas, of {', '.join(_KINDS)}"
                ) from None
            if found[name] < 1:
                raise InvalidConfig(f"search: {name} is {found[name]}; at least 1")
        return found


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
    SEARCHED = ("search",)

    def _made(self, dim: int) -> Any:
        index = faiss.index_factory(dim, self.options.factory, faiss.METRIC_L2)
        taken = _taken(index)
        if other := [name for name in self.options.search_parameters() if name not in taken]:
            raise InvalidConfig(
                f"an index {self.options.factory!r} has no search parameter {', '.join(other)}; it "
                f"has {', '.join(sorted(taken)) or 'none'}"
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
        return _own(self._index, k, selector, given, widest)


def _taken(index: Any) -> set[str]:
    """Names of the search parameters that an index has."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        for number in range(index.chain.size()):
            transform = faiss.downcast_VectorTransform(index.chain.at(number))
            if isinstance(transform, faiss.NormalizationTransform):
                raise InvalidConfig(
                    "L2norm makes distances those of other vectors: bring the vectors to unit "
                    'length before, or take metric="cosine"'
                )
        return _taken(index.index)
    if isinstance(index, faiss.IndexRefine):
        return {"k_factor"} | _taken(index.base_index)
    if isinstance(index, faiss.IndexIVF):
        graph = isinstance(faiss.downcast_index(index.quantizer), faiss.IndexHNSW)
        return {"nprobe", "max_codes"} | ({"quantizer_efSearch"} if graph else set())
    return {"efSearch"} if isinstance(index, faiss.IndexHNSW) else set()


def _own(index: Any, k: int, selector: Any, given: dict[str, float], widest: bool) -> Any:
    """FAISS's search parameters for an index: it has a type for each kind."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = _own(index.index, k, selector, given, widest)
        return None if inner is None else faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        factor = given.get("k_factor", index.k_factor)
        inner = _own(index.base_index, round(k * factor), selector, given, widest)
        return faiss.IndexRefineSearchParameters(k_factor=factor, base_index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        found = {
            "nprobe": index.nlist if widest else min(given.get("nprobe", index.nprobe), index.nlist)
        }
        found["max_codes"] = given.get("max_codes", index.max_codes)
        if "quantizer_efSearch" in given:
            ef_search = max(given["quantizer_efSearch"], found["nprobe"])
            found["quantizer_params"] = faiss.SearchParametersHNSW(efSearch=ef_search)
        return faiss.SearchParametersIVF(sel=selector, **found)
    if isinstance(index, faiss.IndexHNSW):
        ef_search = index.ntotal if widest else given.get("efSearch", index.hnsw.efSearch)
        return faiss.SearchParametersHNSW(efSearch=max(int(ef_search), k), sel=selector)
    return None if selector is None else faiss.SearchParameters(sel=selector)
