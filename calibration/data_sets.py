"""Sources with the queries of a data set: a training run, or a retriever that was calibrated."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from calibration.config import CalibrationConfig, EvaluationConfig
from calibration.progress import embedding, step
from calibration.sources import SearchedSplits, Source, warn_of_other_labels
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
from rcir.data.preprocessing import Preprocessing
from rcir.data.rejects import (
    REJECTS_FILE,
    read_rejects,
    tolerate,
    unreadable,
)
from rcir.data.relevance import same_relevance
from rcir.encoders.embedder import Embedder
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration, printable
from rcir.retrieval.retriever import Retriever
from rcir.runs import folder as runs
from rcir.runs.folder import QUERIES, TrainedOn, classes_of
from rcir.runs.results import names_digest
from rcir.terminal import console

CALIBRATION_REJECTS = "calibration-rejects.csv"  # the folder of a run has the training's own table

_print_line = partial(console.print, soft_wrap=True)


class DataSetSource(Source):
    """The queries of a data set, and those of another one; a subclass opens them."""

    _data: DataConfig
    _splits: Splits
    _outside: ImageSet | None
    _embedder: Embedder

    def search(self, retriever: Retriever) -> SearchedSplits:
        """See `Source`; the origin of the retriever names the groups and clusters of queries."""
        splits, results = self._splits, []
        group, cluster = (retriever.origin.get(name) for name in ("group", "cluster"))
        with self._embedder.open() as embedder:
            for name in QUERIES:
                images = getattr(splits, name)
                with (
                    embedding(f"{name} queries", images, embedder) as watched,
                    warnings.catch_warnings(),
                ):
                    # `TrainedRun.open` has warned of all splits at once.
                    warnings.filterwarnings("ignore", "the queries come in clusters", UserWarning)
                    results.append(retriever.search_labelled(images, group, watched, cluster))
            outside = None
            if self._outside is not None:
                title = "out-of-distribution queries"
                with embedding(title, self._outside, embedder) as watched:
                    outside = retriever.search(self._outside.images, watched)
        tuning, calibration, test = results
        return SearchedSplits(
            self._data.name,
            tuning,
            calibration,
            test,
            calibration_ids=list(splits.calibration.ids),
            images=splits.test,
            outside=outside,
            splits=splits,
        )


class TrainedRun(DataSetSource):
    """The encoder of a training run, with the data set that it was trained on.

    Embeddings are kept in the output until the retriever is saved.
    """

    kind = "calibration"
    config: CalibrationConfig

    def __init__(self, config: CalibrationConfig, output: Path) -> None:
        self.config, self._output = config, output
        self._embedder = Embedder(config.num_workers, config.use_gpu, output / "embeddings")

    def open(self) -> Retriever:
        """Build the retriever.

        Raises:
            InvalidData: there is no such run, or it is not finished; or it trained on what is to
                certify it (`rcir.runs.folder.TrainedOn.require_unseen`).
            InvalidImage: more images than `max_rejects` cannot be read.
            InvalidConfig: there is no GPU to use.
            UntrustedFolder: the run names a class or a tracking store that is not allowed.
            TrackingUnavailable: the run in MLflow cannot be written to.
        """
        config, run = self.config, runs.find_run(self.config.run)
        self.training = run.tracked
        self.training.require_active()  # fail now, not when the results are logged
        dataset = find_dataset(run.data.name)
        if config.cluster and dataset.splitter and "cluster" not in dataset.options_of_reader():
            raise InvalidConfig(
                f"cluster is {config.cluster!r}, but queries of {run.data.name} have no clusters"
            )
        cluster = config.cluster or run.data.options.get("cluster")
        data = with_cluster(run.data, cluster)
        if config.queries is not None:
            data = replace(data, options={**data.options, "queries": config.queries})
        encoder, trained = run.encoder(), TrainedOn.read(run.path)
        rejects = read_rejects(run.path / REJECTS_FILE)
        splits = load_splits(data, _print_line, rejects)
        for attributes in (getattr(splits, name).attributes for name in QUERIES):
            if config.group is not None and config.group not in attributes:
                names = ", ".join(attributes) or "none"
                raise InvalidData(
                    f"the queries have no attribute {config.group!r}; they have {names}"
                )
        outside = images_outside(run.data, config.ood)
        rejects |= self._unreadable(splits, outside, run.preprocessing)
        splits = _without_duplicates(splits.without(rejects))
        trained.require_unseen(splits)
        if warning := cluster_warning(splits, cluster):
            print(f"warning: {warning}", file=sys.stderr)
        if data.options.get("queries") == "new-labels":
            _warn_of_new_labels(splits, trained)
        self._data, self._splits = data, splits
        self._outside = None if outside is None else outside.without(rejects)
        with embedding("gallery", splits.gallery, self._embedder) as watched:
            retriever = Retriever.build(
                encoder, run.preprocessing, splits.gallery, config.depth, watched, config.index
            )
        data = replace(data, root=str(data_root(data)) if data.root else None)
        retriever.origin = {
            "data": asdict(data),
            "queries": _digests(splits),
            "run": run.mlflow_run,
            "group": config.group,
            "cluster": cluster,
            "rejects": sorted(rejects),
        }
        return retriever

    def _unreadable(
        self, splits: Splits, outside: ImageSet | None, preprocessing: Preprocessing
    ) -> dict[str, str]:
        """Return ids and reasons of the images that cannot be read; raise if they are too many."""
        parts = [splits.gallery, splits.tuning, splits.calibration, splits.test]
        parts += [] if outside is None else [outside]
        with step("unreadable images"):
            rejects = unreadable(parts, preprocessing)
        n, table = sum(map(len, parts)), self._output / CALIBRATION_REJECTS
        if line := tolerate(rejects, n, self.config.max_rejects, table):
            _print_line(printable(line))
        return rejects

    def close(self) -> None:
        """See `Source`."""
        self._embedder.clear()


class CalibratedRetriever(DataSetSource):
    """A retriever that `rcir calibrate` made, with the queries of its data set."""

    kind = "evaluation"
    config: EvaluationConfig

    def __init__(self, config: EvaluationConfig) -> None:
        self.config = config
        self._embedder = Embedder()

    def open(self) -> Retriever:
        """Load the retriever and its data set.

        Raises:
            InvalidConfig: `ood` is its own data set.
            InvalidData: the retriever does not say which queries it was calibrated with, or its
                data set now has other queries, or another gallery.
            NoRetriever, CorruptRetriever, StaleCalibration: of the retriever.
        """
        place = self.config.retriever
        retriever = api.load(place)
        origin = retriever.origin
        if not {"data", "queries"} <= origin.keys() or retriever.calibration is None:
            raise InvalidData(
                f"{place} was not made by `rcir calibrate`: it does not name its queries"
            )
        if retriever.calibration.sequential:
            raise InvalidData(
                f"calibration queries were added to {place}: the test queries of its data set may "
                "be among them"
            )
        if retriever.changes():
            raise StaleCalibration(f"{place} has changed: calibrate again")
        self._data = data = from_plain(DataConfig, origin["data"])
        splits = _without_duplicates(load_splits(data, _print_line, origin.get("rejects", ())))
        self._splits, changed = splits, None
        if not _has_gallery(retriever, splits.gallery):
            changed = f"another gallery than {place}"
        elif origin["queries"] != _digests(splits):
            changed = f"other queries than those that calibrated {place}"
        if changed is not None:
            raise InvalidData(
                f"{data.name} has {changed}: restore the data set's files, or calibrate again"
            )
        self._outside = images_outside(data, self.config.ood)
        self.training = tracking.find_tracked_run(origin.get("run", ""))
        self.is_tracked = self.training is not None
        return retriever


def _warn_of_new_labels(splits: Splits, trained: TrainedOn) -> None:
    warn_of_other_labels()
    if np.isin(classes_of(splits.calibration), trained.classes).any():
        print(
            "warning: the encoder was trained on labels of the calibration queries; guarantees "
            "for new labels are then for labels that trained it, too",
            file=sys.stderr,
        )


def images_outside(data: DataConfig, name: str | None) -> ImageSet | None:
    """Return the images of the evaluation half of another data set.

    Raises:
        InvalidConfig: it is the set that the retriever searches.
    """
    if name is None:
        return None
    if name == data.name:
        raise InvalidConfig(f"ood is {name}, the set that the retriever searches: name another")
    dataset = find_dataset(name)
    other = DataConfig(name, data.root, data.download)
    if dataset.splitter:
        return load_splits(other).test
    downloads = data.download and "download" in dataset.options_of_reader()
    options = {"download": True} if downloads else {}
    return dataset.read(data_root(other), **options).queries


def _without_duplicates(splits: Splits) -> Splits:
    """Return the splits without queries that duplicate other images, and print their numbers."""
    with step("duplicate images"):
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
    return {name: names_digest(getattr(splits, name).ids) for name in QUERIES}
