"""The index that suits the vectors, by the share of exact neighbours that it finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.index.base import DEPTH, check_vectors, require_range
from rcir.index.faiss_indexes import FaissIndex, HnswIndex, HnswOptions, IvfPqIndex, IvfPqOptions
from rcir.index.flat import FlatIndex, FlatOptions, nearest
from rcir.index.table import places_of
from rcir.stored_vectors import batches


def exact_positions(
    vectors: NDArray[np.floating[Any]], queries: NDArray[np.float32], k: int
) -> NDArray[np.int64]:
    """(q, k) positions of the nearest of vectors (n, d), n >= k, which are read once, in batches.

    Example:
        >>> exact_positions(np.eye(3), np.eye(3, dtype=np.float32)[:1], 1)
        array([[0]])
    """
    heap = faiss.ResultHeap(len(queries), k)
    for rows in batches(*vectors.shape):
        batch = check_vectors(vectors[rows])
        distances, positions = nearest(queries, batch, min(k, len(batch)))
        heap.add_result(distances, positions + rows.start)
    heap.finalize()
    nearest_positions: NDArray[np.int64] = heap.I
    return nearest_positions


def recalls_of(positions: NDArray[np.int64], exact: NDArray[np.int64]) -> NDArray[np.float64]:
    """(q,) shares of the exact candidates of each query that are found at any rank.

    Args:
        positions, exact: (q, k) positions, each once in a row; -1 where there is none.

    Example:
        >>> recalls_of(np.array([[3, 1], [2, -1]]), np.array([[1, 3], [2, 0]]))
        array([1. , 0.5])
    """
    is_candidate = exact >= 0
    step = int(max(positions.max(initial=0), exact.max(initial=0))) + 1
    rows = step * np.arange(len(exact))[:, None]
    shared = np.isin(exact + rows, (positions + rows)[positions >= 0]) & is_candidate
    shares: NDArray[np.float64] = shared.sum(axis=1) / np.maximum(is_candidate.sum(axis=1), 1)
    return shares


def recall_of(positions: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Their mean over all queries.

    Example:
        >>> recall_of(np.array([[3, 1], [2, -1]]), np.array([[1, 3], [2, 0]]))
        0.75
    """
    return float(recalls_of(positions, exact).mean())


EXACT_UP_TO = 20_000  # vectors, of which an exact search takes a millisecond or two
_SAMPLE = 500  # vectors that ask, to measure recall
_CONFIDENT = 1.645  # standard errors below the mean that hold 95%
_WIDER = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # ef_search, as multiples of the depth
_PROBES = (8, 16, 32, 64, 128, 256)
_GIB = 1 << 30


@dataclass(frozen=True)
class AutoOptions:
    """The options of `AutoIndex`.

    Args:
        recall: share of the exact candidates that are to be found, above 0, at most 1.
        depth: number of candidates of which that is measured.
        memory_gib: GiB that the index may take in memory; 0 for no limit.
        random_seed: of the draw of vectors that ask.
    """

    recall: float = 0.99
    depth: int = DEPTH
    memory_gib: float = 0.0
    random_seed: int = 0

    def __post_init__(self) -> None:
        require_range(self, recall=(1e-9, 1), depth=(1, 1 << 20), memory_gib=(0, 1 << 20))
        require_range(self, random_seed=(0, (1 << 31) - 1))


class AutoIndex(FlatIndex):
    """Builds a `FlatIndex`, `HnswIndex` or `IvfPqIndex`, which is what is saved and named.

    The attribute `why` of what is built says in a sentence why it was chosen. Recall is measured by
    vectors of the gallery as queries, each left out of its own search, and has to reach what is
    asked for with 95% confidence. Only calibration shows how the index changes sets.

    Example:
        >>> index = AutoIndex.build(np.eye(3, dtype=np.float32), AutoOptions())
        >>> type(index).__name__, index.why
        ('FlatIndex', '3 vectors: exact search is fast up to 20000')
    """

    Options: Any = AutoOptions

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: Any) -> Any:
        """The index that suits vectors (n, d).

        Raises:
            InvalidData: these are not such vectors.
            InvalidConfig: no index of them fits into the memory.
        """
        if not isinstance(vectors, np.ndarray):
            vectors = check_vectors(vectors)
        index, why = _chosen(vectors, options)
        chosen: Any = index
        chosen.why = why
        return index


