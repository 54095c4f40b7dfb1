"""The steps of every command that calibrates or measures a retriever."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from calibration.config import (
    CalibrationConfig,
    CertificationConfig,
    EvaluationConfig,
    calibration_options,
)
from calibration.evaluation import Evaluation
from calibration.measure import measure
from calibration.report import draw_figures, render
from calibration.splits import SearchedSplits
from calibration.vectors import search_vectors
from rcir import api, figures, tracking
from rcir.errors import InvalidConfig, InvalidData
from rcir.files import write_file, write_json
from rcir.retrieval.calibrate import calibrate as fit_and_certify
from rcir.retrieval.query_uncertainty import with_uncertainty
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import earlier_calibration
from rcir.risk import Certified
from rcir.runs.bucket import fetch, local_folder, place_of, push
from rcir.runs.results import DIGEST_LENGTH, RESULTS, TEST, RunResults, digest_names
from rcir.storage import as_text, is_uri
from rcir.store.folder import check_place
from rcir.terminal import working
from rcir.tracking import TrackedRun

PAGE = "report.html"
KINDS = {  # of the runs in MLflow
    CalibrationConfig: "calibration",
    CertificationConfig: "certification",
    EvaluationConfig: "evaluation",
}


@dataclass(frozen=True, repr=False)
class Outcome:
    """The outcome of a calibration, or of an evaluation.

    Attributes:
        splits: the retriever, and the queries that calibrated and tested it.
        folder: where the retriever is, perhaps a URI; so for the report.
        report: the report's page.
        evaluation: what was measured on the test queries.
        mlflow_run: id of its own run in MLflow, below the training's; None if it is not tracked.
    """

    splits: SearchedSplits
    folder: Path
    report: Path
    evaluation: Evaluation
    mlflow_run: str | None

    def __repr__(self) -> str:
        return f"Outcome({self.evaluation!r}, folder={str(self.folder)!r})"

    @property
    def retriever(self) -> Retriever:
        """The calibrated retriever, as it is on disk."""
        return self.splits.retriever


@working("reading the run", logged=True)
def calibrate(config: CalibrationConfig) -> Outcome:
    """Give a trained encoder a guarantee, measure it on test queries, and save and track both.

    Raises:
        InvalidData: the output holds something else.
        CorruptRetriever: the retriever's place holds something else. In both cases nothing was
            written.
        RcirError: others are those of `calibration.data_sets.search_run`.
    """
    from calibration.data_sets import search_run  # imports torch, as the next ones
    from calibration.models import untrained_run
    from rcir.encoders.embedder import Embedder
    from rcir.runs.folder import find_run

    run = untrained_run(config) if config.run is None else find_run(config.run)
    output = Path(config.output) if config.output else run.place
    folder = fetch(output)
    # Embeddings are kept until the retriever is saved.
    embedder = Embedder(config.num_workers, config.use_gpu, folder / "embeddings")
    outcome = _calibrate(config, output, partial(search_run, config, run, folder, embedder))
    embedder.clear()
    return outcome


@working("reading the vectors", logged=True)
def certify(config: CertificationConfig) -> Outcome:
    """Give vectors in files a guarantee, measure it, and save both; see `calibrate`.

    If a tracking store was chosen, a run of its own holds the outcome in MLflow.

    Raises:
        TrackingUnavailable: a tracking store is chosen, and cannot be used.
        RcirError: others are those of `calibration.vectors.search_vectors`.
    """
    is_tracked = tracking.is_chosen()
    if is_tracked:
        tracking.require_experiment()  # fail now, not when the results are logged
    return _calibrate(config, Path(config.output), partial(search_vectors, config), is_tracked)


def _calibrate(
    config: CalibrationConfig | CertificationConfig,
    output: Path,
    search: Callable[[], SearchedSplits],
    is_tracked: bool = True,
) -> Outcome:
    """Calibrate and measure a retriever; `search` is called if the output can be written to.

    The score function is fitted on the tuning split, the calibration queries certify, and what is
    reported is measured on the test queries; no query is in two of them.
    """
    started, place, folder = time.monotonic(), output / "retriever", fetch(output)
    check_output(folder)
    check_place(place)
    after = earlier_calibration(place)  # the past of the queries
    splits = search()
    retriever = splits.retriever
    with working("calibrating", logged=True):
        retriever.calibration, report = fit_and_certify(
            retriever.searcher,
            splits.tuning,
            splits.calibration,
            calibration_options(config),
            after=after,
        )
    uncertainty = retriever.calibration.uncertainty
    splits = replace(splits, test=with_uncertainty(retriever.searcher, splits.test, uncertainty))
    with working("measuring", logged=True):
        evaluation = measure(splits, config.alphas, config.delta, report)
    tracked = _start_run(config, output, evaluation, splits) if is_tracked else None
    with tracked.active() if tracked else nullcontext():
        if tracked is not None:
            retriever.origin["calibration"] = tracked.id
        retriever.save(place)
        page = publish(folder, evaluation, splits, tracked, started)
        results = collect_results(evaluation, splits)
        results.write(folder / TEST)
        push(folder)
        if tracked is not None:
            _track_results(tracked, splits.training, evaluation, results)
            _log_model(tracked, folder, splits, evaluation)
    page = output / page.name
    return Outcome(splits, place, page, evaluation, tracked.id if tracked else None)


@working("reading the retriever", logged=True)
def evaluate_retriever(config: EvaluationConfig) -> Outcome:
    """Measure a calibrated retriever on its data set, publish and track the numbers.

    Raises:
        InvalidConfig: the retriever is not a folder, and no output is named.
        NoRetriever: there is no such retriever.
        InvalidData: the output holds something else.
        RcirError: others are those of `calibration.data_sets.search_data_set`.
    """
    from calibration.data_sets import search_data_set  # imports torch

    started, folder = time.monotonic(), Path(config.retriever)
    place = folder if is_uri(folder) else folder.absolute()
    if config.output is None and not (is_uri(folder) or folder.is_dir()):
        api.load(config.retriever)  # if there is none, that is what to report
        raise InvalidConfig(f"nothing can be written beside {config.retriever}: name an output")
    output = Path(config.output or place.parent / "evaluation")
    local = fetch(output)
    check_output(local)
    splits = search_data_set(config)
    with working("measuring", logged=True):
        evaluation = measure(splits, config.alphas, config.delta)
    tracked = None
    if splits.training is not None:
        tracked = _start_run(config, output, evaluation, splits)
    with tracked.active() if tracked else nullcontext():
        page = publish(local, evaluation, splits, tracked, started)
        push(local)
        if tracked is not None:
            tracked.log_metrics(evaluation.metrics())
    page = output / page.name
    return Outcome(splits, folder, page, evaluation, tracked.id if tracked else None)


@working("logging to MLflow", logged=True)
def _start_run(
    config: CalibrationConfig | CertificationConfig | EvaluationConfig,
    output: Path,
    evaluation: Evaluation,
    splits: SearchedSplits,
) -> TrackedRun:
    """Start a run in MLflow below that of the training, with the parameters of both."""
    from rcir.config import flatten  # imports jsonargparse
    from rcir.runs.folder import FOLDER_TAG, run_title  # imports torch

    training, kind = splits.training, KINDS[type(config)]
    params = training.params if training else {}
    attempts = splits.retriever.require_calibration().attempts
    number = f" {attempts}" if attempts > 1 and not isinstance(config, EvaluationConfig) else ""
    name = f"{run_title(output)} ({kind}{number})"
    tags = {
        FOLDER_TAG: as_text(place_of(local_folder(output))),
        tracking.KIND_TAG: kind,
        tracking.ENCODER_TAG: evaluation.encoder,
        tracking.DATASET_TAG: evaluation.dataset,
    }
    run = tracking.start_run(name, tags, training)
    run.log_params(params | flatten(asdict(config)))
    return run


def check_output(output: Path) -> None:
    """Raise `InvalidData` if the output holds results of something else."""
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
    evaluation: Evaluation,
    splits: SearchedSplits,
    tracked: TrackedRun | None,
    started: float,
) -> Path:
    """Write report and numbers, and track them with every figure; return the page."""
    with working("drawing the report", logged=True):
        drawings = draw_figures(evaluation, splits)
        pictures = {name: figures.to_svg(figure) for name, figure in drawings.items()}
        text = render(evaluation, splits, pictures)
    page, results = output / PAGE, output / RESULTS
    output.mkdir(parents=True, exist_ok=True)
    # Results first: `check_output` recognises a page by them.
    write_results(results, evaluation, time.monotonic() - started)
    write_file(page, text.encode())
    if tracked is not None:
        now = time.time()
        curves = evaluation.curves()
        tracked.log_points((name, *point, now) for name in curves for point in curves[name].items())
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


def collect_results(evaluation: Evaluation, splits: SearchedSplits) -> RunResults:
    """Return the results by which `rcir compare` compares retrievers."""
    calibration = splits.retriever.require_calibration()
    rule, parts = calibration.miss_rule, []
    # `Certified` sizes are those of independent queries that certify one moment.
    if rule.evidence.population.clusters is None and not calibration.sequential:
        scores = splits.scored_test.require("scores")
        parts = [Certified(rule.evidence.match_score, scores)]
    return RunResults(
        "test",
        digest_names([*splits.calibration_ids, *splits.images.ids]),
        parts,
        evaluation.quality.numbers,
        rule.score_function.name,
    )


def _track_results(
    tracked: TrackedRun,
    training: TrackedRun | None,
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
    tracked: TrackedRun, output: Path, splits: SearchedSplits, evaluation: Evaluation
) -> None:
    """Log metrics, and the calibration as a model with one of its queries as the example."""
    # imports torch
    from rcir.registry.logged_model import log_calibration, make_image_example, make_vector_example

    retriever = splits.retriever
    is_encoded = retriever.encoder is not None
    if is_encoded and not splits.images.pictures:
        tracked.log_metrics(evaluation.metrics())
        return  # requests to a model hold images or vectors, not sequences
    example = (
        make_image_example(splits.images.images[0])
        if is_encoded
        else make_vector_example(retriever)
    )
    with working("logging the model to MLflow", logged=True):
        log_calibration(tracked, output, retriever, example)
