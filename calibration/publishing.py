"""Publishing an evaluation: its page, its numbers, and a run of its own in MLflow."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from calibration import drawing, report
from calibration.config import CalibrationConfig, EvaluationConfig
from calibration.evaluation import Evaluation
from calibration.progress import step
from rcir import figures, tracking
from rcir.data import ImageSet
from rcir.errors import InvalidData
from rcir.files import write_file, write_json
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults
from rcir.runs.results import TEST

PAGE, RESULTS = "report.html", "results.json"


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


def start_tracking(
    kind: str,
    config: CalibrationConfig | EvaluationConfig,
    output: Path,
    trained: tracking.TrackedRun,
) -> tracking.TrackedRun:
    """A run of its own in MLflow, below the training's: another calibration is another run."""
    from rcir.config import flatten
    from rcir.runs.folder import FOLDER_TAG

    tags = {FOLDER_TAG: str(output.absolute()), "rcir.kind": kind}
    tracked = tracking.start_run(f"{output.resolve().name} ({kind})", tags, trained)
    tracked.log_params(flatten(asdict(config)))
    return tracked


def publish(
    output: Path,
    retriever: Retriever,
    evaluation: Evaluation,
    test: LabelledResults,
    images: ImageSet,
    gallery: ImageSet,
    tracked: tracking.TrackedRun | None,
    started: float,
) -> Path:
    """Write report and numbers, and track them with every figure; return the page.

    Args:
        output: the folder to write to.
        retriever, evaluation: what was measured.
        test, images: what was found for the test queries, and these.
        gallery: what was searched.
        tracked: a run in MLflow, if there is one.
        started: when the work began.
    """
    with step("report"):
        drawn = drawing.draw_figures(retriever, evaluation, test, images, gallery)
        pictures = {name: figures.to_svg(figure) for name, figure in drawn.items()}
        text = report.render(evaluation, pictures)
    page, results = output / PAGE, output / RESULTS
    output.mkdir(parents=True, exist_ok=True)
    # Results first: they are what says that a page is ours.
    write_results(results, evaluation, time.monotonic() - started)
    write_file(page, text.encode())
    if tracked is not None:
        tracked.log_metrics(evaluation.metrics())
        for name, svg in pictures.items():
            tracked.log_figure(svg, name)
        tracked.log_file(page)
        tracked.log_file(results)
    return page


def write_results(path: Path, evaluation: Evaluation, seconds: float) -> None:
    """Write the numbers of an evaluation as JSON."""
    write_json(path, evaluation.to_dict() | {"seconds": round(seconds, 2)})
