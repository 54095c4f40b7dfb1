"""From a trained run to a retriever on disk and in MLflow."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from calibration import report
from calibration.config import CalibrationConfig
from calibration.evaluation import Evaluation, Queries, evaluate, search
from rcir import runs, storage
from rcir.data import Splits, load_splits
from rcir.errors import InvalidData
from rcir.retriever import Retriever
from rcir.risk import Constant, RiskController, adapter_class


@dataclass(frozen=True)
class Calibrated:
    """The outcome of a calibration.

    Attributes:
        retriever: calibrated, as it is on disk.
        folder: where it is on disk.
        report: the report's page.
        evaluation: what was measured on the test queries.
        test: the test queries and what was found for them.
        splits: the data they come from.
    """

    retriever: Retriever
    folder: Path
    report: Path
    evaluation: Evaluation
    test: Queries
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
        search(retriever, queries) for queries in (splits.adapter, splits.calibration, splits.test)
    )
    adapter = adapter_class(config.adapter).fit(adapter_split.found.uncertainty)
    retriever.calibrate(adapter, calibration.found, calibration.ranks, config.bound)
    controller, constant = (
        RiskController.calibrate(
            chosen, calibration.found.uncertainty, calibration.ranks, retriever.depth, config.bound
        )
        for chosen in (adapter, Constant())
    )
    evaluation = evaluate(
        run.data.name,
        controller,
        constant,
        adapter_split,
        test,
        retriever.encoder.config.method,
        config.alphas,
        config.delta,
    )
    _check_output(output, run.path)
    folder = storage.save(retriever, output / "retriever")
    figures = report.draw(controller, constant, evaluation, test, splits.gallery, config.delta)
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
    if written and output.absolute() != run and not (output / "retriever").is_dir():
        raise InvalidData(
            f"{output} holds {' and '.join(written)} of something else: choose another output"
        )


def write_results(path: Path, evaluation: Evaluation, seconds: float) -> None:
    """Write the numbers of an evaluation as JSON."""
    names = ("dataset", "encoder", "recall_at_1", "n_calibration", "n_test", "auroc_miss")
    values = {name: getattr(evaluation, name) for name in (*names, "auroc_occlusion")}
    rows = [asdict(row) for row in evaluation.rows]
    runs.write_json(path, values | {"seconds": round(seconds, 2), "rows": rows})
