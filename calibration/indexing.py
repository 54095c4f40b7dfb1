"""`rcir index`: another index of a retriever, compared with exact search."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.recalibration import save_tracked
from rcir.errors import InvalidConfig, InvalidData, as_option
from rcir.index import AttachedIndex, IndexConfig, build_index, recall_of
from rcir.index.faiss_indexes import FaissIndex
from rcir.retrieval.calibration import Calibration, CalibrationReport
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher
from rcir.risk import check_level, score
from rcir.risk.bounds import check_levels
from rcir.risk.losses import MISS
from rcir.risk.selection import SCORE_FUNCTIONS, cross_fitted_sizes, mean_sizes
from rcir.store.folder import check_place, locked
from rcir.terminal import working

MIN_TUNING_QUERIES = 5  # that compare indexes


@dataclass(frozen=True)
class MeasuredIndex:
    """An index, measured on the tuning queries.

    Attributes:
        config: its kind and options.
        recall: share of the candidates of exact search that it finds.
        seconds: search time per query.
        memory: bytes in memory; None if unknown.
        sizes: cross-fitted mean set size by alpha, if it could be certified.
    """

    config: IndexConfig
    recall: float
    seconds: float
    memory: int | None
    sizes: Mapping[float, float]


@dataclass(frozen=True)
class Reindexed:
    """A comparison of a retriever's new index with exact search; `str` gives a table.

    Attributes:
        alphas, delta: levels of the sizes.
        exact, chosen: the measured indexes, the same if the chosen one is exact.
        report: of the calibration through the chosen one.
        folder: of the retriever.
    """

    alphas: tuple[float, ...]
    delta: float
    exact: MeasuredIndex
    chosen: MeasuredIndex
    report: CalibrationReport
    folder: Path

    def __str__(self) -> str:
        columns = ("recall", "ms/query", "MiB", *(f"size, {alpha:g}" for alpha in self.alphas))
        indexes = {_index_name(index.config): index for index in (self.exact, self.chosen)}
        width = max(map(len, indexes)) + 2
        lines = [
            f"Measured on {self.report.n_tuning} tuning queries: mean sizes at each alpha, delta "
            f"{self.delta:g}.",
            " " * width + "  ".join(f"{column:>9}" for column in columns),
        ]
        for name, index in indexes.items():
            memory = "-" if index.memory is None else f"{index.memory / 2**20:.1f}"
            sizes = (f"{index.sizes[a]:.2f}" if a in index.sizes else "-" for a in self.alphas)
            cells = (f"{index.recall:.4f}", f"{1000 * index.seconds:.3f}", memory, *sizes)
            lines.append(f"{name:{width}}" + "  ".join(f"{cell:>9}" for cell in cells))
        lines.append(f"Calibrated through {_index_name(self.chosen.config)}:")
        return "\n".join([*lines, str(self.report)])


@working("comparing indexes", logged=True)
def reindex(
    folder: Path,
    config: IndexConfig,
    output: Path | None = None,
    alphas: Sequence[float] | None = None,
    delta: float | None = None,
) -> Reindexed:
    """Give a retriever in its folder another index, and calibrate with the queries it keeps.

    The tuning queries compare its sets with those of exact search. The calibration queries are
    searched through the new index alone. The folder that is written is locked meanwhile.

    Args:
        folder: of the retriever.
        config: the index.
        output: folder to write to; None for a new version in the retriever's folder.
        alphas, delta: levels of the compared sizes; None for those of the calibration.

    Raises:
        NoRetriever, CorruptRetriever: the folder contains no retriever, or a damaged one.
        InvalidConfig: of the index.
        InvalidRiskLevel: an alpha or delta is out of range.
        InvalidData: the index holds codes alone, or there are too few tuning queries.
        StaleCalibration: the retriever is not calibrated.
    """
    place = folder if output is None else output
    check_place(place)
    with locked(place):
        retriever = Retriever.load(folder)
        calibration = retriever.require_calibration()
        queries = calibration.tuning_queries
        if len(queries) < MIN_TUNING_QUERIES:
            raise InvalidData(
                f"{len(queries)} tuning queries are too few to compare indexes: calibrate with "
                f"more, and with {as_option('tuning', 'queries')}"
            )
        if isinstance(retriever.index, AttachedIndex):
            raise InvalidConfig(
                "the gallery is attached, and indexed by its engine: change that index, then "
                "attach the collection again"
            )
        if isinstance(retriever.index, FaissIndex) and retriever.index.lossy:
            raise InvalidData(
                "the index keeps codes of the vectors: build another from the vectors themselves, "
                "such as by `rcir certify --index`"
            )
        options = calibration.options
        levels = check_levels(alphas or options.alphas)
        delta = check_level("delta", options.delta if delta is None else delta)
        vectors = retriever.index.vectors_at(np.arange(len(retriever.index)))
        exact = build_index(vectors)
        truth = exact.search(queries.vectors, retriever.depth)[1]
        index = exact if config.kind == "flat" else build_index(vectors, config)
        exact_searcher, searcher = (
            replace(retriever.searcher, index=each) for each in (exact, index)
        )
        by_exact = chosen = _measure(exact_searcher, calibration, truth, levels, delta)
        if index is not exact:
            chosen = _measure(searcher, calibration, truth, levels, delta)
        retriever.searcher = searcher
        report = retriever.recalibrate()
        save_tracked(retriever, place)
        return Reindexed(levels, delta, by_exact, chosen, report, place)


def _measure(
    searcher: Searcher,
    calibration: Calibration,
    truth: NDArray[np.int64],
    alphas: tuple[float, ...],
    delta: float,
) -> MeasuredIndex:
    """Measure the index of a searcher; `truth` (n, k) are the candidates of exact search."""
    queries, index = calibration.tuning_queries, searcher.index
    started = time.perf_counter()
    positions = index.search(queries.vectors, searcher.depth)[1]
    seconds = (time.perf_counter() - started) / len(queries)
    rule = calibration.miss_rule
    searched = calibration.arrange(searcher, searcher.search_labelled(queries), rule)
    if rule.score_function.name in SCORE_FUNCTIONS:
        sizes = cross_fitted_sizes(searched, rule.score_function.name, alphas, delta)
    else:  # a label model is fitted on the gallery, not on these queries
        sizes = mean_sizes(score(rule.score_function, searched), MISS, alphas, delta)
    memory = getattr(index, "memory", None)
    return MeasuredIndex(IndexConfig.of(index), recall_of(positions, truth), seconds, memory, sizes)


def _index_name(config: IndexConfig) -> str:
    """Return the kind, and the options that differ from its defaults."""
    defaults: Mapping[str, Any] = vars(type(config.index_options())())
    changed = [f"{name}={v}" for name, v in config.options.items() if v != defaults[name]]
    return " ".join([config.kind, *changed])
