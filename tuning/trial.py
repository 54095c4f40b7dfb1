"""One trial, in the process that Ray Tune gives it: train, and report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import ray.train
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from rcir.errors import CheckpointFailed, RcirError, TrackingUnavailable, WorkersLost
from rcir.files import write_json
from rcir.options import DELTA
from rcir.risk import Certified, is_certified, mean_size
from rcir.runs.folder import RunFolder
from rcir.runs.results import VALIDATION, RunResults
from rcir.tracking import TrackedRun
from training.checkpoint import last_epoch, restore_validation
from training.config import TrainingConfig
from training.loop import PLACEMENT_GROUP
from training.run import run_lock, train
from tuning.config import TuningConfig, with_values
from tuning.records import REPORTS_FILE, State, seeded, trial_name

OBJECTIVE = "judged_size"  # as Ray Tune knows it, and reports that may be read again
ORPHANED = 60  # seconds; the processes of a killed sweep live on for some
PATIENCE = 120  # seconds
# What may go well at another time; anything else that rcir raises would be raised again.
TRANSIENT = (CheckpointFailed, TrackingUnavailable, WorkersLost)


@dataclass(frozen=True)
class Plan:
    """The facts that all trials of a sweep share.

    Attributes:
        config: of the sweep; where it stores and finds data is absolute.
        folder: of the sweep.
        parent: the sweep's run in MLflow.
        ended: the trials that ended already, by number, and how.
        rejects: ids and reasons of the images that are left out, since they cannot be read.
    """

    config: TuningConfig
    folder: str
    parent: TrackedRun
    ended: Mapping[int, State]
    rejects: Mapping[str, str]


def run_trial(given: dict[str, Any], plan: Plan) -> None:
    """Train what was drawn, with every seed, and report each epoch to Ray Tune.

    A trial that was begun before reports first what it reported then, so that scheduler and search
    know it, and goes on from its last checkpoint. One that ended trains nothing.

    Raises:
        RcirError: why it cannot be trained, also if that was found before.
    """
    # Before the next trial takes over this process, Ray Tune waits so long for the end of a stopped
    # one, which MLflow may hold up; if it is not over by then, the next trial is lost.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = f"{PATIENCE}"
    number = int(Path(tune.get_context().get_trial_dir()).name)
    values = {name: value for name, value in given["drawn"].items() if name != "number"}
    first = Path(plan.folder) / trial_name(number)
    reports = Reports(first / REPORTS_FILE)
    ended = plan.ended.get(number)
    if ended == "failed":
        raise RcirError(read_reports(first / REPORTS_FILE)["failure"]["reason"])
    try:
        config = with_values(plan.config.training, values)
        config = replace(config, name=first.name, storage=plan.folder)
        reports.repeat()
        if ended is None:
            _train(plan, config, reports)
    except Exception as error:
        reports.failed(error)
        raise


def _train(plan: Plan, config: TrainingConfig, reports: Reports) -> None:
    trained = 0
    for seed in range(plan.config.seeds):
        folder = Path(plan.folder) / seeded(config.name, seed)
        callback = None if seed else Epochs(plan.config, config.epochs, folder, reports)
        run = _train_one(plan, config, seed, callback)
        trained += last_epoch(run.path) or config.epochs  # an ensemble has none of its own
        done = seed + 1 == plan.config.seeds
        folders = [Path(plan.folder) / seeded(config.name, each) for each in range(seed + 1)]
        metrics = mean_metrics(folders, plan.config)
        reports.add(metrics | {"epoch": trained, "finished": float(done)})


def train_seed(plan: Plan, number: int, values: Mapping[str, Any], seed: int) -> None:
    """Train a trial with one of its seeds, from 0."""
    config = with_values(plan.config.training, values)
    config = replace(config, name=trial_name(number), storage=plan.folder)
    _train_one(plan, config, seed, None)


def _train_one(plan: Plan, config: TrainingConfig, seed: int, callback: Epochs | None) -> RunFolder:
    """Train with one seed, once what a killed sweep may have left has ended."""
    one = replace(config, name=seeded(config.name, seed), seed=config.seed + seed)
    with run_lock(Path(plan.folder) / one.name, ORPHANED):
        pass
    return train(one, plan.parent, callback, plan.rejects)


def mean_metrics(folders: Sequence[Path], config: TuningConfig) -> dict[str, float]:
    """The mean of the metrics that all seeds of a trial have, and how far apart their sizes are."""
    each_metric = []
    for folder in folders:
        results = RunResults.read(folder / VALIDATION)
        each_metric.append(_metrics(results.metrics, results.parts, config))
    common = set.intersection(*(set(metrics) for metrics in each_metric))
    mean = {
        name: fmean(each[name] for each in each_metric) for name in each_metric[0] if name in common
    }
    if len(each_metric) > 1 and "certified_size" in mean:
        mean["certified_size_deviation"] = stdev(each["certified_size"] for each in each_metric)
    return mean


class Epochs(ray.train.UserCallback):
    """Reports the epochs of a training, but for the last, which is reported once all is written.

    Ray Train calls it in its controller, a training without workers in its own thread.
    """

    def __init__(self, config: TuningConfig, epochs: int, folder: Path, reports: Reports) -> None:
        self._config = config
        self._epochs = epochs
        self._folder = folder
        self._reports = reports
        # Made here, in the trial: it finds the way back to it.
        self._forward = TuneReportCallback() if config.training.most_workers else None

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        epoch = int(metrics[0]["epoch"])
        if epoch == self._epochs:
            return
        try:
            certified = restore_validation(self._folder, epoch).certified
        except FileNotFoundError:
            # Ray asks workers every other second: of shorter epochs, some are gone by then.
            certified = []
        names = {
            name.removeprefix("validation/"): value
            for name, value in metrics[0].items()
            if name.startswith("validation/")
        }
        report = _metrics(names, certified, self._config) | {"epoch": epoch, "finished": 0.0}
        if OBJECTIVE not in report:
            return
        if self._forward is not None:
            self._reports.write(report)
            held = (
                {PLACEMENT_GROUP: metrics[0][PLACEMENT_GROUP]}
                if PLACEMENT_GROUP in metrics[0]
                else {}
            )
            self._forward.after_report(run_context, [report | held], None)
        else:
            self._reports.add(report)


class Reports:
    """Reports of a trial to Ray Tune, in a file, so that they can be repeated."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def repeat(self) -> None:
        """Report all of it again."""
        for report in read_reports(self._path)["reports"]:
            tune.report(report)

    def add(self, report: dict[str, float]) -> None:
        """Write a report down, and report it."""
        self.write(report)
        tune.report(report)

    def write(self, report: dict[str, float]) -> None:
        """Write down what is reported elsewhere; what was is not written again."""
        reports = read_reports(self._path)["reports"]
        if report not in reports:  # and it has not failed since
            self._save({"reports": [*reports, report], "failure": None})

    def failed(self, error: Exception) -> None:
        """Write down why the trial failed, for processes that see only that it did."""
        self._save(read_reports(self._path) | {"failure": failure_of(error)})

    def _save(self, values: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, values)


