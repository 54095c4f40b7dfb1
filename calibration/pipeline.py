"""From a trained run to a retriever on disk and in MLflow, and from a retriever to its numbers."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from calibration.baseline import pixel_recall
from calibration.config import CalibrationConfig, EvaluationConfig
from calibration.evaluation import Evaluation, evaluate
from calibration.progress import embedding, print_reason, step
from calibration.publishing import check_output, measured, publish, start_tracking
from calibration.searching import check_group, images_outside, search_splits, uncertainty_outside
from calibration.table import console
from rcir import api, tracking
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
from rcir.encoders.embedder import Embedder
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.index import dropped_on_error
from rcir.registry.logged_model import image_example, log_calibration
from rcir.retrieval import storage
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults, corrected
from rcir.runs import folder as runs
from rcir.runs.folder import TrainedOn, classes_of
from rcir.runs.results import TEST, names_digest


@dataclass(frozen=True)
class Calibrated:
    """The outcome of a calibration, or of an evaluation.

    Attributes:
        retriever: calibrated, as it is on disk.
        folder: where it is on disk.
        report: the report's page.
        evaluation: what was measured on the test queries.
        test: what was found for the test queries.
        splits: the data they come from.
        mlflow_run: id of its own run in MLflow, below the training's; None if that is unknown.
    """

    retriever: Retriever
    folder: Path
    report: Path
    evaluation: Evaluation
    test: LabelledResults
    splits: Splits
    mlflow_run: str | None


def calibrate(config: CalibrationConfig) -> Calibrated:
    """Index the gallery, calibrate, measure, write and track.

    The score function is fitted on the tuning split, the calibration split certifies, and
    what is reported is measured on the test split; no query is in two of them, and pictures that
    stand in two places are left out (`rcir.data.without_repeats`). What was embedded is kept in the
    folder `embeddings` of the output until the retriever is saved.

    Raises:
        InvalidData: there is no such run, or it is not finished; or it trained on what is to
            certify it (`rcir.runs.folder.TrainedOn.require_unseen`); or the output holds
            something else.
        CorruptRetriever: what lies at the retriever's place is something else.
        InvalidImage: of an image that cannot be read.
        InvalidConfig: there is no GPU to use.
    """
    started = time.monotonic()
    run = runs.find_run(config.run)
    output = Path(config.output) if config.output else run.path
    place = output / "retriever"
    check_output(output)
    storage.check_place(place)
    cluster = config.cluster or run.data.options.get("cluster")
    data = with_cluster(run.data, cluster)
    if config.queries is not None:
        data = replace(data, options={**data.options, "queries": config.queries})
    encoder, trained = run.encoder(), TrainedOn.read(run.path)
    splits = _without_repeats(load_splits(data, partial(console.print, soft_wrap=True)))
    trained.require_unseen(splits)
    if warning := cluster_warning(splits, cluster):
        print(f"warning: {warning}", file=sys.stderr)
    if data.options.get("queries") == "new-labels":
        print(
            "warning: no test query has the label of a calibration query; guarantees for the "
            "labels of the calibration queries are measured on queries of other labels",
            file=sys.stderr,
        )
        if np.isin(classes_of(splits.calibration), trained.classes).any():
            print(
                "warning: the encoder was trained on labels of the calibration queries; guarantees "
                "for new labels are then for labels that trained it, too",
                file=sys.stderr,
            )
    check_group(splits, config.group)
    asked = images_outside(run.data, config.ood)
    embedder = Embedder(config.num_workers, config.use_gpu, output / "embeddings")
    with embedding("gallery", splits.gallery, embedder) as shown:
        retriever = Retriever.build(
            encoder, run.preprocessing, splits.gallery, config.depth, shown, config.index
        )
    print_reason(retriever.index)
    data = replace(data, root=str(data_root(data)) if data.root else None)
    retriever.origin = {
        "data": asdict(data),
        "queries": _digests(splits),
        "run": run.mlflow_run,
        "group": config.group,
        "cluster": cluster,
    }
    with dropped_on_error(retriever.index):
        queries = search_splits(retriever, splits, embedder)
        with step("calibration"):
            retriever.calibration = storage.earlier_calibration(place)
            report = retriever.calibrate_splits(
                queries.tuning,
                queries.calibration,
                config.score_function,
                bound=config.bound,
                alphas=config.alphas,
                delta=config.delta,
                query_uncertainty=config.query_uncertainty,
            )
        queries = queries.judged(retriever)
        outside = uncertainty_outside(retriever, asked, embedder)
        with step("evaluation"):
            baseline = pixel_recall(splits)
            evaluation = evaluate(
                run.data.name,
                retriever,
                queries,
                splits.test,
                config.alphas,
                config.delta,
                report,
                outside,
                baseline,
            )
        tracked = start_tracking("calibration", config, output, run.tracked)
    with tracked.active():
        retriever.origin["calibration"] = tracked.id
        folder = retriever.save(place)
        page = publish(
            *(output, retriever, evaluation, queries.test, splits.test, splits.gallery),
            *(tracked, started),
        )
        names = splits.calibration.ids, splits.test.ids
        measured(retriever, evaluation, queries.test, *names).write(output / TEST)
        with step("model"):
            log_calibration(tracked, output, retriever, image_example(splits.test.images[0]))
    embedder.clear()
    return Calibrated(retriever, folder, page, evaluation, queries.test, splits, tracked.id)


def evaluate_retriever(config: EvaluationConfig) -> Calibrated:
    """Measure a calibrated retriever on the test queries of its data set; write and track.

    Raises:
        InvalidConfig: the retriever is not a folder, and no output is named; or `ood` is its own
            data set.
        InvalidData: the retriever does not say which queries it was calibrated with, or its data
            set now gives others, or another gallery; or the output holds something else.
        NoRetriever, CorruptRetriever, StaleCalibration: of the retriever.
    """
    started = time.monotonic()
    retriever = api.load(config.retriever)
    if config.output is None and not Path(config.retriever).is_dir():
        raise InvalidConfig(f"nothing can be written beside {config.retriever}: name an output")
    if not {"data", "queries"} <= retriever.origin.keys() or retriever.calibration is None:
        raise InvalidData(
            f"{config.retriever} was not made by `python -m calibration`: it does not say which "
            "queries it was calibrated with"
        )
    if retriever.calibration.sequential:
        raise InvalidData(
            f"calibration queries were added to {config.retriever}: the test queries of its data "
            "set may be among them"
        )
    if retriever.changes():
        raise StaleCalibration(f"{config.retriever} has changed since calibration: calibrate again")
    data = DataConfig(**retriever.origin["data"])
    splits = _without_repeats(load_splits(data, partial(console.print, soft_wrap=True)))
    if not _is_of(retriever, splits.gallery):
        raise InvalidData(
            f"{data.name} gives another gallery than the one in {config.retriever}: restore the "
            "data set's files as they were, or calibrate again"
        )
    if retriever.origin["queries"] != _digests(splits):
        raise InvalidData(
            f"{data.name} gives other queries than those {config.retriever} was calibrated with, "
            "so that some may be both: restore the data set's files, or calibrate again"
        )
    asked = images_outside(data, config.ood)
    # At this delta its sets are those that it returns at the asked one.
    delta = corrected(config.delta, retriever.require_calibration().chosen_among)
    output = Path(config.output or Path(config.retriever).absolute().parent / "evaluation")
    check_output(output)
    queries = search_splits(retriever, splits, Embedder())
    outside = uncertainty_outside(retriever, asked, Embedder())
    with step("evaluation"):
        evaluation = evaluate(
            data.name,
            retriever,
            queries,
            splits.test,
            config.alphas,
            delta,
            outside=outside,
            baseline=pixel_recall(splits),
        )
    trained = tracking.find_tracked_run(retriever.origin.get("run", ""))
    tracked = start_tracking("evaluation", config, output, trained) if trained else None
    with tracked.active() if tracked else nullcontext():
        page = publish(
            *(output, retriever, evaluation, queries.test, splits.test, splits.gallery),
            *(tracked, started),
        )
    place = Path(config.retriever)
    known = None if tracked is None else tracked.id
    return Calibrated(retriever, place, page, evaluation, queries.test, splits, known)


def _without_repeats(splits: Splits) -> Splits:
    """The splits without queries that stand elsewhere too; one line says how many those were."""
    with step("pictures that stand twice"):
        kept, left_out = without_repeats(splits)
    if any(left_out.values()):
        counts = ", ".join(f"{n} of the {name} queries" for name, n in left_out.items() if n)
        said = f"left out, for the same picture stands elsewhere: {counts}"
        console.print(said, soft_wrap=True)
    return kept


def _is_of(retriever: Retriever, gallery: ImageSet) -> bool:
    """Whether a retriever's gallery has these names, and matches the same queries."""
    known = {} if retriever.relevance is None else retriever.relevance.arrays()
    given = gallery.relevance.arrays()
    return retriever.ids.tolist() == list(gallery.ids) and (
        known.keys() == given.keys()
        and all(np.array_equal(values, given[name]) for name, values in known.items())
    )


def _digests(splits: Splits) -> dict[str, str]:
    """Of the names of the queries of each split, in order."""
    return {
        name: names_digest(getattr(splits, name).ids) for name in ("tuning", "calibration", "test")
    }
