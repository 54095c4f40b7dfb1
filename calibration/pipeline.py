"""The steps of every command that calibrates or measures a retriever."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from calibration.config import (
    CalibrationConfig,
    CertificationConfig,
    EvaluationConfig,
    calibration_options,
)
from calibration.measure import Evaluation, measure
from calibration.progress import step
from calibration.report import draw_figures, render
from calibration.sources import SearchedSplits, Source, VectorFiles
from rcir import api, figures, tracking
from rcir.data import ImageSet, Splits
from rcir.errors import InvalidConfig, InvalidData
from rcir.files import write_file, write_json
from rcir.index import dropped_on_error
from rcir.retrieval.calibrate import calibrate as fit_and_certify
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import earlier_calibration
from rcir.risk import Certified, LabelledResults, score
from rcir.runs.results import DIGEST_LENGTH, RESULTS, TEST, RunResults, names_digest
from rcir.store.folder import check_place

PAGE = "report.html"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a calibration, or of an evaluation.

    Attributes:
        retriever: calibrated, as it is on disk.
        folder: where it is on disk.
        report: the report's page.
        evaluation: what was measured on the test queries.
        test: search results of the test queries.
        splits: the data they come from; None for files of vectors.
        mlflow_run: id of its own run in MLflow, below the training's; None if it is not tracked.
    """

    retriever: Retriever
    folder: Path
    report: Path
    evaluation: Evaluation
    test: LabelledResults
    splits: Splits | None
    mlflow_run: str | None


def calibrate(config: CalibrationConfig) -> Outcome:
    """Give a trained encoder a guarantee: see `run` and `TrainedRun`."""
    from calibration.data_sets import TrainedRun  # imports torch, as the next one
    from rcir.runs.folder import find_run

    output = Path(config.output) if config.output else find_run(config.run).path
    return run(TrainedRun(config, output), output, config)


def certify(config: CertificationConfig) -> Outcome:
    """Give vectors in files a guarantee: see `run` and `VectorFiles`.

    If a tracking store was chosen, a run of its own holds the outcome in MLflow.
    """
    return run(VectorFiles(config), Path(config.output), config)


def run(source: Source, output: Path, config: CalibrationConfig | CertificationConfig) -> Outcome:
    """Calibrate a retriever, measure it, and save, publish and track both.

    The score function is fitted on the tuning split, the calibration queries certify, and what is
    reported is measured on the test queries; no query is in two of them.

    Raises:
        InvalidData: the output holds something else; others are those of the source. Nothing was
            written, and a new index on a server is dropped.
        CorruptRetriever: the retriever's place holds something else.
    """
    started, place = time.monotonic(), output / "retriever"
    check_output(output)
    check_place(place)
    after = earlier_calibration(place)  # the past of the queries
    retriever = source.open()
    with dropped_on_error(retriever.index):
        queries = source.search(retriever)
        with step("calibration"):
            retriever.calibration, report = fit_and_certify(
                retriever.searcher,
                queries.tuning,
                queries.calibration,
                calibration_options(config),
                after=after,
            )
        queries = queries.with_uncertainty_of(retriever)
        with step("evaluation"):
            evaluation = measure(retriever, queries, config.alphas, config.delta, report)
        tracked = source.start_run(output, evaluation.encoder, evaluation.dataset)
    with tracked.active() if tracked else nullcontext():
        if tracked is not None:
            retriever.origin["calibration"] = tracked.id
        retriever.save(place)
        page = publish(output, retriever, evaluation, queries, tracked, started)
        results = comparable_results(retriever, evaluation, queries)
        results.write(output / TEST)
        if tracked is not None:
            _track_results(tracked, source.training, evaluation, results)
            _log_model(tracked, output, retriever, queries.images)
    source.close()
    identity = None if tracked is None else tracked.id
    return Outcome(retriever, place, page, evaluation, queries.test, queries.splits, identity)


