"""Runs beside each other: how large their certified sets are, and whether they differ.

Where runs are found, and what is known of each, see `rcir.runs.find`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rcir.errors import InvalidData
from rcir.levels import ALPHAS, DELTA
from rcir.risk import check_level, is_certified
from rcir.risk.bootstrap import Estimate, compare_sizes, why_no_interval
from rcir.risk.bounds import check_levels
from rcir.runs.find import CALIBRATION, Run, is_sweep, read_runs, run_folder
from rcir.runs.folder import RESOURCES
from rcir.runs.results import RunResults, Split

# What differs between any two runs, and what only says where they were trained.
NOT_COMPARED = ("name", *RESOURCES)
DRAWS = 2000
LOOKED = (
    "the smallest of these was found by looking: use --choose, or calibrate it anew on other "
    "queries"
)


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
        notes: what could not be compared, and what not to conclude, in words.
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
    def found(self) -> list[RunResults | None]:
        """Results of each run on the split where they are compared."""
        return [run.measured.get(self.split) for run in self.runs]

    @property
    def differing(self) -> list[str]:
        """Names of the options that are not the same in all runs whose options are known.

        Those of calibrations count where these are compared, on the test queries.
        """
        known = [run.options for run in self.runs if run.options]
        names = dict.fromkeys(name for options in known for name in options)
        if self.split == "validation":
            names = {name: None for name in names if not name.startswith(f"{CALIBRATION}.")}
        return [
            name
            for name in names
            if name not in NOT_COMPARED and len({json.dumps(each.get(name)) for each in known}) > 1
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
            row["score_function"] = one and one.score_function
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
    references: Sequence[str], alphas: Sequence[float] = ALPHAS, delta: float = DELTA
) -> Comparison:
    """Compare runs by their mean certified set size (exact binomial bound).

    On the test queries if all runs were calibrated and tested on the same queries, else on the
    validation images. Intervals and differences are those of `rcir.risk.bootstrap.compare_sizes`.

    Args:
        references: of each run, its folder or MLflow id. That of a sweep stands for its trials, by
            their size at the levels of the sweep.
        alphas, delta: levels to compare at.

    Raises:
        InvalidData: there is no such run, or nothing was measured of any.
        InvalidRiskLevel: an alpha or delta is out of range.
    """
    levels = check_levels(alphas)
    check_level("delta", delta)
    folders = [run_folder(reference) for reference in references]
    runs = read_runs(folders)
    if not any(run.measured for run in runs):
        raise InvalidData(
            f"nothing was measured of {', '.join(run.name for run in runs)}: finish the training "
            "with the command that began it, then compare"
        )
    split = _split(runs)
    sizes: dict[float, dict[int, Estimate]] = {alpha: {} for alpha in levels}
    differences: dict[float, dict[int, Estimate]] = {alpha: {} for alpha in levels}
    groups = same_queries(runs, split)
    chosen = split == "validation" and is_sweep(folders[0])  # the first, for its size
    without: dict[str, None] = {}  # an interval, why
    for alpha in levels:
        for group in groups:
            parts = [runs[i].measured[split].parts for i in group]
            of_each, beyond = compare_sizes(parts, alpha, delta, DRAWS, chosen)
            certified = [is_certified(own, alpha, delta) for own in parts]
            sizes[alpha] |= {
                i: size for i, size, is_so in zip(group, of_each, certified, strict=True) if is_so
            }
            reason = why_no_interval(parts[0], alpha, delta)
            if reason is not None and any(certified):
                without[reason] = None
            if len(groups) == 1 and certified[0]:
                differences[alpha] = {
                    i: difference
                    for i, difference, is_so in zip(group[1:], beyond, certified[1:], strict=True)
                    if is_so
                }
    first = groups[0][0] if groups else None
    notes = [*without, *_notes(runs, split, groups)]
    if split == "test" and any(len(group) > 1 for group in groups):
        notes.append(LOOKED)
    if split == "validation" and any(map(is_sweep, folders)):
        notes.append(
            "the trials are in the order of sizes on these very queries, so that the first looks "
            "better than it is: calibrate it to measure it on test queries"
        )
    return Comparison(runs, split, levels, delta, first, sizes, differences, notes)


def _split(runs: Sequence[Run]) -> Split:
    """Where to compare: on the test queries if these are the same for all that was measured."""
    known = [run for run in runs if run.measured]
    tested = all("test" in run.measured for run in known)
    if tested and len(same_queries(known, "test")) == 1:
        return "test"
    return "validation" if any("validation" in run.measured for run in known) else "test"


def same_queries(runs: Sequence[Run], split: Split) -> list[list[int]]:
    """Positions of the runs with measured sizes, those on the same queries together."""
    groups: dict[Any, list[int]] = {}
    for number, run in enumerate(runs):
        if split in run.measured and run.measured[split].parts:
            one = run.measured[split]
            shapes = [(len(part.scores), len(part.candidate_scores)) for part in one.parts]
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
