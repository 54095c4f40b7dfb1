"""Reports on trials in the folder of the sweep, in MLflow and on the screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pandas as pd
import yaml
from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial

from rcir.cluster import free
from rcir.errors import InvalidData, TrackingUnavailable, printable
from rcir.files import write_file
from rcir.options import ALPHAS
from rcir.runs.compare import compare_runs
from rcir.runs.folder import RunFolder, read_run
from rcir.runs.show import print_comparison
from rcir.terminal import console
from training.loop import PLACEMENT_GROUP
from tuning.config import TuningConfig
from tuning.records import BEST_FILE, REPORTS_FILE, SWEEP_FILE, TABLE_FILE, Records, Trial
from tuning.trial import read_reports

# Metrics of each trial in MLflow; its runs have those of trainings too, and trials.csv has all.
LOGGED = ("certified_size", "recall_at_1")


class TrialWatch(Callback):
    """Keeps the records of a sweep while Ray Tune runs it.

    MLflow may be away meanwhile: `log` then logs what is missing.
    """

    def __init__(self, config: TuningConfig, records: Records, total: int) -> None:
        self._config = config
        self._records = records
        self._total = total
        self._started: dict[int, float] = {}
        self._ended = {number for number, trial in records.trials.items() if trial.done}

    def on_trial_start(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        record = self._find(trial)
        if record.number not in self._ended:
            record = replace(record, state="running", reason="", final=False)
        self._started.setdefault(record.number, time.monotonic())
        self._record(replace(record, values=_values(trial)))

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        record = self._find(trial)
        if record.number not in self._ended:
            epochs, metrics = max(record.epochs, int(result["epoch"])), recorded_metrics(result)
            self._record(replace(record, values=_values(trial), epochs=epochs, metrics=metrics))

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        finished = bool((trial.last_result or {}).get("finished"))
        if not finished:
            _free(trial)
        self._end(self._find(trial), state="finished" if finished else "stopped")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        _free(trial)
        record = self._find(trial)  # it may never have started
        path = self._records.folder / record.name / REPORTS_FILE
        died = {"reason": f"its process died, see {trial.error_file}", "final": False}
        failure = read_reports(path)["failure"] or died
        self._end(record, state="failed", **failure)

    def give_up(self) -> None:
        """Record the trials that Ray Tune did not start as failed."""
        for trial in list(self._records.trials.values()):
            if trial.number not in self._ended:
                self._end(trial, state="failed", reason="Ray Tune could not start it")

    def log(self) -> None:
        """Log the results of each trial to MLflow; `TrackingUnavailable` if it is away."""
        for trial in self._records.trials.values():
            self._log(trial)

    def _find(self, trial: TuneTrial) -> Trial:
        number = int(str(trial.custom_dirname))
        return self._records.trials.get(number, Trial(number, _values(trial)))

    def _end(self, trial: Trial, **changes: Any) -> None:
        if trial.number in self._ended:  # it has only repeated its reports
            return
        now = time.monotonic()
        seconds = now - self._started.get(trial.number, now)
        trial = replace(trial, seconds=seconds, **changes)
        self._ended.add(trial.number)
        self._record(trial)
        with suppress(TrackingUnavailable):
            self._log(trial)
            if trial.state != "finished":
                for run in self._runs(trial):
                    run.tracked.end("FAILED" if trial.state == "failed" else "KILLED")
        console.print(f"{len(self._ended)}/{self._total}  {line(trial)}", soft_wrap=True)

    def _record(self, trial: Trial) -> None:
        self._records.trials[trial.number] = trial
        self._records.write()

    def _runs(self, trial: Trial) -> list[RunFolder]:
        """Return the trainings of a trial that have started."""
        runs = (read_run(self._records.folder / name) for name in self._records.names(trial))
        return [run for run in runs if run is not None]

    def _log(self, trial: Trial) -> None:
        tags = {"rcir.sweep": self._config.training.name, "rcir.trial": f"{trial.number:03d}"}
        tags["rcir.state"] = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
        for run in self._runs(trial):
            run.tracked.log_tags(tags)
            run.tracked.log_params({f"sweep/{name}": v for name, v in trial.values.items()})
            metrics = {name: trial.metrics[name] for name in LOGGED if name in trial.metrics}
            run.tracked.log_metrics({f"sweep/{name}": value for name, value in metrics.items()})


def line(trial: Trial) -> str:
    """Describe a trial in one line."""
    values = ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in trial.values.items()
    )
    state = trial.state if trial.state == "finished" else f"{trial.state} at epoch {trial.epochs}"
    size = trial.metrics.get("certified_size")
    result = "" if size is None else f"certified size {size:.2f}, "
    reason = f" ({trial.reason})" if trial.reason else ""
    return f"{trial.name} {state}: {result}{values}  {trial.seconds:.0f} s{reason}"


def _free(trial: TuneTrial) -> None:
    """Free the resources of the workers of a trial that did not finish."""
    group = (trial.last_result or {}).get(PLACEMENT_GROUP)
    if group is not None:
        free(group)


def _values(trial: TuneTrial) -> dict[str, Any]:
    return {name: value for name, value in trial.config["drawn"].items() if name != "number"}


def recorded_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a trial that its record keeps."""
    names = [name for name in result if name.startswith("certified_size")]
    names += ["recall_at_1", "ece", "auroc_miss"]
    return {name: float(result[name]) for name in names if name in result}


