"""Runs in their folders: trainings, trials of sweeps, outputs of calibrations.

What was measured of each is there, too, see `rcir.runs.results`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from rcir import tracking
from rcir.config import flatten
from rcir.errors import InvalidData, RcirError
from rcir.retrieval import storage
from rcir.risk import mean_size
from rcir.runs.folder import FOLDER_TAG, RUN_FILE, RunFolder, find_run, read_run
from rcir.runs.results import TEST, VALIDATION, RunResults, Split

SWEEP = "sweep.json"
RETRIEVER = "retriever"
CALIBRATION = "calibration"  # group of options in `Run.options`
FILES: Mapping[Split, str] = {"validation": VALIDATION, "test": TEST}


@dataclass(frozen=True)
class Run:
    """A run as it is found: its folder, options and results.

    Attributes:
        name: shown.
        folder: where it is.
        state: what became of it, such as "finished".
        options: of its training and calibration, by dotted name; empty if they are not known.
        measured: by split, what is there.
        reported: of a trial, its last metrics on the validation images, at delta = 0.1.
        tracked: by split, the run in MLflow that holds its metrics.
    """

    name: str
    folder: Path
    state: str
    options: dict[str, Any] = field(default_factory=dict)
    measured: dict[Split, RunResults] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)
    tracked: dict[Split, tracking.TrackedRun] = field(default_factory=dict)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, the trials of a sweep best first; no two have one name.

    Raises:
        InvalidData: a folder holds no run, or one that is damaged.
    """
    runs = [run for folder in folders for run in _read(folder)]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs
    ]


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep, which represents its trials."""
    return (folder / SWEEP).is_file()


def _read(folder: Path) -> list[Run]:
    """The run, or the trials of the sweep, in a folder."""
    if is_sweep(folder):
        return _trials(folder)
    run = _run(folder, folder.resolve().name)
    if run is None:
        raise InvalidData(
            f"{folder} holds no run ({RUN_FILE}, {SWEEP} or {TEST}): give the folder that "
            "`python -m training`, `python -m tuning` or `python -m calibration` wrote to"
        )
    return [run]


def run_folder(reference: str) -> Path:
    """The folder that a path or an MLflow id names.

    Raises:
        InvalidData: there is none on this machine.
    """
    if Path(reference).is_dir():
        return Path(reference)
    tracked = tracking.find_tracked_run(reference)
    folder = tracking.run_tag(tracked, FOLDER_TAG) if tracked else None
    if folder is None or not Path(folder).is_dir():
        where = f"its folder {folder} is not on this machine" if folder else "MLflow has no such id"
        raise InvalidData(
            f"{reference} is no folder, and {where}: give the folder of a run, of a sweep or of a "
            "calibration"
        )
    return Path(folder)


def _run(folder: Path, name: str) -> Run | None:
    """The run of a folder that training or calibration wrote, if it is one."""
    measured = {
        split: RunResults.read(folder / FILES[split])
        for split in get_args(Split)
        if (folder / FILES[split]).is_file()
    }
    trained = read_run(folder)
    if trained is not None:
        state = "finished" if trained.finished else "not finished"
        options = _options(trained) | _calibration_options(folder)
        tracked = _tracked(folder, trained)
        return Run(name, folder, state, options, measured, tracked=tracked)
    if "test" not in measured:
        return None
    options = _calibration_options(folder)
    try:
        trained = find_run(_retriever(folder)["origin"]["run"])
    except (OSError, ValueError, KeyError, TypeError, RcirError):
        return Run(name, folder, "calibrated", options, measured)  # elsewhere than it was trained
    path = trained.path / VALIDATION
    if path.is_file():
        measured["validation"] = RunResults.read(path)
    tracked = _tracked(folder, trained)
    return Run(name, folder, "calibrated", _options(trained) | options, measured, tracked=tracked)


def _tracked(folder: Path, trained: RunFolder) -> dict[Split, tracking.TrackedRun]:
    """The runs in MLflow of a training, and of its calibration in a folder, if it is there."""
    runs: dict[Split, tracking.TrackedRun] = {}
    with suppress(OSError, ValueError, LookupError, TypeError, RcirError):
        runs["validation"] = trained.tracked
        calibration = _retriever(folder)["origin"]["calibration"]
        runs["test"] = tracking.TrackedRun(calibration, trained.tracking_uri)
    return runs


def _retriever(folder: Path) -> dict[str, Any]:
    """The description of the retriever that a calibration left in a folder."""
    text = storage.read_current(
        folder / RETRIEVER, lambda version: (version / storage.DESCRIPTION_FILE).read_text()
    )
    description: dict[str, Any] = json.loads(text)
    return description


def _calibration_options(folder: Path) -> dict[str, Any]:
    """Options of the calibration in a folder, by dotted name; none if there is none."""
    try:
        described = _retriever(folder)
        return {
            f"{CALIBRATION}.depth": described["max_depth"],
            f"{CALIBRATION}.bound": described["controllers"][0]["bound"],
            f"{CALIBRATION}.score_function": described["controllers"][0]["score_functions"]["main"],
            **flatten({CALIBRATION: {"index": described["index"]}}),
            f"{CALIBRATION}.group": described["origin"].get("group"),
            f"{CALIBRATION}.cluster": described["origin"].get("cluster"),
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RcirError):
        return {}


def _options(run: RunFolder) -> dict[str, Any]:
    """Return the options of a training by dotted name, as they were in its last epoch."""
    options = flatten(run.config)
    for change in options.pop("changes", []):
        options |= change["options"]
    return options


def _trials(folder: Path) -> list[Run]:
    """The trials of a sweep, that of the smallest sets first, those that did not finish last.

    Of a trial with several seeds, what was measured of all is compared.
    """
    path = folder / SWEEP
    trials: list[tuple[bool, float, Run]] = []
    try:
        written = json.loads(path.read_text())
        alpha, delta = (float(written["config"][name]) for name in ("alpha", "delta"))
        for trial in written["trials"]:
            run = _trial(folder, trial)
            one = run.measured.get("validation")
            size = mean_size(one.parts, alpha, delta) if one and one.parts else math.inf
            trials.append((one is None, run.reported.get("certified_size", size), run))
    except RcirError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidData(
            f"{path} is damaged ({error!r}): give the folders of the trials instead"
        ) from error
    if not trials:
        raise InvalidData(f"{path} lists no trial: let the sweep run first")
    return [run for *_, run in sorted(trials, key=lambda each: each[:2])]


def _trial(folder: Path, written: Mapping[str, Any]) -> Run:
    """A trial as its sweep has written it down; measured once all its seeds are trained."""
    names, state = [str(name) for name in written["folders"]], str(written["state"])
    reported = {str(name): float(value) for name, value in written.get("metrics", {}).items()}
    runs = [_run(folder / name, names[0]) for name in names]
    first = runs[0] or Run(names[0], folder / names[0], "")
    validated = [run.measured["validation"] for run in runs if run and "validation" in run.measured]
    measured = dict(first.measured)
    measured.pop("validation", None)
    if len(validated) == len(names):
        parts = [part for each in validated for part in each.parts]
        measured["validation"] = replace(
            validated[0], parts=parts, metrics=validated[0].metrics | reported
        )
    return replace(first, state=state, measured=measured, reported=reported)