def evaluate_retriever(config: EvaluationConfig) -> Outcome:
    """Measure a calibrated retriever on its data set, publish and track the numbers.

    Raises:
        InvalidConfig: the retriever is not a folder, and no output is named.
        NoRetriever: there is no such retriever.
        InvalidData: the output holds something else; others are those of `CalibratedRetriever`.
    """
    from calibration.data_sets import CalibratedRetriever  # imports torch

    started, folder = time.monotonic(), Path(config.retriever)
    if config.output is None and not folder.is_dir():
        api.load(config.retriever)  # if there is none, that is what to report
        raise InvalidConfig(f"nothing can be written beside {config.retriever}: name an output")
    output = Path(config.output or folder.absolute().parent / "evaluation")
    check_output(output)
    source = CalibratedRetriever(config)
    retriever = source.open()
    queries = source.search(retriever)
    with step("evaluation"):
        evaluation = measure(retriever, queries, config.alphas, config.delta)
    tracked = source.start_run(output, evaluation.encoder, evaluation.dataset)
    with tracked.active() if tracked else nullcontext():
        page = publish(output, retriever, evaluation, queries, tracked, started)
    identity = None if tracked is None else tracked.id
    return Outcome(retriever, folder, page, evaluation, queries.test, queries.splits, identity)


def check_output(output: Path) -> None:
    """Raise `InvalidData` if the output holds a page or results of something else."""
    if output.exists() and not output.is_dir():
        raise InvalidData(f"{output} is a file: choose another output")
    names = [name for name in (PAGE, RESULTS, TEST) if (output / name).exists()]
    try:
        ours = not names or "n_calibration" in json.loads((output / RESULTS).read_text())
    except (OSError, ValueError, TypeError):
        ours = False
    if not ours:
        raise InvalidData(
            f"{output} holds {' and '.join(names)} of something else: choose another output"
        )


def publish(
    output: Path,
    retriever: Retriever,
    evaluation: Evaluation,
    queries: SearchedSplits,
    tracked: tracking.TrackedRun | None,
    started: float,
) -> Path:
    """Write report and numbers, and track them with every figure; return the page."""
    with step("report"):
        drawings = draw_figures(retriever, evaluation, queries)
        pictures = {name: figures.to_svg(figure) for name, figure in drawings.items()}
        text = render(evaluation, pictures)
    page, results = output / PAGE, output / RESULTS
    output.mkdir(parents=True, exist_ok=True)
    # Results first: `check_output` recognises a page by them.
    write_results(results, evaluation, time.monotonic() - started)
    write_file(page, text.encode())
    if tracked is not None:
        tracked.log_metrics(evaluation.metrics())
        tracked.log_curves(evaluation.curves())
        for name, rows in evaluation.tables().items():
            tracked.log_table(rows, name)
        for name, svg in pictures.items():
            tracked.log_figure(svg, name)
        tracked.log_file(page)
        tracked.log_file(results)
    return page


def write_results(path: Path, evaluation: Evaluation, seconds: float) -> None:
    """Write the numbers of an evaluation as JSON."""
    write_json(path, evaluation.to_dict() | {"seconds": round(seconds, 2)})


def comparable_results(
    retriever: Retriever, evaluation: Evaluation, queries: SearchedSplits
) -> RunResults:
    """Return the results by which `rcir compare` compares retrievers."""
    rule = retriever.require_calibration().main
    parts = []
    # Sizes that clusters certify are not order statistics, and cannot be compared.
    if rule.calibration.population.clusters is None:
        scores = score(rule.score_function, queries.test).require("scores")
        parts = [Certified(rule.calibration.match_score, scores)]
    return RunResults(
        "test",
        names_digest([*queries.calibration_ids, *queries.images.ids]),
        parts,
        evaluation.quality.numbers,
        rule.score_function.name,
    )


def _track_results(
    tracked: tracking.TrackedRun,
    training: tracking.TrackedRun | None,
    evaluation: Evaluation,
    results: RunResults,
) -> None:
    """Log which queries were measured, and in the run of the training a certified size."""
    counts = {"calibration": evaluation.n_calibration, "test": evaluation.n_test}
    digest = results.queries[:DIGEST_LENGTH]
    tracked.log_dataset(evaluation.dataset, digest, "calibration", counts)
    if training is not None:
        metrics = evaluation.metrics().items()  # those of the level nearest to `ALPHA` come first
        sizes = [(name, value) for name, value in metrics if name.endswith("/mean_size")]
        training.log_metrics(dict(sizes[:1]))


def _log_model(
    tracked: tracking.TrackedRun, output: Path, retriever: Retriever, images: ImageSet
) -> None:
    """Log a calibration as a model, with one of its queries as the example."""
    # imports torch
    from rcir.registry.logged_model import image_example, log_calibration, vector_example

    is_encoded = retriever.encoder is not None
    example = image_example(images.images[0]) if is_encoded else vector_example(retriever)
    with step("model"):
        log_calibration(tracked, output, retriever, example)
