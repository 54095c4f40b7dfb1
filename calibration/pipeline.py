"""The steps of every command that calibrates or measures a retriever."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.config import CalibrationConfig, CertificationConfig, EvaluationConfig
from calibration.evaluation import Evaluation, evaluate
from calibration.report import draw_figures, render
from calibration.screen import step
from calibration.sources import Opened, Source, VectorFiles
from rcir import api, figures, tracking
from rcir.data import Splits
from rcir.errors import InvalidConfig, InvalidData
from rcir.files import write_file, write_json
from rcir.index import dropped_on_error
from rcir.retrieval import storage
from rcir.retrieval.retriever import Retriever
from rcir.risk import Certified, LabelledResults, corrected, score
from rcir.runs.results import DIGEST_LENGTH, RESULTS, TEST, RunResults, names_digest

PAGE = "report.html"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a calibration, or of an evaluation.

    Attributes:
        retriever: calibrated, as it is on disk.
        folder: where it is on disk.
        report: the report's page.
        evaluation: what was measured on the test queries.
        test: what was found for the test queries.
        splits: the data they come from; None for files of vectors.
        mlflow_run: id of its own run in MLflow, below the training's; None if that is unknown.
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
    names = ("score_function", "bound", "alphas", "delta", "query_uncertainty")
    options = {name: getattr(config, name) for name in names}
    return run(TrainedRun(config, output), output, config.alphas, config.delta, options)


def certify(config: CertificationConfig) -> Outcome:
    """Give vectors in files a guarantee: see `run` and `VectorFiles`.

    If a tracking store was chosen, a run of its own holds the outcome in MLflow.
    """
    names = ("score_function", "alphas", "delta", "seed")
    options = {name: getattr(config, name) for name in names}
    return run(VectorFiles(config), Path(config.output), config.alphas, config.delta, options)


def evaluate_retriever(config: EvaluationConfig) -> Outcome:
    """Measure a calibrated retriever on its data set: see `run` and `StoredRetriever`.

    Raises:
        InvalidConfig: the retriever is not a folder, and no output is named.
        NoRetriever: there is no such retriever.
    """
    from calibration.data_sets import StoredRetriever  # imports torch

    folder = Path(config.retriever)
    if config.output is None and not folder.is_dir():
        api.load(config.retriever)  # if there is none, that is what to report
        raise InvalidConfig(f"nothing can be written beside {config.retriever}: name an output")
    output = Path(config.output or folder.absolute().parent / "evaluation")
    return run(StoredRetriever(config), output, config.alphas, config.delta, None, folder)


def run(
    source: Source,
    output: Path,
    alphas: tuple[float, ...],
    delta: float,
    options: Mapping[str, Any] | None,
    folder: Path | None = None,
) -> Outcome:
    """Open, search, calibrate, evaluate, save, publish and track.

    The score function is fitted on the tuning split, the calibration queries certify, and what is
    reported is measured on the test queries; no query is in two of them.

    Args:
        source: where the retriever and its queries come from.
        output: folder to write to.
        alphas, delta: levels to report.
        options: of `Retriever.calibrate_splits`; None measures a retriever that is calibrated.
        folder: of that retriever.

    Raises:
        InvalidData: the output holds something else; others are those of the source. Nothing was
            written, and a new index on a server is dropped.
        CorruptRetriever: the retriever's place holds something else.
    """
    started = time.monotonic()
    place = folder or output / "retriever"
    check_output(output)
    if options is not None:
        storage.check_place(place)
        earlier = storage.earlier_calibration(place)
    retriever = source.open()
    with nullcontext() if options is None else dropped_on_error(retriever.index):
        opened, calibrated = source.search(retriever), None
        if options is None:
            # At this delta its sets are those that it returns at the requested one.
            delta = corrected(delta, retriever.require_calibration().chosen_among)
        else:
            with step("calibration"):
                retriever.calibration = earlier
                calibrated = retriever.calibrate_splits(
                    opened.tuning, opened.calibration, **options
                )
        test = retriever.searcher.judged(opened.test, retriever.require_calibration().uncertainty)
        outside = source.uncertainty_outside(retriever)
        with step("evaluation"):
            evaluation = evaluate(
                opened.dataset,
                retriever,
                test,
                opened.images,
                alphas,
                delta,
                calibrated=calibrated,
                outside=outside,
                baseline=source.pixel_recall(),
            )
        tracked = source.track(output, evaluation)
    with tracked.active() if tracked else nullcontext():
        if options is not None:
            if tracked is not None:
                retriever.origin["calibration"] = tracked.id
            place = retriever.save(place)
        page = publish(output, retriever, evaluation, test, opened, tracked, started)
        if options is not None:
            results = measured(retriever, evaluation, test, *opened.ids)
            results.write(output / TEST)
            if tracked is not None:
                track_results(tracked, source.training, opened.dataset, evaluation, results)
                from rcir.registry.logged_model import log_calibration  # imports torch

                with step("model"):
                    log_calibration(tracked, output, retriever, source.example(retriever))
    source.close()
    identity = None if tracked is None else tracked.id
    return Outcome(retriever, place, page, evaluation, test, opened.splits, identity)


def check_output(output: Path) -> None:
    """Pages and results that another evaluation did not write are left alone."""
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
    test: LabelledResults,
    opened: Opened,
    tracked: tracking.TrackedRun | None,
    started: float,
) -> Path:
    """Write report and numbers, and track them with every figure; return the page.

    Args:
        output: the folder to write to.
        retriever, evaluation: what was measured.
        test: search results of the test queries.
        opened: the images of test queries and gallery.
        tracked: a run in MLflow, if there is one.
        started: when the work began.
    """
    with step("report"):
        report_figures = draw_figures(retriever, evaluation, test, opened.images, opened.gallery)
        pictures = {name: figures.to_svg(figure) for name, figure in report_figures.items()}
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


def track_results(
    tracked: tracking.TrackedRun,
    training: tracking.TrackedRun | None,
    dataset: str,
    evaluation: Evaluation,
    results: RunResults,
) -> None:
    """Log which queries were measured, and in the run of the training a certified size."""
    counts = {"calibration": evaluation.n_calibration, "test": evaluation.n_test}
    tracked.log_dataset(dataset, results.queries[:DIGEST_LENGTH], "calibration", counts)
    if training is not None:
        metrics = evaluation.metrics().items()  # those of the level nearest to `ALPHA` come first
        sizes = [(name, value) for name, value in metrics if name.endswith("/mean_size")]
        training.log_metrics(dict(sizes[:1]))


def write_results(path: Path, evaluation: Evaluation, seconds: float) -> None:
    """Write the numbers of an evaluation as JSON."""
    write_json(path, evaluation.to_dict() | {"seconds": round(seconds, 2)})


def measured(
    retriever: Retriever,
    evaluation: Evaluation,
    test: LabelledResults,
    calibration_ids: Sequence[str],
    test_ids: Sequence[str],
) -> RunResults:
    """Return the results by which `rcir compare` compares retrievers."""
    rule = retriever.require_calibration().main
    # What queries in clusters certify is no order statistic: there is nothing to compare.
    alone = rule.calibration.population.clusters is None
    scored = score(rule.score_function, test)
    part = Certified(rule.calibration.match_score, scored.require("scores"))
    return RunResults(
        "test",
        names_digest([*calibration_ids, *test_ids]),
        [part] if alone else [],
        evaluation.quality.numbers,
        rule.score_function.name,
    )
