"""Another index for a calibrated retriever: built, compared with exact search, calibrated."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
class Reindexed:
    """A retriever with another index; `str` compares this with exact search in a table.

    Attributes:
        alphas, delta: levels of the sizes.
        exact, chosen: the measured indexes; the same where the chosen one is exact.
        report: of the calibration through the chosen one.
        folder: where the retriever lies.
    """

    alphas: tuple[float, ...]
    delta: float
    exact: MeasuredIndex
    chosen: MeasuredIndex
    report: CalibrationReport
    folder: Path

    def __str__(self) -> str:
        columns = ("recall", "ms/query", "MiB", *(f"size, {alpha:g}" for alpha in self.alphas))
        measured = {_index_name(each.config): each for each in (self.exact, self.chosen)}
        width = max(map(len, measured)) + 2
        lines = [
            f"Measured on {self.report.n_tuning} tuning queries: mean sizes at each alpha, delta "
            f"{self.delta:g}.",
            " " * width + "  ".join(f"{column:>9}" for column in columns),
        ]
        for name, each in measured.items():
            memory = "-" if each.memory is None else f"{each.memory / 2**20:.1f}"
            sizes = (f"{each.sizes[a]:.2f}" if a in each.sizes else "-" for a in self.alphas)
            cells = (f"{each.recall:.4f}", f"{1000 * each.seconds:.3f}", memory, *sizes)
            lines.append(f"{name:{width}}" + "  ".join(f"{cell:>9}" for cell in cells))
        lines.append(f"Calibrated through {_index_name(self.chosen.config)}:")
        return "\n".join([*lines, str(self.report)])


def reindex(
    folder: Path,
    config: IndexConfig | None = None,
    output: Path | None = None,
    alphas: Sequence[float] | None = None,
    delta: float | None = None,
) -> Reindexed:
    """Give a retriever in its folder another index, and calibrate with the queries it keeps.

    The tuning queries compare its sets with those of exact search. The calibration queries are
    searched through the new index alone. The folder that is written is locked meanwhile.

    Args:
        folder: of the retriever.
        config: the index; None for the one that `AutoIndex` chooses.
        output: folder to write to; unless given, the retriever's own gets a new version.
        alphas, delta: levels of the sizes that are compared; those that the retriever was
            calibrated at, unless given.

    Raises:
        NoRetriever, CorruptRetriever: the folder contains no retriever, or a damaged one.
        InvalidConfig: of the index.
        InvalidRiskLevel: an alpha or delta is out of range.
        InvalidData: the index holds no vectors, or there are too few tuning queries.
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
) -> Reindexed:
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
    if config is None:
        config = IndexConfig("auto", {"depth": retriever.depth})
    index = exact if config.kind == "flat" else build_index(vectors, config)
    with dropped_on_error(index):
        by_exact = _measured(retriever, exact, truth, levels, delta)
        chosen = by_exact
        if IndexConfig.of(index).kind != "flat":
            chosen = _measured(retriever, index, truth, levels, delta)
        retriever.searcher.index = index
        print_reason(index)
        report = retriever.recalibrate()
    save_recalibrated(retriever, place)
    return Reindexed(levels, delta, by_exact, chosen, report, place)


def _measured(
    retriever: Retriever,
    index: Index,
    truth: NDArray[np.int64],
    alphas: tuple[float, ...],
    delta: float,
) -> MeasuredIndex:
    calibration = retriever.require_calibration()
    queries = calibration.tuning_queries
    retriever.searcher.index = index
    started = time.perf_counter()
    found = index.search(queries.vectors, retriever.depth)[1]
    seconds = (time.perf_counter() - started) / len(queries)
    searched = retriever.search_labelled(replace(queries))
    name = calibration.main.score_function.name
    sizes = cross_fitted_sizes(searched, name, alphas, delta)
    memory = getattr(index, "memory", None)
    return MeasuredIndex(IndexConfig.of(index), recall_of(found, truth), seconds, memory, sizes)


def _index_name(config: IndexConfig) -> str:
    """The kind, and the options that are not its defaults."""
    defaults: Mapping[str, Any] = vars(type(config.index_options())())
    given = [f"{name}={v}" for name, v in config.options.items() if v != defaults[name]]
    return " ".join([config.kind, *given])
