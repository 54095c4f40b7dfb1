"""Compare runs by their certified set sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from rcir import tracking
from rcir.config import flatten
from rcir.errors import InvalidData, RcirError, TrackingUnavailable
from rcir.options import ALPHA, ALPHAS, DELTA
from rcir.retrieval.storage import DESCRIPTION_FILE
from rcir.risk import check_level, is_certified, mean_size
from rcir.risk.bootstrap import Estimate, compare_sizes, why_no_interval
from rcir.risk.bounds import check_levels
from rcir.risk.losses import MISS
from rcir.runs.bucket import RUN_FILE
from rcir.runs.folder import RESOURCES, SWEEP_FILE, find_run, read_run, run_folder
from rcir.runs.results import RETRIEVER, TEST, VALIDATION, RunResults, Split
from rcir.store.folder import read_current
from rcir.terminal import working

FILES: Mapping[Split, str] = {"validation": VALIDATION, "test": TEST}
CALIBRATION = "calibration"  # group of options in `Run.options`
READ_ERRORS = (OSError, ValueError, LookupError, TypeError, RcirError)
NOT_COMPARED = ("name", *RESOURCES)  # options that differ between any two runs, or do not matter
METRICS = ("recall_at_1", "ece")
N_DRAWS = 2000
MAX_LINKED = 20  # runs on MLflow's page
CHOSEN_BY_LOOKING = (
    "the smallest of these was found by looking: use --choose, or calibrate it anew on other "
    "queries"
)


@dataclass(frozen=True)
class Run:
    """The folder, options and results of a run."""

    name: str  # to be shown
    folder: Path
    state: str  # such as "finished"
    # Of its training and calibration, by dotted name; empty if they are not known.
    options: dict[str, Any] = field(default_factory=dict)
    results: dict[Split, RunResults] = field(default_factory=dict)
    tracked: dict[Split, tracking.TrackedRun] = field(default_factory=dict)  # have its metrics
    _: KW_ONLY
    in_sweep: bool = False  # True for a trial of a sweep
    # Of a trial, its last metrics on the validation images, at delta = 0.1.
    last_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def retriever(self) -> Path:
        """The folder of its calibrated retriever."""
        return self.folder / RETRIEVER

    def metric(self, split: Split, name: str) -> float | None:
        """Return a metric on a split, or the last that a trial reported; None if unknown."""
        results = self.results.get(split)
        metrics = results.metrics if results else self.last_metrics if split == "validation" else {}
        value = metrics.get(name, math.nan)
        return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Row:
    """A run beside others; figures are by alpha."""

    run: Run
    sizes: dict[float, Estimate] = field(default_factory=dict)  # mean certified sizes
    # How much larger than those of the first run its sets are; empty for the first run, and unless
    # all were measured on the same queries.
    differences: dict[float, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    rows: list[Row]  # in the given order, the trials of a sweep best first
    split: Split  # on which they are compared
    alphas: tuple[float, ...]
    delta: float
    first: Run | None  # that others are compared with; None if none has certified sizes
    notes: list[str]  # what could not be compared, and warnings

    @property
    def differing(self) -> list[str]:
        """Names of the options that are not the same in all runs with known options.

        Options of calibrations count only in a comparison on test queries.
        """
        by_run = [row.run.options for row in self.rows if row.run.options]
        return [
            name
            for name in dict.fromkeys(name for options in by_run for name in options)
            if name not in NOT_COMPARED
            and not (self.split == "validation" and name.startswith(f"{CALIBRATION}."))
            and len({json.dumps(options.get(name)) for options in by_run}) > 1
        ]

    def link(self) -> str | None:
        """Return the address of these runs in MLflow, by size; None if no one store has them."""
        runs = [row.run.tracked[self.split] for row in self.rows if self.split in row.run.tracked]
        if len(runs) < len(self.rows):
            return None
        alpha = min(self.alphas, key=lambda alpha: abs(alpha - ALPHA))
        size = f"certified/alpha_{alpha:g}/mean_size"
        if self.split == "validation":
            size = f"chosen/certified_size_{alpha:g}"
        try:
            return tracking.table_link(runs[:MAX_LINKED], size)
        except TrackingUnavailable:
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "split": self.split,
            "delta": self.delta,
            "first": self.first and self.first.name,
            "runs": [self._row_to_dict(row.run, row) for row in self.rows],
            "notes": self.notes,
        }

    def _row_to_dict(self, run: Run, row: Row) -> dict[str, Any]:
        results = run.results.get(self.split)
        return {
            "name": run.name,
            "folder": str(run.folder),
            "state": run.state,
            "options": {name: run.options.get(name) for name in self.differing},
            **{name: run.metric(self.split, name) for name in METRICS},
            "score_function": results and results.score_function,
            "sizes": {f"{alpha:g}": asdict(size) for alpha, size in row.sizes.items()},
            "differences": {
                f"{alpha:g}": asdict(larger) | {"beyond_noise": larger.beyond_noise}
                for alpha, larger in row.differences.items()
            },
        }


@working("comparing", logged=True)
def compare_runs(
    references: Sequence[str], alphas: Sequence[float] = ALPHAS, delta: float = DELTA
) -> Comparison:
    """Compare runs in folders or with MLflow ids by their mean certified set size (exact bound).

    A sweep stands for its trials, in the order of their sizes at its own levels. Runs are compared
    on the test queries if all were calibrated and tested on the same queries, else on the
    validation images; see `rcir.risk.bootstrap.compare_sizes`.

    Raises:
        InvalidData: a run does not exist, or none has measurements.
        InvalidRiskLevel: an alpha or delta is out of range.
    """
    levels = check_levels(alphas)
    check_level("delta", delta)
    runs = read_runs(references)
    comparison = compare(runs, levels, delta)
    if comparison.split == "test" and any(len(g) > 1 for g in group_by_queries(runs, "test")):
        return replace(comparison, notes=[*comparison.notes, CHOSEN_BY_LOOKING])
    return comparison


def compare(runs: Sequence[Run], alphas: Sequence[float], delta: float) -> Comparison:
    """Compare runs, see `compare_runs`, without a warning against a choice by size."""
    if not any(run.results for run in runs):
        raise InvalidData(
            f"nothing was measured of {', '.join(run.name for run in runs)}: finish the training"
        )
    split, rows = _common_split(runs), [Row(run) for run in runs]
    groups = group_by_queries(runs, split)
    ordered = split == "validation" and runs[0].in_sweep  # by the sizes that are compared
    reasons: dict[str, None] = {}  # why there is no interval
    for alpha in alphas:
        for group in groups:
            parts = [runs[i].results[split].parts for i in group]
            sizes, differences = compare_sizes(parts, alpha, delta, N_DRAWS, ordered)
            certified = [is_certified(part, alpha, delta) for part in parts]
            for number, size, has_size in zip(group, sizes, certified, strict=True):
                if has_size:
                    rows[number].sizes[alpha] = size
            for number, larger, has_size in zip(group[1:], differences, certified[1:], strict=True):
                if len(groups) == 1 and certified[0] and has_size:
                    rows[number].differences[alpha] = larger
            reason = why_no_interval(parts[0], alpha, delta)
            if reason is not None and any(certified):
                reasons[reason] = None
    first = runs[groups[0][0]] if groups else None
    notes = [*reasons, *_notes(runs, split, groups)]
    return Comparison(rows, split, tuple(alphas), delta, first, notes)


def _common_split(runs: Sequence[Run]) -> Split:
    """Return "test" if all measured runs have the same test queries, or none was validated."""
    measured = [run for run in runs if run.results]
    tested = all("test" in run.results for run in measured)
    if tested and len(group_by_queries(measured, "test")) == 1:
        return "test"
    return "validation" if any("validation" in run.results for run in measured) else "test"


def group_by_queries(runs: Sequence[Run], split: Split) -> list[list[int]]:
    """Return the positions of runs with measured sizes, grouped by their queries."""
    groups: dict[Any, list[int]] = {}
    for number, run in enumerate(runs):
        results = run.results.get(split)
        if results and results.parts:
            shapes = [(len(part.scores), len(part.candidate_scores)) for part in results.parts]
            groups.setdefault((results.queries, *shapes), []).append(number)
    return list(groups.values())


def _notes(runs: Sequence[Run], split: Split, groups: Sequence[Sequence[int]]) -> list[str]:
    """Return which runs are not compared and why, and a warning of an order by size."""
    notes = []
    if len(groups) > 1:
        sets = "; ".join(", ".join(runs[number].name for number in group) for group in groups)
        notes.append(
            f"not compared, because their {split} queries differ (same queries: {sets}): train or "
            "calibrate on the same data set with the same options"
        )
    compared = {number for group in groups for number in group}
    others = [run for number, run in enumerate(runs) if number not in compared]
    if unmeasured := [run.name for run in others if not run.last_metrics]:
        notes.append(f"no certified sizes on {split} queries: {', '.join(unmeasured)}")
    if split == "validation" and any(run.in_sweep for run in runs):
        notes.append(
            "the trials are ordered by their sizes on these very queries: the first looks better "
            "than it is; calibrate it to measure it on test queries"
        )
    return notes


def read_runs(references: Sequence[str]) -> list[Run]:
    """Read the runs in folders or with MLflow ids, the trials of a sweep best first."""
    runs: list[Run] = []
    for folder in map(run_folder, references):
        if (folder / SWEEP_FILE).is_file():
            runs += _read_sweep(folder)
        elif run := _read_run(folder, folder.resolve().name):
            runs.append(run)
        else:
            raise InvalidData(
                f"{folder} contains no run ({RUN_FILE}, {SWEEP_FILE} or {TEST}): pass the output "
                "folder of `rcir train`, `rcir tune` or `rcir calibrate`"
            )
    names = [run.name for run in runs]  # which must be unique
    return [
        run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs
    ]


def _read_run(folder: Path, name: str) -> Run | None:
    """Read the training or calibration in a folder, if there is one."""
    measured = {
        split: RunResults.read(folder / FILES[split])
        for split in get_args(Split)
        if (folder / FILES[split]).is_file()
    }
    trained, state = read_run(folder), "calibrated"
    if trained is not None:
        state = "finished" if trained.finished else "not finished"
    elif "test" not in measured:
        return None
    origin, options = _read_calibration(folder)
    if trained is None:
        with suppress(*READ_ERRORS):  # it may have been trained elsewhere
            trained = find_run(origin["run"])
        if trained is not None and (trained.path / VALIDATION).is_file():
            measured["validation"] = RunResults.read(trained.path / VALIDATION)
    tracked: dict[Split, tracking.TrackedRun] = {}
    if trained is not None:
        trained_options = flatten(trained.config)
        for change in trained_options.pop("changes", []):
            trained_options |= change["options"]
        options = trained_options | options
        with suppress(*READ_ERRORS):
            tracked["validation"] = trained.tracked
            tracked["test"] = tracking.TrackedRun(origin["calibration"], trained.tracked.uri)
    return Run(name, folder, state, options, measured, tracked)


def _read_calibration(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the origin of a calibrated retriever, and its options by dotted name."""
    origin: dict[str, Any] = {}
    try:
        text = read_current(
            folder / RETRIEVER, lambda version: (version / DESCRIPTION_FILE).read_text()
        )
        description = json.loads(text)
        origin = description["origin"]
        _, rules = description["calibration"]["rules"][0]
        rule = rules["fitted"][MISS.name]
        return origin, {
            f"{CALIBRATION}.depth": description["max_depth"],
            f"{CALIBRATION}.bound": rule["bound"],
            f"{CALIBRATION}.score_function": rule["score_function"]["class"],
            **flatten({CALIBRATION: {"index": description["index"]}}),
            f"{CALIBRATION}.group": origin.get("group"),
            f"{CALIBRATION}.cluster": origin.get("cluster"),
        }
    except (*READ_ERRORS, AttributeError):
        return origin, {}