def _chosen(vectors: NDArray[Any], options: AutoOptions) -> tuple[Any, str]:
    n, dim = len(vectors), check_vectors(vectors[:1]).shape[1]
    limit = options.memory_gib * _GIB or np.inf
    flat = 4 * n * dim
    reason = f"{n} vectors"
    if n <= max(EXACT_UP_TO, options.depth) and flat <= limit:
        exact = FlatIndex.build(vectors, FlatOptions())
        return exact, f"{reason}: exact search is fast up to {EXACT_UP_TO}"
    rows = np.sort(
        np.random.default_rng(options.random_seed).choice(n, min(_SAMPLE, n), replace=False)
    )
    queries = check_vectors(vectors[rows])
    depth = min(options.depth + 1, n)
    truth = _others(exact_positions(vectors, queries, depth), rows)
    graph = HnswOptions()
    allowed = f"of {options.memory_gib:g} GiB allowed"
    if (needed := flat + 8 * n * (graph.M + 2)) <= limit:
        hnsw = HnswIndex.build(vectors, graph)
        wider = ({"ef_search": round(times * options.depth)} for times in _WIDER)
        recall, enough, best_hnsw = _tried(hnsw, wider, queries, rows, truth, options.recall)
        reason += f": hnsw finds {recall:.3f} of the nearest {options.depth}"
        if enough:
            return best_hnsw, (
                f"{reason} with ef_search {best_hnsw.options.ef_search}; at least "
                f"{options.recall:g} was asked for"
            )
        reason += f", with {options.recall:g} asked for"
    else:
        reason += f": hnsw would take {needed / _GIB:.3g} {allowed}"
    if flat <= limit:
        return FlatIndex.build(vectors, FlatOptions()), f"{reason}, so exact"
    reason += f"; vectors take {flat / _GIB:.3g} {allowed}"
    probed = IvfPqIndex.build(vectors, _codes(n, dim, limit))
    probes = ({"nprobe": nprobe} for nprobe in _PROBES)
    recall, enough, best_codes = _tried(probed, probes, queries, rows, truth, options.recall)
    reached = "" if enough else f", less than the {options.recall:g} asked for"
    return best_codes, (
        f"{reason}: ivf-pq finds {recall:.3f} of the nearest {options.depth} with nprobe "
        f"{best_codes.options.nprobe}{reached}"
    )


def _codes(n: int, dim: int, limit: float) -> IvfPqOptions:
    """Return the number of codes per vector that memory allows, at most one for two numbers."""
    nlist = int(2 ** np.clip(np.round(np.log2(4 * np.sqrt(n))), 4, 16))
    bytes_each = (limit - 4 * dim * (nlist + 256)) / max(n, 1) - 8
    divisors = [m for m in range(1, max(dim // 2, 1) + 1) if dim % m == 0 and m <= bytes_each]
    if not divisors:
        raise InvalidConfig(
            f"memory_gib {limit / _GIB:g} holds no index of {n} vectors of {dim} numbers: "
            "allow more"
        )
    return IvfPqOptions(nlist=nlist, m=max(divisors))


def _tried(
    index: FaissIndex,
    parameters: Iterable[dict[str, Any]],
    queries: NDArray[np.float32],
    rows: NDArray[np.int64],
    truth: NDArray[np.int64],
    target: float,
) -> tuple[float, bool, FaissIndex]:
    """The first search parameters that reach the target, or the last; with their recall, and
    whether they do.
    """
    for values in parameters:
        one = index.searching(**values)
        positions = _others(one.search(queries, truth.shape[1] + 1)[1], rows)
        recalls = recalls_of(positions, truth)
        error = recalls.std() / np.sqrt(len(recalls))
        enough = bool(recalls.mean() - _CONFIDENT * error >= target)
        if enough:
            break
    return float(recalls.mean()), enough, one


def _others(positions: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """(q, k - 1) of the positions (q, k), without that of the query itself."""
    return positions[~places_of(rows, positions)].reshape(len(positions), -1)
