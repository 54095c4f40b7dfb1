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
from rcir.runs.folder import lock_run
from rcir.runs.results import VALIDATION, RunResults
from rcir.tracking import TrackedRun
from training.checkpoint import last_epoch, restore_validation
from training.loop import PLACEMENT_GROUP
from training.run import train
from tuning.config import TuningConfig, with_values
from tuning.records import REPORTS_FILE, State, trial_name

OBJECTIVE = "compared_size"  # its name in Ray Tune, and in stored reports
ORPHANS_END_S = 60  # the processes of a killed sweep live on for some seconds
TRIAL_END_S = 120
TRANSIENT = (CheckpointFailed, TrackingUnavailable, WorkersLost)  # a second attempt may succeed


@dataclass(frozen=True)
class Plan:
    """The facts that all trials of a sweep share."""

    config: TuningConfig  # with absolute paths
    folder: str
    parent: TrackedRun  # the sweep
    ended: Mapping[int, State]  # final states, by number
    rejects: Mapping[str, str]  # ids and reasons of unreadable images, which are left out


def run_trial(trial_config: dict[str, Any], plan: Plan) -> None:
    """Train a trial with every seed, and report each epoch to Ray Tune.

    An interrupted trial first repeats its reports, then continues; one that has ended repeats them.
    """
    # How long Ray Tune waits for a stopped trial, which MLflow may delay, before the next one takes
    # over its process; otherwise, the next trial is lost.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = f"{TRIAL_END_S}"
    number = int(Path(tune.get_context().get_trial_dir()).name)
    values = {name: value for name, value in trial_config["drawn"].items() if name != "number"}
    path = Path(plan.folder) / trial_name(number) / REPORTS_FILE
    reports, ended = Reports(path), plan.ended.get(number)
    if ended == "failed":
        raise RcirError(read_reports(path)["failure"]["reason"])
    try:
        reports.repeat()
        if ended is None:
            _train_seeds(plan, number, values, reports)
    except Exception as error:
        reports.add_failure(error)
        raise


def _train_seeds(plan: Plan, number: int, values: Mapping[str, Any], reports: Reports) -> None:
    epochs = with_values(plan.config.training, values).epochs
    n_trained, folders = 0, []
    for seed in range(plan.config.seeds):
        folders.append(Path(plan.folder) / trial_name(number, seed))
        callback = None if seed else Epochs(plan.config, epochs, folders[0], reports)
        train_seed(plan, number, values, seed, callback)
        n_trained += last_epoch(folders[-1]) or epochs  # an ensemble has no checkpoint
        finished = float(seed + 1 == plan.config.seeds)
        metrics = average_metrics(folders, plan.config)
        reports.add(metrics | {"epoch": n_trained, "finished": finished})


def train_seed(
    plan: Plan,
    number: int,
    values: Mapping[str, Any],
    seed: int,
    callback: Epochs | None = None,
) -> None:
    """Train a trial with one of its seeds, from 0, once processes of a killed sweep have ended."""
    config = with_values(plan.config.training, values)
    name = trial_name(number, seed)
    config = replace(config, name=name, storage=plan.folder, seed=config.seed + seed)
    with lock_run(Path(plan.folder) / name, ORPHANS_END_S):
        pass
    train(config, plan.parent, callback, plan.rejects)


def average_metrics(folders: Sequence[Path], config: TuningConfig) -> dict[str, float]:
    """Return the means of the metrics of all seeds, and the standard deviation of sizes."""
    by_seed = []
    for folder in folders:
        results = RunResults.read(folder / VALIDATION)
        by_seed.append(_metrics(results.metrics, results.parts, config))
    common = set.intersection(*(set(metrics) for metrics in by_seed))
    means = {name: fmean(m[name] for m in by_seed) for name in by_seed[0] if name in common}
    if len(by_seed) > 1 and "certified_size" in means:
        means["certified_size_deviation"] = stdev(m["certified_size"] for m in by_seed)
    return means


class Epochs(ray.train.UserCallback):
    """Reports the epochs of a training except the last, which is reported once the run is written.

    Ray Train calls it in its controller, a training without workers in its own thread.
    """

    def __init__(self, config: TuningConfig, epochs: int, folder: Path, reports: Reports) -> None:
        self._config = config
        self._epochs = epochs
        self._folder = folder
        self._reports = reports
        # Created in the trial, to which it then reports.
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
            # Ray polls workers every two seconds: checkpoints of shorter epochs may be gone.
            certified = []
        names = {
            name.removeprefix("validation/"): value
            for name, value in metrics[0].items()
            if name.startswith("validation/")
        }
        report = _metrics(names, certified, self._config) | {"epoch": epoch, "finished": 0.0}
        if OBJECTIVE not in report:
            return
        if self._forward is None:
            self._reports.add(report)
            return
        self._reports.write(report)
        group = {name: metrics[0][name] for name in (PLACEMENT_GROUP,) if name in metrics[0]}
        self._forward.after_report(run_context, [report | group], None)


class Reports:
    """Reports of a trial to Ray Tune, stored so that they can be repeated."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def repeat(self) -> None:
        """Report everything again."""
        for report in read_reports(self._path)["reports"]:
            tune.report(report)

    def add(self, report: dict[str, float]) -> None:
        """Store a report, and send it."""
        self.write(report)
        tune.report(report)

    def write(self, report: dict[str, float]) -> None:
        """Store a report unless it is stored already."""
        reports = read_reports(self._path)["reports"]
        if report not in reports:  # and the trial has not failed since
            self._save({"reports": [*reports, report], "failure": None})

    def add_failure(self, error: Exception) -> None:
        """Store the reason of a failure, which other processes cannot see."""
        self._save(read_reports(self._path) | {"failure": describe_failure(error)})

    def _save(self, values: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, values)


def describe_failure(error: Exception) -> dict[str, Any]:
    """Return the reason of a failure, and whether it is final."""
    reason = " ".join(str(error).split()) or type(error).__name__
    final = isinstance(error, RcirError) and not isinstance(error, TRANSIENT)
    return {"reason": f"{type(error).__name__}: {reason}", "final": final}


def select_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a trial that its record keeps."""
    names = [name for name in result if name.startswith("certified_size")]
    names += ["recall_at_1", "ece", "auroc_miss"]
    return {name: float(result[name]) for name in names if name in result}


def read_reports(path: Path) -> dict[str, Any]:
    """Read a trial's reports and its failure, if any."""
    values: dict[str, Any] = {"reports": [], "failure": None}
    return values | (json.loads(path.read_text()) if path.is_file() else {})


def _metrics(
    names: Mapping[str, float], parts: Sequence[Certified], config: TuningConfig
) -> dict[str, float]:
    """Return the objective of a trial, and its other metrics.

    If (alpha, delta) cannot be certified, the objective is a mean over sizes that include the full
    search depth, so that search and scheduler can improve it.
    """
    metrics = dict(names)
    if parts:
        metrics[OBJECTIVE] = mean_size(parts, config.alpha, config.delta)
        if is_certified(parts, config.alpha, config.delta):
            metrics["certified_size"] = metrics[OBJECTIVE]
    elif config.delta == DELTA and f"certified_size_{config.alpha:g}" in names:
        metrics[OBJECTIVE] = metrics["certified_size"] = names[f"certified_size_{config.alpha:g}"]
    return metrics
