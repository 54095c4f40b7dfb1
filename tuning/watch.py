"""What becomes of trials: noted in the sweep's folder, in MLflow and on the screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial
from rich.console import Console

from rcir.errors import TrackingUnavailable
from rcir.runs import read_run
from tuning.config import TuningConfig
from tuning.records import REPORTS_FILE, Records, Trial
from tuning.trial import read_reports

console = Console(highlight=False)


class Watch(Callback):
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
        number, values = _number(trial), _values(trial)
        known = self._records.trials.get(number, Trial(number, values))
        state = known.state if number in self._ended else "running"
        self._started.setdefault(number, time.monotonic())
        self._note(replace(known, values=values, state=state))

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        number = _number(trial)
        if number not in self._ended:
            known = self._records.trials[number]
            epochs = max(known.epochs, int(result["epoch"]))
            self._note(replace(known, values=_values(trial), epochs=epochs, metrics=_kept(result)))

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        finished = bool((trial.last_result or {}).get("finished"))
        self._end(_number(trial), state="finished" if finished else "stopped")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        number = _number(trial)
        path = self._records.folder / self._records.trials[number].name / REPORTS_FILE
        died = {"reason": f"its process died, see {trial.error_file}", "final": False}
        failure = read_reports(path)["failure"] or died
        self._end(number, state="failed", **failure)

    def log(self) -> None:
        """Note in MLflow what each trial came to; `TrackingUnavailable` if it is away."""
        for trial in self._records.trials.values():
            self._log(trial)

    def _end(self, number: int, **changes: Any) -> None:
        if number in self._ended:  # it ended before, and only told again what it had told
            return
        trial = self._records.trials[number]
        seconds = trial.seconds + time.monotonic() - self._started[number]
        trial = replace(trial, seconds=seconds, **changes)
        self._ended.add(number)
        self._note(trial)
        with suppress(TrackingUnavailable):
            self._log(trial)
        console.print(f"{len(self._ended)}/{self._total}  {line(trial)}", soft_wrap=True)

    def _note(self, trial: Trial) -> None:
        self._records.trials[trial.number] = trial
        self._records.write()

    def _log(self, trial: Trial) -> None:
        run = read_run(self._records.folder / trial.name)
        if run is None:  # it failed before it began
            return
        tags = {"rcir.sweep": self._config.training.name, "rcir.trial": f"{trial.number:03d}"}
        tags["rcir.state"] = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
        run.tracked.log_tags(tags)
        sizes = ("certified_size", "recall_at_1", "ece")
        run.tracked.log_metrics(
            {f"sweep/{name}": trial.metrics[name] for name in sizes if name in trial.metrics}
        )
        if trial.state != "finished":
            run.tracked.end("FAILED" if trial.state == "failed" else "KILLED")


def line(trial: Trial) -> str:
    """A trial in one line."""
    values = ", ".join(f"{name} {shown(value)}" for name, value in trial.values.items())
    state = trial.state if trial.state == "finished" else f"{trial.state} at epoch {trial.epochs}"
    found = f"certified size {trial.certified_size:.2f}, " if trial.metrics else ""
    reason = f" ({trial.reason})" if trial.reason else ""
    return f"{trial.name} {state}: {found}{values}  {trial.seconds:.0f} s{reason}"


def shown(value: Any) -> str:
    """An option's value, short."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _number(trial: TuneTrial) -> int:
    return int(str(trial.custom_dirname))


def _values(trial: TuneTrial) -> dict[str, Any]:
    return {name: value for name, value in trial.config["drawn"].items() if name != "number"}


def _kept(result: Mapping[str, Any]) -> dict[str, float]:
    names = [name for name in result if name.startswith("certified_size")]
    names += ["recall_at_1", "ece", "auroc_miss"]
    return {name: float(result[name]) for name in names if name in result}