def best_run(records: Records) -> RunFolder:
    """Return the (first) training run of the best trial.

    Raises:
        InvalidData: no trial has finished.
    """
    best = records.ranked()[0] if records.trials else None
    run = read_run(records.folder / best.name) if best and best.state == "finished" else None
    if run is None:
        failed = [trial for trial in records.trials.values() if trial.reason]
        why = f"; {failed[0].name} failed: {failed[0].reason}" if failed else ""
        raise InvalidData(f"no trial of {records.folder} has finished{why}")
    return run


def publish_sweep(records: Records) -> None:
    """Write `best.yaml`, and log it with the table to MLflow."""
    run, training = best_run(records), records.config["training"]
    # To be trained again with the storage, data and workers of the sweep.
    config = run.config | {name: training[name] for name in ("storage", "num_workers", "use_gpu")}
    config["name"] = f"{training['name']}-best"
    config["data"] = config["data"] | {"root": training["data"]["root"]}
    note = f"# The best of {len(records.trials)} trials, {run.path.name}, under another name.\n"
    text = note + yaml.safe_dump(config, sort_keys=False)
    write_file(records.folder / BEST_FILE, text.encode())
    best, tracked = records.ranked()[0], records.tracked
    tracked.log_tags({"rcir.best": best.name})
    tracked.log_metrics({f"sweep/{name}": value for name, value in best.metrics.items()})
    write_file(records.folder / TABLE_FILE, table_of(records).to_csv(index=False).encode())
    for file in (BEST_FILE, TABLE_FILE, SWEEP_FILE):
        tracked.log_file(records.folder / file)


def table_of(records: Records) -> pd.DataFrame:
    """Return the trials, best first, with their metrics, options and failures."""
    return pd.DataFrame(
        [
            {"trial": trial.name, "state": trial.state, "epochs": trial.epochs}
            | {**trial.metrics, **trial.values, "reason": trial.reason}
            for trial in records.ranked()
        ]
    )


def print_sweep(records: Records) -> None:
    """Print the trials, best first, as `rcir compare` does, and their failures."""
    alpha, delta = records.config["alpha"], records.config["delta"]
    if any(trial.state == "finished" for trial in records.trials.values()):
        levels = sorted({alpha, *ALPHAS})
        print_comparison(compare_runs([str(records.folder)], levels, delta))
    for trial in records.ranked():
        if trial.confirmed:
            deviation = trial.metrics.get("certified_size_deviation", float("nan"))
            console.print(
                f"{trial.name}: certified size {trial.certified_size:.2f}, the mean of "
                f"{len(records.names(trial))} seeds, with standard deviation {deviation:.2f}",
                soft_wrap=True,
            )
        if trial.reason:
            again = "" if trial.final else " (the same command tries it again)"
            console.print(f"{trial.name} failed: {printable(trial.reason)}{again}", soft_wrap=True)