def _read_sweep(folder: Path) -> list[Run]:
    """Read the trials of a sweep, the smallest sets first, unfinished ones last.

    A trial with several seeds is compared by the results of all of them.
    """
    path = folder / SWEEP_FILE
    trials: list[tuple[bool, float, Run]] = []
    try:
        written = json.loads(path.read_text())
        alpha, delta = (float(written["config"][name]) for name in ("alpha", "delta"))
        for trial in written["trials"]:
            run = _read_trial(folder, trial)
            results = run.results.get("validation")
            size = mean_size(results.parts, alpha, delta) if results and results.parts else math.inf
            trials.append((results is None, run.last_metrics.get("certified_size", size), run))
    except RcirError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidData(
            f"{path} is damaged ({error!r}): pass the folders of the trials instead"
        ) from error
    if not trials:
        raise InvalidData(f"{path} lists no trial: let the sweep run first")
    return [run for *_, run in sorted(trials, key=lambda trial: trial[:2])]


def _read_trial(folder: Path, written: Mapping[str, Any]) -> Run:
    """Return a trial as its sweep describes it; it has results once all seeds are trained."""
    names, state = [str(name) for name in written["folders"]], str(written["state"])
    last_metrics = {str(name): float(value) for name, value in written.get("metrics", {}).items()}
    runs = [_read_run(folder / name, names[0]) for name in names]
    first = runs[0] or Run(names[0], folder / names[0], "")
    validated = [run.results["validation"] for run in runs if run and "validation" in run.results]
    measured = dict(first.results)
    measured.pop("validation", None)
    if len(validated) == len(names):
        parts = [part for results in validated for part in results.parts]
        metrics = validated[0].metrics | last_metrics
        measured["validation"] = replace(validated[0], parts=parts, metrics=metrics)
    return replace(first, state=state, results=measured, in_sweep=True, last_metrics=last_metrics)
