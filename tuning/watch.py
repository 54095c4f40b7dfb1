"""The state of trials, written to the sweep's folder, to MLflow and to the screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial
from rich.console import Console

from rcir.cluster import free
from rcir.errors import TrackingUnavailable
from rcir.runs.folder import RunFolder, read_run
from training import PLACEMENT_GROUP
from tuning.config import TuningConfig
from tuning.records import REPORTS_FILE, Records, Trial, seeded
from tuning.trial import read_reports

# Names may look like markup.
console = Console(highlight=False, markup=False)


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
        known = self._known(trial)
        if known.number not in self._ended:
            known = replace(known, state="running", reason="", final=False)
        self._started.setdefault(known.number, time.monotonic())
        self._note(replace(known, values=_values(trial)))

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        known = self._known(trial)
        if known.number not in self._ended:
            epochs = max(known.epochs, int(result["epoch"]))
            self._note(replace(known, values=_values(trial), epochs=epochs, metrics=_kept(result)))

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        finished = bool((trial.last_result or {}).get("finished"))
        if not finished:
            _free(trial)
        self._end(self._known(trial), state="finished" if finished else "stopped")

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        _free(trial)
        known = self._known(trial)  # Ray may not have come to start it
        path = self._records.folder / known.name / REPORTS_FILE
        died = {"reason": f"its process died, see {trial.error_file}", "final": False}
        failure = read_reports(path)["failure"] or died
        self._end(known, state="failed", **failure)

    def give_up(self) -> None:
        """Note that what has not ended by now will not: Ray Tune could not start it."""
        for trial in list(self._records.trials.values()):
            if trial.number not in self._ended:
                self._end(trial, state="failed", reason="Ray Tune could not start it")

    def log(self) -> None:
        """Note in MLflow what each trial came to; `TrackingUnavailable` if it is away."""
        for trial in self._records.trials.values():
            self._log(trial)

    def _known(self, trial: TuneTrial) -> Trial:
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
        names = (seeded(trial.name, seed) for seed in range(self._config.seeds))
        found = (read_run(self._records.folder / name) for name in names)
        return [run for run in found if run is not None]

    def _log(self, trial: Trial) -> None:
        tags = {"rcir.sweep": self._config.training.name, "rcir.trial": f"{trial.number:03d}"}
        tags["rcir.state"] = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
        for run in self._runs(trial):
            run.tracked.log_tags(tags)
            run.tracked.log_params({f"sweep/{name}": v for name, v in trial.values.items()})
            run.tracked.log_metrics({f"sweep/{name}": v for name, v in trial.metrics.items()})


def line(trial: Trial) -> str:
    """A trial in one line."""
    values = ", ".join(f"{name} {shown(value)}" for name, value in trial.values.items())
    state = trial.state if trial.state == "finished" else f"{trial.state} at epoch {trial.epochs}"
    size = trial.metrics.get("certified_size")
    found = "" if size is None else f"certified size {size:.2f}, "
    reason = f" ({trial.reason})" if trial.reason else ""
    return f"{trial.name} {state}: {found}{values}  {trial.seconds:.0f} s{reason}"


def shown(value: Any) -> str:
    """An option's value, short."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _free(trial: TuneTrial) -> None:
    """Give back what the workers of a trial hold that did not come to its end."""
    group = (trial.last_result or {}).get(PLACEMENT_GROUP)
    if group is not None:
        free(group)


def _values(trial: TuneTrial) -> dict[str, Any]:
    return {name: value for name, value in trial.config["drawn"].items() if name != "number"}


def _kept(result: Mapping[str, Any]) -> dict[str, float]:
    names = [name for name in result if name.startswith("certified_size")]
    names += ["recall_at_1", "ece", "auroc_miss"]
    return {name: float(result[name]) for name in names if name in result}
