"""The folder of a sweep, and the records of its trials.

sweep.json              configuration, MLflow run, trials
best.yaml               the configuration of the best trial, for `rcir train`
trials.csv              the trials, the best first
trial-000/              the training run of a trial, see `rcir.runs.folder`
trial-000-seed-1/       with another seed
trial-000/reports.json  reports of the trial to Ray Tune
ray/                    Ray Tune's own files; restoring from them would read pickles
"""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rcir.errors import InvalidData
from rcir.files import write_json
from rcir.runs.folder import SWEEP_FILE, RunFolder, read_run
from rcir.tracking import TrackedRun, require_store, without_credentials

REPORTS_FILE, TABLE_FILE = "reports.json", "trials.csv"
State = Literal["waiting", "running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Trial:
    """One configuration of a sweep, and its results.

    Attributes:
        number: from 0, in the order of the draws.
        values: of the options that the sweep varies, by dotted name.
        state: "stopped" means by the scheduler, before all epochs.
        epochs: trained so far, over all seeds.
        metrics: the latest, on the validation images, mean over seeds: "certified_size" at the
            sweep's alpha and delta, "certified_size_0.05", ... at others and delta = 0.1, where
            they can be certified, "recall_at_1", "ece"; with several seeds
            "certified_size_deviation", their standard deviation.
        reason: of a failure.
        final: True if a failed trial would fail again.
        seconds: since it was last started.
        confirmed: True if it trained with `final_seeds`, over which metrics are then the mean.
    """

    number: int
    values: dict[str, Any]
    state: State = "waiting"
    epochs: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    _: KW_ONLY
    reason: str = ""
    final: bool = False
    seconds: float = 0.0
    confirmed: bool = False

    @property
    def name(self) -> str:
        """The name of its (first) training run and of its folder."""
        return trial_name(self.number)

    @property
    def certified_size(self) -> float:
        """Certified size; infinite if it is unknown or cannot be certified."""
        return self.metrics.get("certified_size", float("inf"))

    @property
    def done(self) -> bool:
        """True if there is nothing left to train."""
        return self.state in ("finished", "stopped") or (self.state == "failed" and self.final)


@dataclass
class Records:
    """The records of a sweep, as `sweep.json` holds them.

    Attributes:
        folder: of the sweep, absolute.
        config: of the sweep, as plain values.
        mlflow_run, tracking_uri: of the sweep's run in MLflow, without user and password.
        trials: by number.
        finished: True if all trials are done.
    """

    folder: Path
    config: dict[str, Any]
    mlflow_run: str
    tracking_uri: str
    trials: dict[int, Trial] = field(default_factory=dict)
    finished: bool = False

    def __post_init__(self) -> None:
        self.tracking_uri = without_credentials(self.tracking_uri)

    @property
    def best_file(self) -> Path:
        """The configuration of the best trial, once the sweep is published."""
        return self.folder / "best.yaml"

    @property
    def tracked(self) -> TrackedRun:
        """The sweep's run in MLflow; `UntrustedFolder` as `RunFolder.tracked`."""
        return TrackedRun(self.mlflow_run, require_store(self.tracking_uri))

    def ranked(self) -> list[Trial]:
        """Return the trials, best first: confirmed finalists, others by certified size, recall."""

        def key(trial: Trial) -> tuple[bool, bool, float, float, int]:
            recall, size = trial.metrics.get("recall_at_1", 0.0), trial.certified_size
            return trial.state != "finished", not trial.confirmed, size, -recall, trial.number

        return sorted(self.trials.values(), key=key)

    def best_run(self) -> RunFolder:
        """Return the (first) training run of the best trial; `InvalidData` if none has finished."""
        best = self.ranked()[0] if self.trials else None
        run = read_run(self.folder / best.name) if best and best.state == "finished" else None
        if run is None:
            failed = [trial for trial in self.trials.values() if trial.reason]
            why = f"; {failed[0].name} failed: {failed[0].reason}" if failed else ""
            raise InvalidData(f"no trial of {self.folder} has finished{why}")
        return run

    def names(self, trial: Trial) -> list[str]:
        """Return the names of a trial's training runs (and folders), one for each seed."""
        seeds = self.config["final_seeds" if trial.confirmed else "seeds"]
        return [trial_name(trial.number, seed) for seed in range(seeds)]

    def write(self) -> None:
        """Write `sweep.json`, all of it or nothing."""
        plain = {name: value for name, value in vars(self).items() if name != "folder"}
        trials = [self.trials[number] for number in sorted(self.trials)]
        plain["trials"] = [asdict(trial) | {"folders": self.names(trial)} for trial in trials]
        write_json(self.folder / SWEEP_FILE, plain)


def read_records(folder: Path) -> Records | None:
    """Return the sweep in a folder, or None if there is none."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text())
        for trial in stored["trials"]:
            trial.pop("folders", None)  # which other fields imply
        trials = {trial["number"]: Trial(**trial) for trial in stored["trials"]}
        kept = {name: stored[name] for name in ("config", "mlflow_run", "tracking_uri", "finished")}
        return Records(folder, trials=trials, **kept)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidData(
            f"{path} is damaged ({error}): remove {folder} and sweep again"
        ) from error


def trial_name(number: int, seed: int = 0) -> str:
    """Return the name of a trial's training run with one of its seeds, from 0."""
    return f"trial-{number:03d}-seed-{seed}" if seed else f"trial-{number:03d}"
