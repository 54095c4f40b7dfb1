"""The best of several calibrated retrievers, with a guarantee that survives the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rcir import tracking
from rcir.errors import InvalidData, RiskUnattainable, TrackingUnavailable
from rcir.retrieval import storage
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    Guarantee,
    GuaranteeRequest,
    SetRule,
    check_level,
    corrected,
    smallest_certified,
)
from rcir.runs.compare import LOOKED, Comparison, compare_runs, same_queries
from rcir.runs.find import RETRIEVER, Run, read_runs, run_folder


@dataclass(frozen=True)
class Choice:
    """The retriever with the smallest sets, marked as chosen.

    Attributes:
        comparison: of all, each certified at delta / `guarantee.chosen_among`.
        number: position of the chosen run.
        folder: the chosen retriever.
        size: its mean set size on the test queries, at the level of the guarantee.
        guarantee: what it guarantees in spite of the choice.
        tracked: whether its copy in MLflow is marked, too.
    """

    comparison: Comparison
    number: int
    folder: Path
    size: float
    guarantee: Guarantee
    tracked: bool

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
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
    """Choose the retriever of the smallest mean size at the first alpha, and mark it on disk.

    Each of k retrievers is certified at delta / k, see `rcir.risk.corrected`. One that was itself
    chosen among j counts as j.

    Args:
        references: of each calibration, its folder or the MLflow id of its run.
        alphas, delta: levels to compare at; the guarantee holds at `delta`.

    Raises:
        InvalidData: these are no two or more calibrations on the same queries.
        RiskUnattainable: nothing is certified of any at delta / k.
        InvalidRiskLevel: an alpha or delta is out of range.
        CorruptRetriever: of a retriever.
    """
    alpha = check_level("alpha", alphas[0])
    check_level("delta", delta)
    folders = [run_folder(reference) for reference in references]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise InvalidData("--choose takes two or more calibrations, each named once")
    lacking = [str(folder) for folder in folders if not (folder / RETRIEVER).is_dir()]
    if lacking:
        raise InvalidData(
            f"no calibrated retriever in {', '.join(lacking)}: --choose takes the folders that "
            "`python -m calibration` wrote to"
        )
    runs = read_runs(folders)
    for run in runs:
        if "test" in run.measured and not run.measured["test"].parts:
            raise InvalidData(
                f"the calibration queries of {run.folder} come in clusters: sizes are compared of "
                "independent queries; calibrate without --cluster, on one query of each cluster"
            )
    groups = same_queries(runs, "test")
    if len(groups) != 1 or len(groups[0]) != len(runs):
        raise InvalidData(
            "calibration or test queries differ, so that sizes cannot be told apart from queries: "
            "calibrate all on the same data set with the same options, then choose"
        )
    rules, among = [], 0
    for run in runs:  # one encoder in memory at a time
        retriever = Retriever.load(run.folder / RETRIEVER)
        rules.append(_rule(retriever, run))
        among += retriever.require_calibration().chosen_among
    parts = [run.measured["test"].parts for run in runs]
    number = smallest_certified(parts, alpha, delta, among)
    request = GuaranteeRequest(alpha, delta)
    if number is None:
        raise min(_refusals(rules, request, among), key=lambda no: no.minimum_alpha or 1)
    found = compare_runs(references, alphas, corrected(delta, among))
    found.notes.remove(LOOKED)
    folder = runs[number].folder / RETRIEVER
    guarantee = rules[number].guarantee(request, among)
    tracked = _mark(folder, among)
    return Choice(found, number, folder, found.sizes[alpha][number].value, guarantee, tracked)


def _rule(retriever: Retriever, run: Run) -> SetRule:
    """Return the rule behind the sizes that were measured of a run."""
    calibration = retriever.calibration
    (part,) = run.measured["test"].parts
    if calibration is not None and calibration.sequential:
        raise InvalidData(
            f"calibration queries were added to {run.folder / RETRIEVER} one by one: sizes are "
            "compared of retrievers that were calibrated at once; calibrate again"
        )
    if calibration is None or not np.array_equal(
        calibration.main.calibration.match_score, part.scores
    ):
        raise InvalidData(
            f"what was measured in {run.folder} is not of the retriever there: calibrate again"
        )
    rule = calibration.main
    if rule.bound != "binomial":
        raise InvalidData(
            f"{run.folder} was calibrated with the {rule.bound} bound, sizes are compared at "
            "the binomial one: calibrate with --bound binomial"
        )
    return rule


def _refusals(
    rules: Sequence[SetRule], request: GuaranteeRequest, among: int
) -> list[RiskUnattainable]:
    """Return why nothing is certified, for each rule."""
    refusals = []
    for rule in rules:
        try:
            rule.guarantee(request, among)
        except RiskUnattainable as error:
            refusals.append(error)
    return refusals


def _mark(folder: Path, among: int) -> bool:
    """Mark a retriever as chosen, and its copy in MLflow; return whether there it could be."""
    with storage.locked(folder):
        retriever = Retriever.load(folder)
        retriever.calibration = replace(retriever.require_calibration(), chosen_among=among)
        retriever.save(folder)
        try:
            tracked = tracking.find_tracked_run(retriever.origin.get("calibration", ""))
            if tracked is not None:
                tracking.log_retriever(tracked, storage.current_version(folder))
        except TrackingUnavailable:
            return False
    return tracked is not None
