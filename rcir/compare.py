"""Runs beside each other: how large their certified sets are, and whether they differ.

A run is a training, a trial of a sweep, or the output of a calibration. What was measured of it is
in its folder, see `rcir.measured`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from rcir import tracking
from rcir.config import flatten
from rcir.errors import InvalidData, RcirError, TrackingUnavailable
from rcir.measured import TEST, VALIDATION, Measured, Split
from rcir.risk import check_level, is_certified, mean_size
from rcir.risk.certified import Estimate, compare
from rcir.runs import FOLDER_TAG, RUN_FILE, RunFolder, find_run, read_run

SWEEP = "sweep.json"
RETRIEVER = Path("retriever", "retriever.json")
FILES: Mapping[Split, str] = {"validation": VALIDATION, "test": TEST}
# What differs between any two runs, and what only says where they were trained.
UNTOLD = ("name", "storage", "data.root", "num_workers", "max_failures", "use_gpu", "threads")
DRAWS = 2000


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Attributes:
        name: shown.
        folder: where it is.
        state: what became of it, such as "finished".
        options: of its training, by dotted name; empty if it is not known.
        measured: by split, what is there.
        reported: of a trial, its last metrics on the validation images, at delta = 0.1.
    """

    name: str
    folder: Path
    state: str
    options: dict[str, Any] = field(default_factory=dict)
    measured: dict[Split, Measured] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other.

    Attributes:
        runs: in the order in which they were given, the trials of a sweep best first.
        split: where they are compared.
        alphas, delta: levels of the sets.
        first: position of the run that others differ from; None if none has certified sizes.
        sizes: by alpha, the mean certified size by position of the run; only of those certified.
        differences: by alpha, how much larger than those of the first run the sets are, by position
            of the run; empty unless all were measured on the same queries.
        notes: what could not be compared, in words.
    """

    runs: list[Run]
    split: Split
    alphas: tuple[float, ...]
    delta: float
    first: int | None
    sizes: dict[float, dict[int, Estimate]]
    differences: dict[float, dict[int, Estimate]]
    notes: list[str]

    @property
    def found(self) -> list[Measured | None]:
        """What was measured of each run where they are compared."""
        return [run.measured.get(self.split) for run in self.runs]

    @property
    def differing(self) -> list[str]:
        """Names of the options that are not the same in all runs whose options are known."""
        known = [run.options for run in self.runs if run.options]
        names = dict.fromkeys(name for options in known for name in options)
        return [
            name
            for name in names
            if name not in UNTOLD and len({json.dumps(each.get(name)) for each in known}) > 1
        ]

    def metric(self, number: int, name: str) -> float | None:
        """A metric of a run; of a trial without weights the last it reported; None if unknown."""
        run, one = self.runs[number], self.found[number]
        known = one.metrics if one else run.reported if self.split == "validation" else {}
        value = known.get(name, math.nan)
        return value if math.isfinite(value) else None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        rows = []
        for number, (run, one) in enumerate(zip(self.runs, self.found, strict=True)):
            row: dict[str, Any] = {"name": run.name, "folder": str(run.folder), "state": run.state}
            row["options"] = {name: run.options.get(name) for name in self.differing}
            for name in ("recall_at_1", "ece"):
                row[name] = self.metric(number, name)
            row["adapter"] = one and one.adapter
            for name in ("sizes", "differences"):
                levels = getattr(self, name).items()
                row[name] = {
                    f"{alpha:g}": asdict(values[number])
                    | ({"beyond_noise": values[number].beyond_noise} if name != "sizes" else {})
                    for alpha, values in levels
                    if number in values
                }
            rows.append(row)
        return {
            "split": self.split,
            "delta": self.delta,
            "first": None if self.first is None else self.runs[self.first].name,
            "runs": rows,
            "notes": self.notes,
        }


def compare_runs(
    references: Sequence[str], alphas: Sequence[float] = (0.05, 0.1, 0.2), delta: float = 0.1
) -> Comparison:
    """Compare runs by their mean certified set size (exact binomial bound).

    On the test queries if all runs were calibrated and tested on the same queries, else on the
    validation images. Intervals and differences are those of `rcir.risk.certified.compare`.

    Args:
        references: of each run, its folder or MLflow id. That of a sweep stands for its trials, by
            their size at the levels of the sweep.
        alphas, delta: levels to compare at.

    Raises:
        InvalidData: there is no such run, or nothing was measured of any.
        InvalidRiskLevel: an alpha or delta is out of range.
    """
    levels = tuple(check_level("alpha", alpha) for alpha in alphas)
    check_level("delta", delta)
    folders = [_folder(reference) for reference in references]
    runs = _named_apart([run for folder in folders for run in _read(folder)])
    if not any(run.measured for run in runs):
        raise InvalidData(
            f"nothing was measured of {', '.join(run.name for run in runs)}: finish the training "
            "with the command that began it, then compare"
        )
    split = _split(runs)
    sizes: dict[float, dict[int, Estimate]] = {alpha: {} for alpha in levels}
    differences: dict[float, dict[int, Estimate]] = {alpha: {} for alpha in levels}
    groups = _same_queries(runs, split)
    chosen = split == "validation" and (folders[0] / SWEEP).is_file()  # the first, for its size
    for alpha in levels:
        for group in groups:
            parts = [runs[i].measured[split].parts for i in group]
            of_each, beyond = compare(parts, alpha, delta, DRAWS, chosen)
            certified = [is_certified(own, alpha, delta) for own in parts]
            sizes[alpha] |= {
                i: size for i, size, is_so in zip(group, of_each, certified, strict=True) if is_so
            }
            if len(groups) == 1 and certified[0]:
                differences[alpha] = {
                    i: difference
                    for i, difference, is_so in zip(group[1:], beyond, certified[1:], strict=True)
                    if is_so
                }
    first = groups[0][0] if groups else None
    notes = _notes(runs, split, groups)
    if split == "validation" and any((folder / SWEEP).is_file() for folder in folders):
        notes.append(
            "the trials are in the order of sizes on these very queries, so that the first looks "
            "better than it is: calibrate it to measure it on test queries"
        )
    return Comparison(runs, split, levels, delta, first, sizes, differences, notes)


def _split(runs: Sequence[Run]) -> Split:
    """Where to compare: on the test queries if these are the same for all that was measured."""
    known = [run for run in runs if run.measured]
    tested = all("test" in run.measured for run in known)
    if tested and len(_same_queries(known, "test")) == 1:
        return "test"
    return "validation" if any("validation" in run.measured for run in known) else "test"


def _same_queries(runs: Sequence[Run], split: Split) -> list[list[int]]:
    """Positions of the runs with measured sizes, those on the same queries together."""
    groups: dict[Any, list[int]] = {}
    for number, run in enumerate(runs):
        if split in run.measured and run.measured[split].parts:
            one = run.measured[split]
            shapes = [(len(part.scores), len(part.costs)) for part in one.parts]
            groups.setdefault((one.queries, *shapes), []).append(number)
    return list(groups.values())


def _notes(runs: Sequence[Run], split: Split, groups: Sequence[Sequence[int]]) -> list[str]:
    notes = []
    if len(groups) > 1:
        sets = "; ".join(", ".join(runs[number].name for number in group) for group in groups)
        notes.append(
            f"not compared, for their {split} queries differ (those with the same: {sets}): train "
            "or calibrate on the same data set with the same options"
        )
    asked = {number for group in groups for number in group}
    left = [run.name for number, run in enumerate(runs) if number not in asked and not run.reported]
    if left:
        notes.append(f"no certified sizes on {split} queries: {', '.join(left)}")
    return notes


def _read(folder: Path) -> list[Run]:
    """The run, or the trials of the sweep, in a folder."""
    if (folder / SWEEP).is_file():
        return _trials(folder)
    run = _run(folder, folder.resolve().name)
    if run is None:
        raise InvalidData(
            f"{folder} holds no run ({RUN_FILE}, {SWEEP} or {TEST}): give the folder that "
            "`python -m training`, `python -m tuning` or `python -m calibration` wrote to"
        )
    return [run]


def _folder(reference: str) -> Path:
    """The folder that a path or an MLflow id names."""
    if Path(reference).is_dir():
        return Path(reference)
    tracked = tracking.find_run(reference)
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
        split: Measured.read(folder / FILES[split])
        for split in get_args(Split)
        if (folder / FILES[split]).is_file()
    }
    trained = read_run(folder)
    if trained is not None:
        state = "finished" if trained.finished else "not finished"
        return Run(name, folder, state, _options(trained), measured)
    if "test" not in measured:
        return None
    try:
        origin = json.loads((folder / RETRIEVER).read_text())["origin"]
        trained = find_run(origin["run"])
    except (OSError, ValueError, KeyError, TypeError, TrackingUnavailable):
        return Run(name, folder, "calibrated", {}, measured)  # elsewhere than it was trained
    path = trained.path / VALIDATION
    if path.is_file():
        measured["validation"] = Measured.read(path)
    return Run(name, folder, "calibrated", _options(trained), measured)


def _options(run: RunFolder) -> dict[str, Any]:
    """The options of a training by dotted name; of those that changed, as they were at last."""
    options = flatten(run.config)
    for change in options.pop("changes", []):
        options |= change["options"]
    return options


def _trials(folder: Path) -> list[Run]:
    """The trials of a sweep, that of the smallest sets first, those that did not finish last.

    Of a trial with several seeds, what was measured of all is compared.
    """
    path = folder / SWEEP
    found: list[tuple[bool, float, Run]] = []
    try:
        written = json.loads(path.read_text())
        alpha, delta = (float(written["config"][name]) for name in ("alpha", "delta"))
        for trial in written["trials"]:
            run = _trial(folder, trial)
            one = run.measured.get("validation")
            size = mean_size(one.parts, alpha, delta) if one and one.parts else math.inf
            found.append((one is None, run.reported.get("certified_size", size), run))
    except RcirError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidData(
            f"{path} is damaged ({error!r}): give the folders of the trials instead"
        ) from error
    if not found:
        raise InvalidData(f"{path} lists no trial: let the sweep run first")
    return [run for *_, run in sorted(found, key=lambda each: each[:2])]


def _trial(folder: Path, written: Mapping[str, Any]) -> Run:
    """A trial as its sweep has written it down; measured once all its seeds are trained."""
    names, state = [str(name) for name in written["folders"]], str(written["state"])
    reported = {str(name): float(value) for name, value in written.get("metrics", {}).items()}
    runs = [_run(folder / name, names[0]) for name in names]
    first = runs[0] or Run(names[0], folder / names[0], "")
    found = [run.measured["validation"] for run in runs if run and "validation" in run.measured]
    measured = dict(first.measured)
    measured.pop("validation", None)
    if len(found) == len(names):
        parts = [part for each in found for part in each.parts]
        measured["validation"] = replace(found[0], parts=parts, metrics=found[0].metrics | reported)
    return replace(first, state=state, measured=measured, reported=reported)


def _named_apart(runs: list[Run]) -> list[Run]:
    """Runs of one name under their folders instead."""
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs
    ]
