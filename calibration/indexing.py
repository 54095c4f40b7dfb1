"""Another index for a calibrated retriever: built, compared by the tuning queries, calibrated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.progress import print_reason
from calibration.recalibration import save_recalibrated
from rcir.errors import InvalidData
from rcir.index import HoldsVectors, Index, IndexConfig, build_index, dropped_on_error
from rcir.index.auto import recall_of
from rcir.index.faiss_indexes import FaissIndex
from rcir.retrieval import storage
from rcir.retrieval.calibration import CalibrationReport
from rcir.retrieval.retriever import Retriever
from rcir.risk import check_level
from rcir.risk.bounds import check_levels
from rcir.risk.selection import cross_fitted_sizes

NO_LARGER = 1.05  # times the sets of exact search
PROBED = (4, 16, 64)
DEEPER = (1, 2, 4)  # ef_search, as multiples of the depth


@dataclass(frozen=True)
class MeasuredIndex:
    """An index, as the tuning queries see it.

    Attributes:
        config: its kind and options.
        recall: share of the candidates of exact search that it finds.
        seconds: of a search, of each query.
        memory: bytes that it takes in memory; None if it does not say.
        sizes: mean set size by alpha, cross-fitted; without those that could not be certified.
    """

    config: IndexConfig
    recall: float
    seconds: float
    memory: int | None
    sizes: Mapping[float, float]


@dataclass(frozen=True)
class IndexChoice:
    """Indexes beside each other, the first of them exact, and the one that was taken.

    Attributes:
        alphas, delta: levels of the sizes.
        measured: of each.
        number: which was taken.
        report: of the calibration through it.
        folder: where the retriever lies.
    """

    alphas: tuple[float, ...]
    delta: float
    measured: tuple[MeasuredIndex, ...]
    number: int
    report: CalibrationReport
    folder: Path

    def __str__(self) -> str:
        levels = (f"size, {alpha:g}" for alpha in self.alphas)
        columns = ("recall", "ms/query", "MiB", *levels)
        named = [_index_name(each.config) for each in self.measured]
        width = max(map(len, named)) + 2
        lines = [
            f"Measured on {self.report.n_tuning} tuning queries: mean sizes at each alpha, delta "
            f"{self.delta:g}.",
            " " * width + "  ".join(f"{column:>9}" for column in columns),
        ]
        for number, (name, each) in enumerate(zip(named, self.measured, strict=True)):
            memory = "-" if each.memory is None else f"{each.memory / 2**20:.1f}"
            sizes = (f"{each.sizes[a]:.2f}" if a in each.sizes else "-" for a in self.alphas)
            cells = (f"{each.recall:.4f}", f"{1000 * each.seconds:.3f}", memory, *sizes)
            mark = "* " if number == self.number else "  "
            lines.append(f"{mark}{name:{width - 2}}" + "  ".join(f"{cell:>9}" for cell in cells))
        lines.append("* taken, and calibrated through with the calibration queries:")
        return "\n".join([*lines, str(self.report)])


def reindex(
    folder: Path,
    config: IndexConfig | None = None,
    output: Path | None = None,
    alphas: Sequence[float] | None = None,
    delta: float | None = None,
) -> IndexChoice:
    """Give a retriever in its folder another index, and calibrate with the queries it keeps.

    Without an index named, several are compared, and the fastest is taken whose sets are at most 5%
    larger than those of exact search, at every level that exact search certifies. That is decided
    by the tuning queries alone: the calibration queries are searched through the index that was
    taken and no other, so that its guarantee needs no correction for the choice. The folder that is
    written is locked meanwhile.

    Args:
        folder: of the retriever.
        config: the index; None to compare several.
        output: folder to write to; unless given, the retriever's own gets a new version.
        alphas, delta: levels of the sizes that are compared; those that the retriever was
            calibrated at, unless given.

    Raises:
        NoRetriever, CorruptRetriever: the folder contains no retriever, or a damaged one.
        InvalidConfig: of the index.
        InvalidRiskLevel: an alpha or delta is out of range.
        InvalidData: the index holds no vectors, or there are too few tuning queries; or exact
            search certifies none of the levels, so that there is nothing to compare by.
        StaleCalibration: the retriever is not calibrated.
    """
    place = folder if output is None else output
    storage.check_place(place)
    with storage.locked(place):
        return _reindex(folder, config, place, alphas, delta)


def _reindex(
    folder: Path,
    config: IndexConfig | None,
    place: Path,
    alphas: Sequence[float] | None,
    delta: float | None,
) -> IndexChoice:
    retriever = Retriever.load(folder)
    calibration = retriever.require_calibration()
    queries = calibration.tuning_queries
    if calibration.tuned_on_gallery:
        raise InvalidData(
            "indexes are compared on tuning queries, and the gallery's items tuned this retriever: "
            'calibrate with tuning="queries"'
        )
    if len(queries) < 5:
        raise InvalidData(f"{len(queries)} tuning queries compare nothing: calibrate with more")
    if not isinstance(retriever.index, HoldsVectors):
        kind = IndexConfig.of(retriever.index).kind
        raise InvalidData(f"an index of kind {kind} gives no vectors back to build another of")
    if isinstance(retriever.index, FaissIndex) and retriever.index.lossy:
        raise InvalidData(
            "the index keeps codes of the vectors, not the vectors: build another from the vectors "
            "themselves, such as by `rcir certify --index`"
        )
    known = calibration.options
    levels = check_levels(alphas or known.alphas)
    delta = check_level("delta", known.delta if delta is None else delta)
    vectors = retriever.index.vectors_at(np.arange(len(retriever.index)))
    exact = build_index(vectors)
    truth = exact.search(queries.vectors, retriever.depth)[1]
    measured, best, taken = [], (np.inf, 0), exact
    for index in chain([exact], _indexes(vectors, config, retriever.depth)):
        with dropped_on_error(index):
            one = _measured(retriever, index, truth, levels, delta)
        measured.append(one)
        if config is None and not measured[0].sizes:
            raise InvalidData(
                f"{len(queries)} tuning queries certify none of the alphas "
                f"{', '.join(f'{alpha:g}' for alpha in levels)} through exact search, by which "
                "indexes are compared: give a larger one (--alpha), or name one (--index)"
            )
        named = config is not None and len(measured) > 1
        fits = _no_larger(one.sizes, measured[0].sizes)
        if named or (config is None and fits and one.seconds < best[0]):
            best, taken = (one.seconds, len(measured) - 1), index
    retriever.searcher.index = taken
    print_reason(taken)
    with dropped_on_error(taken):
        report = retriever.recalibrate()
    save_recalibrated(retriever, place)
    return IndexChoice(levels, delta, tuple(measured), best[1], report, place)


def _no_larger(sizes: Mapping[float, float], exact: Mapping[float, float]) -> bool:
    """Return whether sizes are about as small as those of exact search, at all its levels."""
    return all(sizes.get(alpha, np.inf) <= NO_LARGER * size for alpha, size in exact.items())


def _indexes(
    vectors: NDArray[np.float32], config: IndexConfig | None, depth: int
) -> Iterator[Index]:
    """The index that is named, or several; none that is the exact one."""
    if config is not None:
        if config.kind != "flat":
            yield build_index(vectors, config)
        return
    n, dim = vectors.shape
    nlist = int(2 ** np.clip(np.round(np.log2(4 * np.sqrt(n))), 2, 16))
    m = max(m for m in range(1, max(dim // 2, 1) + 1) if dim % m == 0)
    probed = [{"nprobe": nprobe} for nprobe in PROBED if nprobe < nlist]
    kinds: list[tuple[str, dict[str, Any], list[dict[str, int]]]] = [
        ("hnsw", {}, [{"ef_search": times * depth} for times in DEEPER]),
        ("ivf", {"nlist": nlist}, probed),
        ("ivf-pq", {"nlist": nlist, "m": m}, probed),
    ]
    for kind, options, searches in kinds:
        built = build_index(vectors, IndexConfig(kind, options))
        assert isinstance(built, FaissIndex)
        for parameters in searches:
            yield built.searching(**parameters)


def _measured(
    retriever: Retriever,
    index: Index,
    truth: NDArray[np.int64],
    alphas: tuple[float, ...],
    delta: float,
) -> MeasuredIndex:
    calibration, other = retriever.require_calibration(), copy(retriever)
    queries = calibration.tuning_queries
    other.searcher.index = index
    started = time.perf_counter()
    found = index.search(queries.vectors, retriever.depth)[1]
    seconds = (time.perf_counter() - started) / len(queries)
    searched = other.search_labelled(replace(queries))
    name = calibration.main.score_function.name
    sizes = cross_fitted_sizes(searched, name, alphas, delta)
    memory = getattr(index, "memory", None)
    return MeasuredIndex(IndexConfig.of(index), recall_of(found, truth), seconds, memory, sizes)


def _index_name(config: IndexConfig) -> str:
    """The kind, and the options that are not its defaults."""
    defaults: Mapping[str, Any] = vars(type(config.index_options())())
    given = [f"{name}={v}" for name, v in config.options.items() if v != defaults[name]]
    return " ".join([config.kind, *given])
