"""A calibrated retriever with another gallery or index, calibrated again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir import tracking
from rcir.data.relevance import WithinRadius
from rcir.data.tables import missing_column, read_text
from rcir.data.vector_files import VectorTable, read_all_vectors
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, as_option
from rcir.index import (
    HoldsVectors,
    Index,
    IndexConfig,
    IsRemote,
    UnbuiltIndex,
    build_index,
    dropped_on_error,
    recall_of,
)
from rcir.index.faiss_indexes import FaissIndex
from rcir.retrieval.calibration import CalibrationReport, known_digests
from rcir.retrieval.queries import Queries
from rcir.retrieval.retriever import Retriever
from rcir.risk import check_level
from rcir.risk.bounds import check_levels
from rcir.risk.selection import cross_fitted_sizes
from rcir.runs.folder import FOLDER_TAG
from rcir.store.folder import check_place, current_version, locked

MIN_TUNING_QUERIES = 5  # that compare indexes


def recalibrate(
    folder: Path,
    add: Path | None = None,
    remove: Path | None = None,
    feedback: Path | None = None,
    since: datetime | None = None,
) -> CalibrationReport:
    """Change the gallery of a retriever in its folder, and calibrate it again.

    The folder is locked meanwhile: a second call waits, and changes what the first one saved. If
    the training was tracked, the new retriever is logged in an MLflow run of its own.

    Args:
        folder: of the retriever, which gets a new version.
        add: file of vectors to add to the gallery, see `rcir.data.vector_files`; for a retriever
            without an encoder.
        remove: file with the ids of the items to remove, one on each line.
        feedback: file of a server (`rcir serve --feedback`). The queries that it answered with this
            retriever and that have feedback replace the calibration queries; the tuning split
            stays. Use all queries of a period, or a random sample of them. A miss without a label
            counts as a query that matches nothing; a hit without one is refused. The numbers of
            queries are printed.
        since: earliest time of these queries, in local time without a zone. Queries from before and
            after a change together represent neither period.

    Raises:
        NoRetriever, CorruptRetriever: the folder contains no retriever, or a damaged one.
        InvalidData: the items to add or remove, or the feedback, are unsuitable, or the matches of
            some items are unknown. The folder, and an index on a server, are not changed.
        StaleCalibration: it is not calibrated, or others changed the index on a server.
        DataUnavailable: there is no such file, or a server fails; what it changed before is in the
            folder, which has to be calibrated again.
    """
    if since is not None and feedback is None:
        raise InvalidConfig("since requires a feedback file")
    with locked(folder):
        retriever = Retriever.load(folder)
        reported = None if feedback is None else _read_feedback(folder, retriever, feedback, since)
        removed = None if remove is None else _read_ids(remove)
        options = retriever.searcher.options
        column = options.cluster if options.clusters == "passed" else None
        added = None if add is None else read_all_vectors(add, column)
        # The first attempt has no index, because changes on a server cannot be undone.
        rehearsal = copy(retriever)
        calibration = retriever.require_calibration()
        tuning, _ = calibration.queries_to_search(retriever.searcher)
        unbuilt: Any = UnbuiltIndex(len(retriever.index), tuning.vectors.shape[1])
        rehearsal.searcher = replace(rehearsal.searcher, index=unbuilt)
        _change(rehearsal, removed, added)
        calibration.queries_to_search(rehearsal.searcher)
        for change in ((removed, None), (None, added)):
            _change(retriever, *change)
            if isinstance(retriever.index, IsRemote) and change != (None, None):
                retriever.save(folder)
        if reported is None:
            report = retriever.recalibrate()
        else:
            report = _calibrate_on(retriever, *reported)
        _save(retriever, folder)
    return report


def _save(retriever: Retriever, folder: Path) -> None:
    """Save a retriever; if its training was tracked, log it in an MLflow run of its own, too."""
    training = retriever.origin.get("run")
    parent = tracking.find_tracked_run(training) if training else None
    if parent is None:
        retriever.save(folder)
        return
    tags = {FOLDER_TAG: str(folder.absolute()), tracking.KIND_TAG: "recalibration"}
    run = tracking.start_run(f"{folder.name} (recalibration)", tags, parent)
    with run.active():
        retriever.origin["calibration"] = run.id
        retriever.save(folder)
        run.log_folder(current_version(folder), "retriever")


def _read_feedback(
    folder: Path, retriever: Retriever, file: Path, since: datetime | None
) -> tuple[Queries, list[Any]]:
    """Return the queries with feedback on answers of a retriever, and their labels or None."""
    from rcir.serving.sources import Folder
    from rcir.serving.store import Store

    if not file.is_file():
        raise DataUnavailable(f"there is no file {file}: name that of `rcir serve --feedback`")
    start = 0.0 if since is None else since.timestamp()
    store, version = Store(file), Folder(folder).version()
    reports = store.reported(version, start)
    if reports is None:
        after = "" if since is None else f" since {since}"
        raise InvalidData(f"{file} has no feedback on answers{after} of the present {folder}")
    calibration = retriever.require_calibration()
    known = known_digests(retriever.searcher, calibration)
    used = reports.new(known, calibration.options.recurring)
    if not used.labels:
        raise InvalidData(
            "all queries with feedback are of the gallery, or tuned or calibrated the retriever "
            "before"
        )
    used.require_labels_of_hits()
    print(
        f"feedback: {len(used.labels)} queries are used, of which {used.n_unlabelled_misses} are "
        "misses without a label and count as queries that match nothing; "
        f"{len(reports.labels) - len(used.labels)} are left out (repeated, in the gallery, or used "
        f"for calibration before); {store.n_unreported(version, start)} answers have no feedback"
    )
    return used.queries, used.labels


def _calibrate_on(retriever: Retriever, queries: Queries, labels: list[Any]) -> CalibrationReport:
    """Calibrate with other queries and the same options."""
    calibration, searcher = retriever.require_calibration(), retriever.searcher
    relevance, names = searcher.gallery.reported_relevance(labels, searcher.label_names)
    retriever.searcher = searcher.with_label_names(names)
    tuning = None
    if not calibration.tuned_on_gallery:
        tuning = retriever.search_labelled(calibration.tuning_queries)
    queries = queries.with_population(relevance)
    options = replace(calibration.options, query_uncertainty=calibration.uncertainty, seed=None)
    return retriever.calibrate_splits(tuning, retriever.search_labelled(queries), **vars(options))


def _read_ids(file: Path) -> list[str]:
    """Return the non-empty lines of a file."""
    if not file.is_file():
        raise DataUnavailable(f"there is no file {file}")
    return [line for line in read_text(file).splitlines() if line]


def _change(retriever: Retriever, removed: list[str] | None, table: VectorTable | None) -> None:
    """Remove from the gallery, then add to it."""
    if removed is not None:
        retriever.remove(removed)
    if table is None:
        return
    if table.ids is None:
        raise missing_column(table.file, "id, the names of new items", table.columns)
    labels: object = table.labels
    if table.places is not None and isinstance(retriever.relevance, WithinRadius):
        labels = WithinRadius(table.places, retriever.relevance.radius)
    clusters = table.cluster if retriever.searcher.options.clusters == "passed" else None
    retriever.add(
        table.vectors,
        table.ids,
        labels,
        uncertainty=table.uncertainty,
        model=table.model,
        clusters=clusters,
    )


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
        InvalidData: the index holds no vectors, or there are too few tuning queries.
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
        lossy = isinstance(retriever.index, FaissIndex) and retriever.index.lossy
        if lossy or not isinstance(retriever.index, HoldsVectors):
            raise InvalidData(
                "the index keeps no vectors, or codes of the vectors: build another from the "
                "vectors themselves, such as by `rcir certify --index`"
            )
        options = calibration.options
        levels = check_levels(alphas or options.alphas)
        delta = check_level("delta", options.delta if delta is None else delta)
        vectors = retriever.index.vectors_at(np.arange(len(retriever.index)))
        exact = build_index(vectors)
        truth = exact.search(queries.vectors, retriever.depth)[1]
        index = exact if config.kind == "flat" else build_index(vectors, config)
        with dropped_on_error(index):
            by_exact = chosen = _measure(retriever, exact, truth, levels, delta)
            if index is not exact:
                chosen = _measure(retriever, index, truth, levels, delta)
            retriever.searcher = replace(retriever.searcher, index=index)
            report = retriever.recalibrate()
        _save(retriever, place)
        return Reindexed(levels, delta, by_exact, chosen, report, place)


def _measure(
    retriever: Retriever,
    index: Index,
    truth: NDArray[np.int64],
    alphas: tuple[float, ...],
    delta: float,
) -> MeasuredIndex:
    calibration = retriever.require_calibration()
    queries = calibration.tuning_queries
    retriever.searcher = replace(retriever.searcher, index=index)
    started = time.perf_counter()
    positions = index.search(queries.vectors, retriever.depth)[1]
    seconds = (time.perf_counter() - started) / len(queries)
    searched = retriever.search_labelled(queries)
    name = calibration.miss_rule.score_function.name
    sizes = cross_fitted_sizes(searched, name, alphas, delta)
    memory = getattr(index, "memory", None)
    return MeasuredIndex(IndexConfig.of(index), recall_of(positions, truth), seconds, memory, sizes)


def _index_name(config: IndexConfig) -> str:
    """Return the kind, and the options that differ from its defaults."""
    defaults: Mapping[str, Any] = vars(type(config.index_options())())
    changed = [f"{name}={v}" for name, v in config.options.items() if v != defaults[name]]
    return " ".join([config.kind, *changed])
