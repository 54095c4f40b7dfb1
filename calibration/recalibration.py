"""A retriever's folder brought up to date: its gallery changed, its calibration made anew."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rcir import tracking
from rcir.data.relevance import WithinRadius
from rcir.data.vector_files import VectorTable, read_all_vectors
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.index import IsRemote, UnbuiltIndex
from rcir.retrieval import storage
from rcir.retrieval.calibration import CalibrationReport, known_digests
from rcir.retrieval.queries import Queries
from rcir.retrieval.retriever import Retriever

if TYPE_CHECKING:
    from rcir.serving.store import Reported


def recalibrate(
    folder: Path,
    add: Path | None = None,
    remove: Path | None = None,
    feedback: Path | None = None,
    since: datetime | None = None,
) -> CalibrationReport:
    """Change the gallery of a retriever in its folder, and calibrate with the queries it keeps.

    The folder is locked meanwhile: a second call waits, and changes what the first one saved.

    Where its calibration was tracked, a run of its own holds the new retriever in MLflow.

    Args:
        folder: of the retriever, which gets a new version.
        add: file of vectors that come into the gallery, see `rcir.data.vector_files`; for a
            retriever without an encoder.
        remove: file with the ids of those that go, one on each line.
        feedback: file of a server (`rcir serve --feedback`): the queries that it answered with this
            retriever, and that have feedback, replace the calibration queries. The tuning split
            stays. Use all queries of a period, or a random sample of them. A miss without a label
            counts as a query that matches nothing; a hit without one is refused. The number of
            queries that are used is printed.
        since: when those queries were asked at the earliest, such as since the camera was changed;
            in local time unless it says otherwise. Queries from before and after a change of what
            is asked together certify neither.

    Raises:
        NoRetriever, CorruptRetriever: the folder contains no retriever, or a damaged one.
        DataUnavailable: there is no such file.
        InvalidData: the items to add or remove, or the feedback, are unsuitable; or it is not known
            which queries some items match. The folder, and an index on a server, stay as they were.
        StaleCalibration: it is not calibrated, or such an index was changed by others.
        DataUnavailable: a server fails. What it had changed before is in the folder, which is to be
            recalibrated.
    """
    if since is not None and feedback is None:
        raise InvalidConfig("since is for the queries of feedback: name its file, too")
    with storage.locked(folder):
        return _recalibrate(folder, add, remove, feedback, since)


def _recalibrate(
    folder: Path,
    add: Path | None,
    remove: Path | None,
    feedback: Path | None,
    since: datetime | None,
) -> CalibrationReport:
    retriever = Retriever.load(folder)
    labelled = None if feedback is None else _labelled(folder, retriever, feedback, since)
    gone = None if remove is None else _ids(remove)
    added = None if add is None else read_all_vectors(add)
    # First without the index: a server's could not be changed back.
    rehearsed = copy(retriever)
    calibration = retriever.require_calibration()
    tuning, _ = calibration.queries_to_search(retriever.searcher)
    unbuilt: Any = UnbuiltIndex(len(retriever.index), tuning.vectors.shape[1])
    rehearsed.searcher.index = unbuilt
    _change(rehearsed, gone, added)
    calibration.queries_to_search(rehearsed.searcher)
    for change in ((gone, None), (None, added)):
        _change(retriever, *change)
        if isinstance(retriever.index, IsRemote) and change != (None, None):
            retriever.save(folder)
    report = retriever.recalibrate() if labelled is None else _calibrated(retriever, *labelled)
    save_recalibrated(retriever, folder)
    return report


def save_recalibrated(retriever: Retriever, folder: Path) -> None:
    """Save a retriever; if its calibration was tracked, log it in an MLflow run of its own, too."""
    tracked = _tracked(retriever, folder)
    with tracked.active() if tracked else nullcontext():
        if tracked is not None:
            retriever.origin["calibration"] = tracked.id
        retriever.save(folder)
        if tracked is not None:
            tracked.log_folder(storage.current_version(folder), "retriever")


def _labelled(
    folder: Path, retriever: Retriever, file: Path, since: datetime | None
) -> tuple[Queries, list[Any]]:
    """The queries that the retriever in a folder was asked, and their labels; None for a miss."""
    from rcir.serving.served import Folder
    from rcir.serving.store import Store

    if not file.is_file():
        raise DataUnavailable(f"there is no file {file}: name that of `rcir serve --feedback`")
    start = 0.0 if since is None else since.timestamp()
    store, version = Store(file), Folder(folder).version()
    found = store.reported(version, start)
    if found is None:
        asked = "" if since is None else f" since {since}"
        raise InvalidData(
            f"{file} holds no feedback on answers{asked} of {folder} as it is now: feedback speaks "
            "of the retriever that answered"
        )
    used = _new(retriever, found)
    used.require_labels_of_hits()
    print(
        f"feedback: {len(used.labels)} queries are used, of which {used.n_unlabelled_misses} are "
        "misses without a label and count as queries that match nothing; "
        f"{len(found.labels) - len(used.labels)} are left out (repeated, in the gallery, or used "
        f"for calibration before); {store.n_unreported(version, start)} answers have no feedback"
    )
    return used.queries, used.labels


def _new(retriever: Retriever, reported: Reported) -> Reported:
    """The queries that are new to a retriever, each once: others calibrate nothing."""
    calibration = retriever.require_calibration()
    if calibration.options.recurring:
        return reported
    rows = reported.distinct
    known = known_digests(retriever.searcher, calibration)
    rows = rows[~np.isin(reported.queries.identities[rows], known)]
    if not len(rows):
        raise InvalidData(
            "all queries with feedback are of the gallery, or tuned or calibrated the retriever "
            "before"
        )
    return reported[rows]


def _calibrated(retriever: Retriever, queries: Queries, labels: list[Any]) -> CalibrationReport:
    """Calibrate with other queries, in the way it was before."""
    calibration = retriever.require_calibration()
    options = calibration.options
    searcher = retriever.searcher
    relevance, searcher.label_names = searcher.gallery.reported_relevance(
        labels, searcher.label_names
    )
    tuning = calibration.tuning_queries
    return retriever.calibrate_splits(
        None if calibration.tuned_on_gallery else retriever.search_labelled(tuning),
        retriever.search_labelled(replace(queries, relevance=relevance)),
        options.score_function,
        bound=options.bound,
        alphas=options.alphas,
        delta=options.delta,
        recurring=options.recurring,
        query_uncertainty=calibration.uncertainty,
    )


def _ids(file: Path) -> list[str]:
    """One on each line that is not empty."""
    if not file.is_file():
        raise DataUnavailable(f"there is no file {file}")
    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidData(f"{file} is no text: give a file with an id on each line") from error
    return [line for line in lines if line]


def _tracked(retriever: Retriever, folder: Path) -> tracking.TrackedRun | None:
    """A run of its own below that of the training, if there is one in the tracking store."""
    run = retriever.origin.get("run")
    trained = tracking.find_tracked_run(run) if run else None
    if trained is None:
        return None
    from rcir.runs.folder import FOLDER_TAG

    tags = {FOLDER_TAG: str(folder.absolute()), "rcir.kind": "recalibration"}
    return tracking.start_run(f"{folder.name} (recalibration)", tags, trained)


def _change(retriever: Retriever, gone: list[str] | None, table: VectorTable | None) -> None:
    """Remove from the gallery, then add to it."""
    if gone is not None:
        retriever.remove(gone)
    if table is None:
        return
    if table.ids is None:
        raise InvalidData(f"{table.file} has no column id: name what comes into the gallery")
    labels: object = table.labels
    if table.places is not None and isinstance(retriever.relevance, WithinRadius):
        labels = WithinRadius(table.places, retriever.relevance.radius)
    retriever.add(table.vectors, table.ids, labels, table.uncertainty, table.model)
