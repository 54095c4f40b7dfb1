"""The queries of a data set, searched in its gallery: of a training run, or of a retriever."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from calibration.config import CalibrationConfig, EvaluationConfig
from calibration.splits import SearchedSplits, warn_of_other_labels
from rcir import api, tracking
from rcir.config import from_plain
from rcir.data import (
    DataConfig,
    ImageSet,
    Splits,
    cluster_warning,
    data_root,
    load_splits,
    with_cluster,
    without_repeats,
)
from rcir.data.catalogue import find_dataset
from rcir.data.rejects import (
    REJECTS_FILE,
    find_unreadable,
    read_rejects,
    tolerate,
)
from rcir.data.relevance import same_relevance
from rcir.encoders.embedder import Embedder
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration, printable
from rcir.retrieval.retriever import Retriever
from rcir.runs.folder import QUERIES, RunFolder, TrainedOn, list_classes
from rcir.runs.results import digest_names
from rcir.terminal import console, working

CALIBRATION_REJECTS = "calibration-rejects.csv"  # the folder of a run has the training's own table

_print_line = partial(console.print, soft_wrap=True)


def search_run(
    config: CalibrationConfig, run: RunFolder, output: Path, embedder: Embedder
) -> SearchedSplits:
    """Search the data set of a training run, embedded by its encoder.

    Raises:
        InvalidData: the run is not finished; or it trained on what is to certify it
            (`rcir.runs.folder.TrainedOn.require_unseen`).
        InvalidImage: more images than `max_rejects` cannot be read.
        InvalidConfig: the queries have no such clusters.
        UntrustedFolder: the run names a class or a tracking store that is not allowed.
        TrackingUnavailable: the run in MLflow cannot be written to.
    """
    training = run.tracked
    training.require_active()  # fail now, not when the results are logged
    cluster = config.cluster or run.data.options.get("cluster")
    data = _queried_data(run.data, config, cluster)
    encoder, trained = run.encoder(), TrainedOn.read(run.path)
    rejects = read_rejects(run.path / REJECTS_FILE)
    splits = load_splits(data, _print_line, rejects)
    for name in (config.group, config.key):  # fail before anything is embedded
        if name is not None:
            for part in QUERIES:
                getattr(splits, part).attribute(name, "the queries")
    sets = [splits.gallery, splits.tuning, splits.calibration, splits.test]
    rejects |= (unread := find_unreadable(sets, run.preprocessing))
    table = output / CALIBRATION_REJECTS
    if line := tolerate(unread, sum(map(len, sets)), config.max_rejects, table):
        _print_line(printable(line))
    splits = _without_duplicates(splits.without(rejects))
    trained.require_unseen(splits)
    if warning := cluster_warning(splits, cluster):
        print(f"warning: {warning}", file=sys.stderr)
    if data.options.get("queries") == "new-labels":
        _warn_of_new_labels(splits, trained)
    retriever = Retriever.build(
        encoder,
        run.preprocessing,
        splits.gallery,
        config.depth,
        embedder=embedder,
        index=config.index,
        key=config.key,
    )
    data = replace(data, root=str(data_root(data)) if data.root else None)
    retriever.origin = {
        "data": asdict(data),
        "queries": _digests(splits),
        "run": run.mlflow_run,
        "group": config.group,
        "cluster": cluster,
        "key": config.key,
        "rejects": sorted(rejects),
    }
    searched = _search(retriever, data.name, splits, embedder)
    return replace(searched, training=training)


def search_data_set(config: EvaluationConfig) -> SearchedSplits:
    """Search the data set of a retriever that `rcir calibrate` made.

    Raises:
        InvalidData: the retriever does not say which queries it was calibrated with, or its data
            set now has other queries, or another gallery.
        NoRetriever, CorruptRetriever, StaleCalibration: of the retriever.
    """
    place = config.retriever
    retriever = api.load(place)
    origin = retriever.origin
    if not {"data", "queries"} <= origin.keys() or retriever.calibration is None:
        raise InvalidData(
            f"{place} does not name a data set to measure on, as those of `rcir calibrate` do: "
            "`rcir certify` measures vectors itself, on queries that it sets aside"
        )
    if retriever.calibration.sequential:
        raise InvalidData(
            f"calibration queries were added to {place}: the test queries of its data set may be "
            "among them"
        )
    if retriever.changes():
        raise StaleCalibration(f"{place} has changed: calibrate again")
    data = from_plain(DataConfig, origin["data"])
    splits = _without_duplicates(load_splits(data, _print_line, origin.get("rejects", ())))
    changed = None
    if not _has_gallery(retriever, splits.gallery):
        changed = f"another gallery than {place}"
    elif origin["queries"] != _digests(splits):
        changed = f"other queries than those that calibrated {place}"
    if changed is not None:
        raise InvalidData(
            f"{data.name} has {changed}: restore the data set's files, or calibrate again"
        )
    training = tracking.find_tracked_run(origin.get("run", ""))
    return replace(_search(retriever, data.name, splits, Embedder()), training=training)


def _search(
    retriever: Retriever, dataset: str, splits: Splits, embedder: Embedder
) -> SearchedSplits:
    """Search the queries of a data set.

    The origin of the retriever names the attributes that are their groups, clusters and keys.
    """
    group, cluster, key = (retriever.origin.get(name) for name in ("group", "cluster", "key"))
    results = []
    for name in QUERIES:
        images = getattr(splits, name)
        with warnings.catch_warnings():
            # `search_run` has warned of all splits at once.
            warnings.filterwarnings("ignore", "the queries come in clusters", UserWarning)
            results.append(retriever.search_labelled(images, group, embedder, cluster, key))
    tuning, calibration, test = results
    return SearchedSplits(
        retriever,
        dataset,
        tuning,
        calibration,
        test,
        calibration_ids=list(splits.calibration.ids),
        images=splits.test,
        data=splits,
    )


def _queried_data(data: DataConfig, config: CalibrationConfig, cluster: str | None) -> DataConfig:
    """Return the data of a training, with its queries divided as the calibration asks."""
    dataset = find_dataset(data.name)
    if config.cluster and dataset.splitter and "cluster" not in dataset.options_of_reader():
        raise InvalidConfig(
            f"cluster is {config.cluster!r}, but queries of {data.name} have no clusters"
        )
    data = with_cluster(data, cluster)
    if config.queries is not None:
        data = replace(data, options={**data.options, "queries": config.queries})
    return data


def _warn_of_new_labels(splits: Splits, trained: TrainedOn) -> None:
    warn_of_other_labels()
    if np.isin(list_classes(splits.calibration), trained.classes).any():
        print(
            "warning: the encoder was trained on labels of the calibration queries; guarantees "
            "for new labels are then for labels that trained it, too",
            file=sys.stderr,
        )


def _without_duplicates(splits: Splits) -> Splits:
    """Return the splits without queries that duplicate other images, and print their numbers."""
    with working("finding duplicate images", logged=True):
        different, left_out = without_repeats(splits)
    if any(left_out.values()):
        counts = ", ".join(f"{n} of the {name} queries" for name, n in left_out.items() if n)
        _print_line(f"left out as duplicates of other images: {counts}")
    return different


def _has_gallery(retriever: Retriever, gallery: ImageSet) -> bool:
    """Return True if the items of a retriever have these names and match the same queries."""
    return (
        retriever.ids.tolist() == list(gallery.ids)
        and retriever.relevance is not None
        and same_relevance(retriever.relevance, gallery.relevance)
    )


def _digests(splits: Splits) -> dict[str, str]:
    """Return a digest of the names of the queries of each split, in order."""
    return {name: digest_names(getattr(splits, name).ids) for name in QUERIES}
