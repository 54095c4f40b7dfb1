"""`rcir recalibrate`: another gallery, or calibration queries from feedback."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from rcir import tracking
from rcir.data.relevance import WithinRadius
from rcir.data.tables import missing_column, stream_lines
from rcir.data.vector_files import VectorTable, read_all_vectors
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.retrieval.calibration import CalibrationReport, known_digests
from rcir.retrieval.queries import Queries
from rcir.retrieval.retriever import Retriever
from rcir.runs.folder import FOLDER_TAG
from rcir.store.folder import current_version, locked
from rcir.terminal import working


@working("recalibrating", logged=True)
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
            some items are unknown. The folder is not changed.
        StaleCalibration: it is not calibrated, or an attached gallery was changed.
        DataUnavailable: there is no such file, or an attached gallery is unavailable.
    """
    if since is not None and feedback is None:
        raise InvalidConfig("since requires a feedback file")
    with locked(folder):
        retriever = Retriever.load(folder)
        reported = None if feedback is None else _read_feedback(folder, retriever, feedback, since)
        removed = None if remove is None else _read_ids(remove)
        options = retriever.searcher.options
        column = options.cluster if options.clusters == "passed" else None
        key = options.key if retriever.searcher.gallery.parts else None
        added = None if add is None else read_all_vectors(add, cluster=column, key=key)
        calibration = retriever.require_calibration()
        _change(retriever, removed, added)
        calibration.queries_to_search(retriever.searcher)  # raises if they cannot be
        if reported is None:
            report = retriever.recalibrate()
        else:
            report = _calibrate_on(retriever, *reported)
        save_tracked(retriever, folder)
    return report


def save_tracked(retriever: Retriever, folder: Path) -> None:
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
    queries = queries.with_population(relevance, groups=queries.keys)
    options = dict(vars(calibration.options_to_repeat)) | {"seed": None}
    options["query_uncertainty"] = calibration.uncertainty
    options["unlabelled_misses"] = None in labels
    if (own := options.pop("own")) is not None:
        options["score_function"] = own
    return retriever.calibrate_splits(tuning, retriever.search_labelled(queries), **options)


def _read_ids(file: Path) -> list[str]:
    """Return the non-empty lines of a file."""
    if not file.is_file():
        raise DataUnavailable(f"there is no file {file}")
    return [name for line in stream_lines(file) if (name := line.rstrip("\r\n"))]


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
        keys=table.key,
    )
