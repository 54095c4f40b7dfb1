"""Compare runs by their certified set sizes, show the comparison, and choose one of several.

`rcir.runs.folder` reads the runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rcir import tracking
from rcir.errors import InvalidData, RiskUnattainable, TrackingUnavailable
from rcir.options import ALPHAS, DELTA
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    Guarantee,
    GuaranteeRequest,
    SetRule,
    check_level,
    corrected,
    is_certified,
    smallest_certified,
)
from rcir.risk.bootstrap import Estimate, compare_sizes, why_no_interval
from rcir.risk.bounds import check_levels
from rcir.runs.folder import CALIBRATION, RESOURCES, RETRIEVER, Run, is_sweep, read_runs, run_folder
from rcir.runs.results import RunResults, Split
from rcir.store.folder import current_version, locked

NOT_COMPARED = ("name", *RESOURCES)  # options that differ between any two runs, or do not matter
METRICS = ("recall_at_1", "ece")
N_DRAWS = 2000
MAX_LINKED = 20  # runs on MLflow's page
MIN_WIDTH = 160  # of output that is not a terminal
LOOKED = (
    "the smallest of these was found by looking: use --choose, or calibrate it anew on other "
    "queries"
)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        runs: in the given order, the trials of a sweep best first.
        split: on which they are compared.
        alphas, delta: levels of the sets.
        first: position of the run that others are compared with; None if none has certified sizes.
        sizes: by alpha, the mean certified size by position of the run.
        differences: by alpha, how much larger than those of the first run the sets are, by position
            of the run; empty unless all were measured on the same queries.
        notes: what could not be compared, and warnings.
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
    def results(self) -> list[RunResults | None]:
        """Results of each run on the compared split."""
        return [run.measured.get(self.split) for run in self.runs]

    @property
    def differing(self) -> list[str]:
        """Names of the options that are not the same in all runs with known options.

        Options of calibrations count only in a comparison on test queries.
        """
        by_run = [run.options for run in self.runs if run.options]
        return [
            name
            for name in dict.fromkeys(name for options in by_run for name in options)
            if name not in NOT_COMPARED
            and not (self.split == "validation" and name.startswith(f"{CALIBRATION}."))
            and len({json.dumps(options.get(name)) for options in by_run}) > 1
        ]

    def metric(self, number: int, name: str) -> float | None:
        """Return a metric of a run, or the last that a trial reported; None if unknown."""
        run, results = self.runs[number], self.results[number]
        metrics = results.metrics if results else run.reported if self.split == "validation" else {}
        value = metrics.get(name, math.nan)
        return value if math.isfinite(value) else None

    def link(self) -> str | None:
        """Return the address of MLflow's page of these runs; None if no server has them all."""
        runs = [run.tracked[self.split] for run in self.runs if self.split in run.tracked]
        if len(runs) < len(self.runs):
            return None
        try:
            return tracking.comparison_link(runs[:MAX_LINKED])
        except TrackingUnavailable:
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        rows = []
        for number, (run, results) in enumerate(zip(self.runs, self.results, strict=True)):
            row: dict[str, Any] = {"name": run.name, "folder": str(run.folder), "state": run.state}
            row["options"] = {name: run.options.get(name) for name in self.differing}
            row |= {name: self.metric(number, name) for name in METRICS}
            row["score_function"] = results and results.score_function
            sizes = {f"{a:g}": runs[number] for a, runs in self.sizes.items() if number in runs}
            row["sizes"] = {alpha: asdict(size) for alpha, size in sizes.items()}
            row["differences"] = {
                f"{alpha:g}": asdict(runs[number]) | {"beyond_noise": runs[number].beyond_noise}
                for alpha, runs in self.differences.items()
                if number in runs
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

    Runs are compared on the test queries if all were calibrated and tested on the same queries,
    else on the validation images; see `rcir.risk.bootstrap.compare_sizes`.

    Args:
        references: the folder or MLflow id of each run. A sweep stands for its trials, in the order
            of their sizes at its own levels.
        alphas, delta: levels to compare at.

    Raises:
        InvalidData: a run does not exist, or none has measurements.
        InvalidRiskLevel: an alpha or delta is out of range.
    """
    levels = check_levels(alphas)
    check_level("delta", delta)
    folders = [run_folder(reference) for reference in references]
    runs = read_runs(folders)
    if not any(run.measured for run in runs):
        raise InvalidData(
            f"nothing was measured of {', '.join(run.name for run in runs)}: finish the training"
        )
    split = _common_split(runs)
    sizes: dict[float, dict[int, Estimate]] = {alpha: {} for alpha in levels}
    differences: dict[float, dict[int, Estimate]] = {alpha: {} for alpha in levels}
    groups = group_by_queries(runs, split)
    best_first = split == "validation" and is_sweep(folders[0])
    reasons: dict[str, None] = {}  # why there is no interval
    for alpha in levels:
        for group in groups:
            parts = [runs[i].measured[split].parts for i in group]
            estimates, beyond = compare_sizes(parts, alpha, delta, N_DRAWS, best_first)
            certified = [is_certified(part, alpha, delta) for part in parts]
            sizes[alpha] |= dict(compress(zip(group, estimates, strict=True), certified))
            reason = why_no_interval(parts[0], alpha, delta)
            if reason is not None and any(certified):
                reasons[reason] = None
            if len(groups) == 1 and certified[0]:
                differences[alpha] = dict(
                    compress(zip(group[1:], beyond, strict=True), certified[1:])
                )
    first = groups[0][0] if groups else None
    notes = [*reasons, *_notes(runs, split, groups)]
    if split == "test" and any(len(group) > 1 for group in groups):
        notes.append(LOOKED)
    if split == "validation" and any(map(is_sweep, folders)):
        notes.append(
            "the trials are ordered by their sizes on these very queries: the first looks better "
            "than it is; calibrate it to measure it on test queries"
        )
    return Comparison(runs, split, levels, delta, first, sizes, differences, notes)


def _common_split(runs: Sequence[Run]) -> Split:
    """Return the split to compare on.

    "test" if all measured runs have the same test queries, or none has validation results; else
    "validation".
    """
    measured = [run for run in runs if run.measured]
    tested = all("test" in run.measured for run in measured)
    if tested and len(group_by_queries(measured, "test")) == 1:
        return "test"
    return "validation" if any("validation" in run.measured for run in measured) else "test"


def group_by_queries(runs: Sequence[Run], split: Split) -> list[list[int]]:
    """Return the positions of runs with measured sizes, grouped by their queries."""
    groups: dict[Any, list[int]] = {}
    for number, run in enumerate(runs):
        results = run.measured.get(split)
        if results and results.parts:
            shapes = [(len(part.scores), len(part.candidate_scores)) for part in results.parts]
            groups.setdefault((results.queries, *shapes), []).append(number)
    return list(groups.values())


def _notes(runs: Sequence[Run], split: Split, groups: Sequence[Sequence[int]]) -> list[str]:
    """Return which runs are not compared, and why."""
    notes = []
    if len(groups) > 1:
        sets = "; ".join(", ".join(runs[number].name for number in group) for group in groups)
        notes.append(
            f"not compared, because their {split} queries differ (same queries: {sets}): train or "
            "calibrate on the same data set with the same options"
        )
    compared = {number for group in groups for number in group}
    others = [run for number, run in enumerate(runs) if number not in compared]
    if unmeasured := [run.name for run in others if not run.reported]:
        notes.append(f"no certified sizes on {split} queries: {', '.join(unmeasured)}")
    return notes


def print_comparison(comparison: Comparison) -> None:
    """Print the runs, their options, and which differ by more than noise."""
    console = _console()
    console.print(
        f"Mean set sizes certified at delta = {comparison.delta:.4g}, measured on "
        f"{comparison.split} queries (with 95% intervals):",
        soft_wrap=True,
    )
    console.print(_sizes_table(comparison))
    if comparison.differing:
        console.print("\nOptions that differ:")
        console.print(_options_table(comparison))
    if any(comparison.differences.values()) and comparison.first is not None:
        lows = (size.low for sizes in comparison.differences.values() for size in sizes.values())
        rest = (
            "; without an interval, this is unknown" if None in lows else ", all else is within it"
        )
        console.print(
            f"\nMean set size less that of {comparison.runs[comparison.first].name}, paired on the "
            "same queries\n(95% intervals that hold for all runs together; * is more than noise"
            f"{rest}):",
            soft_wrap=True,
        )
        console.print(_differences_table(comparison))
    for note in comparison.notes:
        console.print(f"\n{note}", soft_wrap=True)
    if link := comparison.link():
        console.print(f"\nIn MLflow: {link}", soft_wrap=True)
    console.print(
        "\nNoise comes from calibration and measured queries; that of another training seed is not "
        "included.",
        soft_wrap=True,
    )


def print_choice(choice: Choice) -> None:
    """Print the comparison, the choice, and its guarantee from now on."""
    print_comparison(choice.comparison)
    name, among = choice.comparison.runs[choice.number].name, choice.guarantee.chosen_among
    copy = "its copy in MLflow, too" if choice.tracked else "copies made before are not"
    _console().print(
        f"\n{name} has the smallest sets. {choice.guarantee}\n"
        f"Its mean size is {_short(choice.size)}; as the smallest of several it may be larger on "
        f"other queries.\n{choice.folder} is marked ({copy}): it certifies every request at "
        f"delta / {among} from now on.",
        soft_wrap=True,
    )


def _console() -> Console:
    console = Console(highlight=False, markup=False)  # file names may look like markup
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    return console


def _sizes_table(comparison: Comparison) -> Table:
    heads = (f"at alpha {alpha:g}" for alpha in comparison.alphas)
    table = _table("run", "state", "recall\nat 1", "ECE", *heads)
    for number, run in enumerate(comparison.runs):
        numbers = (comparison.metric(number, name) for name in METRICS)
        table.add_row(
            run.name,
            run.state,
            *("-" if value is None else f"{value:.3f}" for value in numbers),
            *(_size(comparison, number, alpha) for alpha in comparison.alphas),
        )
    return table


def _size(comparison: Comparison, number: int, alpha: float) -> str:
    """Format a size with its interval, or the one that an unfinished trial reported."""
    size, results = comparison.sizes[alpha].get(number), comparison.results[number]
    if size is not None:
        return _estimate(size)
    if results is not None and results.parts:
        return "not certified"
    reported = comparison.metric(number, f"certified_size_{alpha:g}")
    return "-" if reported is None or comparison.delta != DELTA else _short(reported)


def _options_table(comparison: Comparison) -> Table:
    table = _table("run", *(name.replace(".", ".\n") for name in comparison.differing))
    for run in comparison.runs:
        values = (run.options.get(name, "-") for name in comparison.differing)
        texts = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
        table.add_row(run.name, *texts)
    return table


def _differences_table(comparison: Comparison) -> Table:
    levels = [alpha for alpha, differences in comparison.differences.items() if differences]
    table = _table("run", *(f"at alpha {alpha:g}" for alpha in levels))
    for number, run in enumerate(comparison.runs):
        cells = [comparison.differences[alpha].get(number) for alpha in levels]
        if any(cells):
            texts = (
                _estimate(cell, "+") + " *" * cell.beyond_noise if cell else "-" for cell in cells
            )
            table.add_row(run.name, *texts)
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column.header == "run"
    return table


def _estimate(estimate: Estimate, sign: str = "") -> str:
    interval = "(no interval)"
    if estimate.low is not None and estimate.high is not None:
        interval = f"[{_short(estimate.low, sign)}, {_short(estimate.high, sign)}]"
    return f"{_short(estimate.value, sign)} {interval}"


def _short(size: float, sign: str = "") -> str:
    return f"{size:{sign}.{2 if abs(size) < 10 else 1}f}"


@dataclass(frozen=True)
class Choice:
    """The retriever with the smallest sets, marked as chosen.

    Attributes:
        comparison: of all, each certified at delta / `guarantee.chosen_among`.
        number: position of the chosen run.
        folder: of the chosen retriever.
        size: its mean set size on the test queries, at the level of the guarantee.
        guarantee: its guarantee in spite of the choice.
        tracked: True if its copy in MLflow is marked, too.
    """

    comparison: Comparison
    number: int
    folder: Path
    size: float
    guarantee: Guarantee
    tracked: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        chosen = {
            "run": self.comparison.runs[self.number].name,
            "retriever": str(self.folder),
            "mean_size": self.size,
            "guarantee": self.guarantee.to_dict(),
            "sentence": str(self.guarantee),
            "marked_in_mlflow": self.tracked,
        }
        return self.comparison.to_dict() | {"choice": chosen}


def choose(references: Sequence[str], alphas: Sequence[float], delta: float) -> Choice:
    """Choose the retriever with the smallest mean size at the first alpha, and mark it on disk.

    Each of k retrievers is certified at delta / k, see `rcir.risk.corrected`. One that was itself
    chosen among j counts as j.

    Args:
        references: the folder of each calibration, or the MLflow id of its run.
        alphas, delta: levels to compare at; the guarantee holds at `delta`.

    Raises:
        InvalidData: these are not two or more calibrations on the same queries.
        RiskUnattainable: nothing is certified for any at delta / k.
        InvalidRiskLevel: an alpha or delta is out of range.
        CorruptRetriever: a retriever is damaged.
    """
    alpha = check_level("alpha", alphas[0])
    check_level("delta", delta)
    folders = [run_folder(reference) for reference in references]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise InvalidData("--choose takes two or more calibrations, each named once")
    lacking = [str(folder) for folder in folders if not (folder / RETRIEVER).is_dir()]
    if lacking:
        raise InvalidData(f"no calibrated retriever in {', '.join(lacking)}: run `rcir calibrate`")
    runs = read_runs(folders)
    for run in runs:
        if "test" in run.measured and not run.measured["test"].parts:
            raise InvalidData(
                f"the calibration queries of {run.folder} come in clusters, but only sizes for "
                "independent queries are compared: calibrate on one query of each cluster"
            )
    if [len(group) for group in group_by_queries(runs, "test")] != [len(runs)]:
        raise InvalidData(
            "calibration or test queries differ: calibrate all on the same data set with the same "
            "options, then choose"
        )
    rules, among = [], 0
    for run in runs:  # one encoder in memory at a time
        retriever = Retriever.load(run.folder / RETRIEVER)
        rules.append(_compared_rule(retriever, run))
        among += retriever.require_calibration().chosen_among
    request, refusals = GuaranteeRequest(alpha, delta), []
    number = smallest_certified([run.measured["test"].parts for run in runs], alpha, delta, among)
    if number is None:
        for rule in rules:
            try:
                rule.guarantee(request, among)
            except RiskUnattainable as error:
                refusals.append(error)
        raise min(refusals, key=lambda error: error.minimum_alpha or 1)
    comparison = compare_runs(references, alphas, corrected(delta, among))
    comparison.notes.remove(LOOKED)
    folder, size = runs[number].folder / RETRIEVER, comparison.sizes[alpha][number].value
    guarantee = rules[number].guarantee(request, among)
    return Choice(comparison, number, folder, size, guarantee, tracked=_mark(folder, among))


def _compared_rule(retriever: Retriever, run: Run) -> SetRule:
    """Return the rule whose sizes were measured."""
    calibration = retriever.require_calibration()
    rule, (part,) = calibration.main, run.measured["test"].parts
    if calibration.sequential:
        raise InvalidData(
            f"calibration queries were added to {run.folder / RETRIEVER}, but only retrievers "
            "that were calibrated once are compared: calibrate again"
        )
    if not np.array_equal(rule.calibration.match_score, part.scores):
        raise InvalidData(f"the results in {run.folder} are of another retriever: calibrate again")
    if rule.bound != "binomial":
        raise InvalidData(
            f"{run.folder} was calibrated with the {rule.bound} bound, but sizes are compared with "
            "the binomial one: calibrate with --bound binomial"
        )
    return rule


def _mark(folder: Path, among: int) -> bool:
    """Mark a retriever and its copy in MLflow as chosen; return True if the copy is marked."""
    with locked(folder):
        retriever = Retriever.load(folder)
        retriever.calibration = replace(retriever.require_calibration(), chosen_among=among)
        retriever.save(folder)
        try:
            tracked = tracking.find_tracked_run(retriever.origin.get("calibration", ""))
            if tracked is not None:
                tracking.log_retriever(tracked, current_version(folder))
        except TrackingUnavailable:
            return False
    return tracked is not None
