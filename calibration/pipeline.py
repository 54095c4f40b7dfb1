"""From a trained run to a retriever on disk and in MLflow."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from calibration import report
from calibration.config import CalibrationConfig
from calibration.evaluation import Evaluation, evaluate
from rcir import runs, storage
from rcir.candidates import Judged
from rcir.data import Splits, load_splits
from rcir.errors import InvalidData
from rcir.retriever import Retriever


@dataclass(frozen=True)
class Calibrated:
    """The outcome of a calibration.

    Attributes:
        retriever: calibrated, as it is on disk.
        folder: where it is on disk.
        report: the report's page.
        evaluation: what was measured on the test queries.
        test: what was found for the test queries.
        splits: the data they come from.
    """

    retriever: Retriever
    folder: Path
    report: Path
    evaluation: Evaluation
    test: Judged
    splits: Splits


def calibrate(config: CalibrationConfig) -> Calibrated:
    """Index the gallery, fit adapter and controller, measure, write and track.

    The size adapter is fitted on the adapter split, the controller on the calibration split, and
    what is reported is measured on the test split; no query is in two of them.

    Raises:
        InvalidData: there is no such run, or it is not finished.
        CorruptRetriever: what lies at the retriever's place is something else.
    """
    started = time.monotonic()
    run = runs.find_run(config.run)
    output = Path(config.output) if config.output else run.path
    splits = load_splits(run.data)
    retriever = Retriever.build(run.encoder(), run.preprocessing, splits.gallery, config.depth)
    adapter_split, calibration, test = (
        retriever.judge(queries, config.group)
        for queries in (splits.adapter, splits.calibration, splits.test)
    )
    comparisons = retriever.calibrate(
        adapter_split, calibration, config.adapter, config.bound, config.alphas, config.delta
    )
    evaluation = evaluate(
        run.data.name,
        retriever,
        comparisons[None],
        test,
        splits.test,
        config.alphas,
        config.delta,
    )
    _check_output(output, run.path)
    folder = storage.save(retriever, output / "retriever")
    figures = report.draw(retriever.controllers[None], evaluation, test, splits, config.delta)
    page = output / "report.html"
    page.write_text(report.render(evaluation, figures), encoding="utf-8")
    results = output / "results.json"
    write_results(results, evaluation, time.monotonic() - started)
    tracked = run.tracked
    tracked.log_metrics(evaluation.metrics())
    for name, figure in figures.items():
        tracked.log_figure(figure, name)
    tracked.log_folder(folder, "retriever")
    tracked.log_file(page)
    tracked.log_file(results)
    return Calibrated(retriever, folder, page, evaluation, test, splits)


def _check_output(output: Path, run: Path) -> None:
    """Pages and results that another calibration did not write are left alone."""
    written = [name for name in ("report.html", "results.json") if (output / name).exists()]
    ours = output.absolute() == run or (output / "retriever" / storage.MANIFEST).is_file()
    if written and not ours:
        raise InvalidData(
            f"{output} holds {' and '.join(written)} of something else: choose another output"
        )


def write_results(path: Path, evaluation: Evaluation, seconds: float) -> None:
    """Write the numbers of an evaluation as JSON."""
    names = ("dataset", "encoder", "recall_at_1", "n_calibration", "n_test", "auroc_miss")
    values = {name: getattr(evaluation, name) for name in (*names, "auroc_occlusion")}
    rows = [asdict(row) for row in evaluation.rows]
    others = [asdict(row) for row in evaluation.others]
    values |= {"seconds": round(seconds, 2), "rows": rows, "others": others}
    runs.write_json(path, values | {"adapter_comparison": evaluation.comparison})
