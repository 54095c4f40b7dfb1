"""Sources with the queries of a data set: a training run, or a retriever that was calibrated."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.config import CalibrationConfig, EvaluationConfig
from calibration.evaluation import Evaluation
from calibration.quality import pixel_recall
from calibration.screen import embedding, step
from calibration.sources import Opened, Source, start_tracking, warn_of_other_labels
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
    splits_without,
    tolerate,
    unreadable,
    without,
)
from rcir.encoders.embedder import Embedder
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration, printable
from rcir.registry.logged_model import image_example
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults
from rcir.runs import folder as runs
from rcir.runs.folder import TrainedOn, classes_of
from rcir.runs.results import names_digest
from rcir.terminal import console

QUERIES = ("tuning", "calibration", "test")  # splits that are queries
CALIBRATION_REJECTS = "calibration-rejects.csv"  # the folder of a run has the training's own table


class _DataSet(Source):
    """The queries of a data set, and those of another one; a subclass opens them."""

    _data: DataConfig
    _splits: Splits
    _outside: ImageSet | None
    _embedder: Embedder

    def search(self, retriever: Retriever) -> Opened:
        """See `Source`."""
        splits = self._splits
        with self._embedder.open() as opened:
            tuning, calibration, test = search_splits(retriever, splits, opened)
        return Opened(
            self._data.name,
            tuning,
            calibration,
            test,
            images=splits.test,
            gallery=splits.gallery,
            ids=(list(splits.calibration.ids), list(splits.test.ids)),
            splits=splits,
        )

    def example(self, retriever: Retriever) -> Any:
        """See `Source`."""
        return image_example(self._splits.test.images[0])

    def uncertainty_outside(self, retriever: Retriever) -> NDArray[np.float64] | None:
        """See `Source`."""
        if self._outside is None:
            return None
        name = "out-of-distribution queries"
        with embedding(name, self._outside, self._embedder) as watched:
            return retriever.search(self._outside.images, watched).uncertainty

    def pixel_recall(self) -> float | None:
        """See `Source`."""
        return pixel_recall(self._splits)


class TrainedRun(_DataSet):
    """The encoder of a training run, with the data set that it was trained on.

    What was embedded is kept in a folder until the retriever is saved.

    Args:
        config: of the calibration.
        output: folder of the outcome.
    """

    def __init__(self, config: CalibrationConfig, output: Path) -> None:
        self._config, self._output = config, output
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
        config = self._config
        self._run = run = runs.find_run(config.run)
        run.tracked.require_active()  # fail now, not when the results are logged
        cluster = config.cluster or run.data.options.get("cluster")
        data = with_cluster(run.data, cluster)
        if config.queries is not None:
            data = replace(data, options={**data.options, "queries": config.queries})
        self._data = data
        encoder, trained = run.encoder(), TrainedOn.read(run.path)
        rejects = read_rejects(run.path / REJECTS_FILE)
        splits = load_splits(data, partial(console.print, soft_wrap=True), rejects)
        outside = images_outside(run.data, config.ood)
        rejects |= self._unreadable(splits, outside, run.preprocessing)
        splits = _without_repeats(splits_without(splits, rejects))
        trained.require_unseen(splits)
        if warning := cluster_warning(splits, cluster):
            print(f"warning: {warning}", file=sys.stderr)
        if data.options.get("queries") == "new-labels":
            _warn_of_new_labels(splits, trained)
        check_group(splits, config.group)
        self._splits = splits
        self._outside = None if outside is None else without(outside, rejects)
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
        if line := tolerate(rejects, n, self._config.max_rejects, table):
            console.print(printable(line), soft_wrap=True)
        return rejects

    def track(self, output: Path, evaluation: Evaluation) -> tracking.TrackedRun | None:
        """See `Source`."""
        return start_tracking("calibration", self._config, output, evaluation, self.training)

    @property
    def training(self) -> tracking.TrackedRun:
        """See `Source`."""
        return self._run.tracked

    def close(self) -> None:
        """See `Source`."""
        self._embedder.clear()


class StoredRetriever(_DataSet):
    """A calibrated retriever that `rcir calibrate` made, with the queries of its data set.

    Args:
        config: of the evaluation.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self._config = config
        self._embedder = Embedder()

    def open(self) -> Retriever:
        """Load the retriever and its data set.

        Raises:
            InvalidConfig: `ood` is its own data set.
            InvalidData: the retriever does not say which queries it was calibrated with, or its
                data set now gives others, or another gallery.
            NoRetriever, CorruptRetriever, StaleCalibration: of the retriever.
        """
        config = self._config
        self._retriever = retriever = api.load(config.retriever)
        if not {"data", "queries"} <= retriever.origin.keys() or retriever.calibration is None:
            raise InvalidData(
                f"{config.retriever} was not made by `rcir calibrate`: it does not name its queries"
            )
        if retriever.calibration.sequential:
            raise InvalidData(
                f"calibration queries were added to {config.retriever}: the test queries of its "
                "data set may be among them"
            )
        if retriever.changes():
            raise StaleCalibration(f"{config.retriever} has changed: calibrate again")
        self._data = data = from_plain(DataConfig, retriever.origin["data"])
        rejects = retriever.origin.get("rejects", ())
        loaded = load_splits(data, partial(console.print, soft_wrap=True), rejects)
        splits = _without_repeats(loaded)
        if not _is_of(retriever, splits.gallery):
            raise InvalidData(
                f"{data.name} has another gallery than {config.retriever}: restore the data set's "
                "files, or calibrate again"
            )
        if retriever.origin["queries"] != _digests(splits):
            raise InvalidData(
                f"{data.name} has other queries than those that calibrated {config.retriever}: "
                "restore the data set's files, or calibrate again"
            )
        self._splits, self._outside = splits, images_outside(data, config.ood)
        return retriever

    def track(self, output: Path, evaluation: Evaluation) -> tracking.TrackedRun | None:
        """See `Source`."""
        training = tracking.find_tracked_run(self._retriever.origin.get("run", ""))
        if training is None:
            return None
        return start_tracking("evaluation", self._config, output, evaluation, training)


