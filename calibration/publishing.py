"""Publishing an evaluation: its page, its numbers, and a run of its own in MLflow."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from calibration import drawing, report
from calibration.config import CalibrationConfig, EvaluationConfig
from calibration.evaluation import Evaluation
from calibration.progress import step
from rcir import figures, tracking
from rcir.data import ImageSet
from rcir.errors import InvalidData
from rcir.files import write_file, write_json
from rcir.retrieval.retriever import Retriever
from rcir.risk import Certified, LabelledResults, score
from rcir.runs.results import RESULTS, TEST, RunResults, names_digest

if TYPE_CHECKING:
    from calibration.vectors import CertificationConfig

PAGE = "report.html"


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
    config: CalibrationConfig | EvaluationConfig | CertificationConfig,
    output: Path,
    trained: tracking.TrackedRun | None,
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


def measured(
    retriever: Retriever,
    evaluation: Evaluation,
    test: LabelledResults,
    calibration_ids: Sequence[str],
    test_ids: Sequence[str],
) -> RunResults:
    """The results by which `rcir compare` and `rcir register` tell which retriever is better."""
    rule = retriever.require_calibration().main
    numbers = {name.removeprefix("test/"): value for name, value in evaluation.metrics().items()}
    # What queries in clusters certify is no order statistic: there is nothing to compare.
    alone = rule.calibration.cluster is None
    scored = score(rule.score_function, test)
    part = Certified(rule.calibration.match_score, scored.require("scores"))
    return RunResults(
        "test",
        names_digest([*calibration_ids, *test_ids]),
        [part] if alone else [],
        numbers | {"ece": evaluation.quality.reliability.error},
        rule.score_function.name,
        names_digest([*retriever.ids.tolist(), *test_ids, *map(str, test.n_relevant.tolist())]),
        scored.match_score if alone else None,
    )