def failure_of(error: Exception) -> dict[str, Any]:
    """Why a trial failed, and whether it would fail again."""
    reason = " ".join(str(error).split()) or type(error).__name__
    final = isinstance(error, RcirError) and not isinstance(error, TRANSIENT)
    return {"reason": f"{type(error).__name__}: {reason}", "final": final}


def read_reports(path: Path) -> dict[str, Any]:
    """Read a trial's reports, and why it failed if it did."""
    values: dict[str, Any] = {"reports": [], "failure": None}
    return values | (json.loads(path.read_text()) if path.is_file() else {})


def _metrics(
    names: Mapping[str, float], parts: Sequence[Certified], config: TuningConfig
) -> dict[str, float]:
    """The objective of a trial, and the metrics shown with it.

    Where (alpha, delta) cannot be certified, there is no certified size, but something for search
    and scheduler to improve: the mean of sizes of which some are the whole search depth.
    """
    metrics = dict(names)
    if parts:
        metrics[OBJECTIVE] = mean_size(parts, config.alpha, config.delta)
        if is_certified(parts, config.alpha, config.delta):
            metrics["certified_size"] = metrics[OBJECTIVE]
    elif config.delta == DELTA and f"certified_size_{config.alpha:g}" in names:
        metrics[OBJECTIVE] = metrics["certified_size"] = names[f"certified_size_{config.alpha:g}"]
    return metrics