def _warn_of_new_labels(splits: Splits, trained: TrainedOn) -> None:
    warn_of_other_labels()
    if np.isin(classes_of(splits.calibration), trained.classes).any():
        print(
            "warning: the encoder was trained on labels of the calibration queries; guarantees "
            "for new labels are then for labels that trained it, too",
            file=sys.stderr,
        )


def check_group(splits: Splits, group: str | None) -> None:
    """Raise `InvalidData` unless the queries of all three splits have that attribute."""
    for name in QUERIES:
        attributes = getattr(splits, name).attributes
        if group is not None and group not in attributes:
            names = ", ".join(attributes) or "none"
            raise InvalidData(f"the {name} queries have no attribute {group!r}; they have {names}")


def search_splits(
    retriever: Retriever, splits: Splits, embedder: Embedder
) -> list[LabelledResults]:
    """Search the queries of the three splits; the origin names their groups and clusters."""
    group, cluster = (retriever.origin.get(name) for name in ("group", "cluster"))
    results = []
    for name in QUERIES:
        images = getattr(splits, name)
        with embedding(f"{name} queries", images, embedder) as watched, warnings.catch_warnings():
            # `TrainedRun.open` has warned of all splits at once.
            warnings.filterwarnings("ignore", "the queries come in clusters", UserWarning)
            results.append(retriever.search_labelled(images, group, watched, cluster))
    return results


def images_outside(data: DataConfig, name: str | None) -> ImageSet | None:
    """The images of the evaluation half of another data set.

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


def _without_repeats(splits: Splits) -> Splits:
    """Return the splits without queries that repeat other images, and print how many these were."""
    with step("pictures that stand twice"):
        kept, left_out = without_repeats(splits)
    if any(left_out.values()):
        counts = ", ".join(f"{n} of the {name} queries" for name, n in left_out.items() if n)
        console.print(f"left out, for the same picture stands elsewhere: {counts}", soft_wrap=True)
    return kept


def _is_of(retriever: Retriever, gallery: ImageSet) -> bool:
    """Return whether a retriever's gallery has these names and matches the same queries."""
    stored = {} if retriever.relevance is None else retriever.relevance.arrays()
    given = gallery.relevance.arrays()
    return retriever.ids.tolist() == list(gallery.ids) and (
        stored.keys() == given.keys()
        and all(np.array_equal(values, given[name]) for name, values in stored.items())
    )


def _digests(splits: Splits) -> dict[str, str]:
    """Return a digest of the names of the queries of each split, in order."""
    return {name: names_digest(getattr(splits, name).ids) for name in QUERIES}
