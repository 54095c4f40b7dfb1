"""The records of a sweep while Ray Tune runs it: on disk, in MLflow and on the screen."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial

from rcir.cluster import free
from rcir.errors import TrackingUnavailable
from rcir.runs.folder import RunFolder, read_run
from rcir.terminal import console
from training.loop import PLACEMENT_GROUP, STOPPED_FILE
from tuning.records import REPORTS_FILE, Records, Trial
from tuning.trial import read_reports, select_metrics

# Metrics of each trial in MLflow; its runs have those of trainings too, and trials.csv has all.
LOGGED_METRICS = ("certified_size", "recall_at_1")


class TrialWatch(Callback):
    """Keeps the records of a sweep while Ray Tune runs it.

    MLflow need not be available meanwhile: `log` logs what is missing.
    """

    def __init__(self, records: Records, total: int) -> None:
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
            epochs, metrics = max(record.epochs, int(result["epoch"])), select_metrics(result)
            self._record(replace(record, values=_values(trial), epochs=epochs, metrics=metrics))

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        finished = bool((trial.last_result or {}).get("finished"))
        if not finished:
            self._free(trial)
        self._end(self._find(trial), state="finished" if finished else "stopped")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        self._free(trial)
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
        """Log the results of each trial to MLflow; `TrackingUnavailable` if that is impossible."""
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
        console.print(f"{len(self._ended)}/{self._total}  {describe_trial(trial)}", soft_wrap=True)

    def _free(self, trial: TuneTrial) -> None:
        """Free the resources of the workers of a trial that did not finish."""
        group = (trial.last_result or {}).get(PLACEMENT_GROUP)
        if group is not None:
            for run in self._runs(self._find(trial)):
                (run.path / STOPPED_FILE).touch()
            free(group)

    def _record(self, trial: Trial) -> None:
        self._records.trials[trial.number] = trial
        self._records.write()

    def _runs(self, trial: Trial) -> list[RunFolder]:
        """Return the trainings of a trial that have started."""
        runs = (read_run(self._records.folder / name) for name in self._records.names(trial))
        return [run for run in runs if run is not None]

    def _log(self, trial: Trial) -> None:
        name = self._records.config["training"]["name"]
        tags = {"rcir.sweep": name, "rcir.trial": f"{trial.number:03d}"}
        tags["rcir.state"] = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
        for run in self._runs(trial):
            run.tracked.log_tags(tags)
            run.tracked.log_params({f"sweep/{name}": v for name, v in trial.values.items()})
            metrics = {
                name: trial.metrics[name] for name in LOGGED_METRICS if name in trial.metrics
            }
            run.tracked.log_metrics({f"sweep/{name}": value for name, value in metrics.items()})


def describe_trial(trial: Trial) -> str:
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


def _values(trial: TuneTrial) -> dict[str, Any]:
    return {name: value for name, value in trial.config["drawn"].items() if name != "number"}
