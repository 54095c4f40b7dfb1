"""Reports on trials: in the folder of the sweep, in MLflow and on the screen."""

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
from rcir.runs.compare import compare_runs, print_comparison
from rcir.runs.folder import RunFolder, read_run
from rcir.terminal import console
from training.loop import PLACEMENT_GROUP
from tuning.config import TuningConfig
from tuning.records import BEST_FILE, REPORTS_FILE, SWEEP_FILE, TABLE_FILE, Records, Trial
from tuning.trial import read_reports

# In MLflow, of each trial: its runs have the metrics of trainings, too, and trials.csv has all.
SHOWN = ("certified_size", "recall_at_1")


class TrialWatch(Callback):
    """Keeps the records of a sweep while Ray Tune runs it.

    MLflow may be away meanwhile: what could not be noted there is noted by `log`.
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
        own_trial = self._trial_of(trial)
        if own_trial.number not in self._ended:
            own_trial = replace(own_trial, state="running", reason="", final=False)
        self._started.setdefault(own_trial.number, time.monotonic())
        self._note(replace(own_trial, values=_values(trial)))

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        own_trial = self._trial_of(trial)
        if own_trial.number not in self._ended:
            epochs = max(own_trial.epochs, int(result["epoch"]))
            self._note(
                replace(
                    own_trial, values=_values(trial), epochs=epochs, metrics=shown_metrics(result)
                )
            )

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        finished = bool((trial.last_result or {}).get("finished"))
        if not finished:
            _free(trial)
        self._end(self._trial_of(trial), state="finished" if finished else "stopped")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        _free(trial)
        own_trial = self._trial_of(trial)  # Ray may not have come to start it
        path = self._records.folder / own_trial.name / REPORTS_FILE
        died = {"reason": f"its process died, see {trial.error_file}", "final": False}
        failure = read_reports(path)["failure"] or died
        self._end(own_trial, state="failed", **failure)

    def give_up(self) -> None:
        """Note that what has not ended by now will not: Ray Tune could not start it."""
        for trial in list(self._records.trials.values()):
            if trial.number not in self._ended:
                self._end(trial, state="failed", reason="Ray Tune could not start it")

    def log(self) -> None:
        """Note in MLflow what each trial came to; `TrackingUnavailable` if it is away."""
        for trial in self._records.trials.values():
            self._log(trial)

    def _trial_of(self, trial: TuneTrial) -> Trial:
        number = int(str(trial.custom_dirname))
        return self._records.trials.get(number, Trial(number, _values(trial)))

    def _end(self, trial: Trial, **changes: Any) -> None:
        # It may have ended before, and only reported again what it had reported.
        if trial.number in self._ended:
            return
        now = time.monotonic()
        seconds = now - self._started.get(trial.number, now)
        trial = replace(trial, seconds=seconds, **changes)
        self._ended.add(trial.number)
        self._note(trial)
        with suppress(TrackingUnavailable):
            self._log(trial)
            if trial.state != "finished":
                for run in self._runs(trial):
                    run.tracked.end("FAILED" if trial.state == "failed" else "KILLED")
        console.print(f"{len(self._ended)}/{self._total}  {line(trial)}", soft_wrap=True)

    def _note(self, trial: Trial) -> None:
        self._records.trials[trial.number] = trial
        self._records.write()

    def _runs(self, trial: Trial) -> list[RunFolder]:
        """The trainings of a trial that were begun."""
        runs = (read_run(self._records.folder / name) for name in self._records.names(trial))
        return [run for run in runs if run is not None]

    def _log(self, trial: Trial) -> None:
        tags = {"rcir.sweep": self._config.training.name, "rcir.trial": f"{trial.number:03d}"}
        tags["rcir.state"] = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
        for run in self._runs(trial):
            run.tracked.log_tags(tags)
            run.tracked.log_params({f"sweep/{name}": v for name, v in trial.values.items()})
            shown = {
                f"sweep/{each}": trial.metrics[each] for each in SHOWN if each in trial.metrics
            }
            run.tracked.log_metrics(shown)


def line(trial: Trial) -> str:
    """A trial in one line."""
    values = ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in trial.values.items()
    )
    state = trial.state if trial.state == "finished" else f"{trial.state} at epoch {trial.epochs}"
    size = trial.metrics.get("certified_size")
    stated = "" if size is None else f"certified size {size:.2f}, "
    reason = f" ({trial.reason})" if trial.reason else ""
    return f"{trial.name} {state}: {stated}{values}  {trial.seconds:.0f} s{reason}"


def _free(trial: TuneTrial) -> None:
    """Give back what the workers of a trial hold that did not come to its end."""
    group = (trial.last_result or {}).get(PLACEMENT_GROUP)
    if group is not None:
        free(group)


def _values(trial: TuneTrial) -> dict[str, Any]:
    return {name: value for name, value in trial.config["drawn"].items() if name != "number"}


def shown_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a trial that its record keeps."""
    names = [name for name in result if name.startswith("certified_size")]
    names += ["recall_at_1", "ece", "auroc_miss"]
    return {name: float(result[name]) for name in names if name in result}


def best_run(records: Records) -> RunFolder:
    """The (first) training run of the best trial.

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
    run = best_run(records)
    text = yaml.safe_dump(_complete(records, run), sort_keys=False)
    note = (
        f"# The best of {len(records.trials)} trials, {run.path.name}, under a name of its own.\n"
    )
    write_file(records.folder / BEST_FILE, (note + text).encode())
    best = records.ranked()[0]
    tracked = records.tracked
    tracked.log_tags({"rcir.best": best.name})
    tracked.log_metrics({f"sweep/{name}": value for name, value in best.metrics.items()})
    write_file(records.folder / TABLE_FILE, table_of(records).to_csv(index=False).encode())
    for file in (BEST_FILE, TABLE_FILE, SWEEP_FILE):
        tracked.log_file(records.folder / file)


def _complete(records: Records, run: RunFolder) -> dict[str, Any]:
    """The configuration of a trial, to be trained anew where and as the sweep was to train."""
    training = records.config["training"]
    where = {name: training[name] for name in ("storage", "num_workers", "use_gpu")}
    data = run.config["data"] | {"root": training["data"]["root"]}
    return run.config | where | {"name": f"{training['name']}-best", "data": data}


def table_of(records: Records) -> pd.DataFrame:
    """The trials, the best first: metrics at sweep's end, options, why they failed."""
    ranked = records.ranked()
    about = [
        {"trial": trial.name, "state": trial.state, "epochs": trial.epochs} for trial in ranked
    ]
    rest = [trial.metrics | trial.values | {"reason": trial.reason} for trial in ranked]
    return pd.DataFrame([first | more for first, more in zip(about, rest, strict=True)])


def print_sweep(records: Records) -> None:
    """Show the trials, the best first, as `rcir compare` does, and why any failed."""
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
