"""Choose the retriever with the smallest certified sets, at the price of a smaller delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rcir import tracking
from rcir.errors import InvalidData, RiskUnattainable, TrackingUnavailable
from rcir.retrieval.calibration import Calibration
from rcir.retrieval.retriever import Retriever
from rcir.risk import Guarantee, check_level, corrected, make_request, smallest_certified
from rcir.runs.compare import Comparison, Run, compare, group_by_queries, read_runs
from rcir.store.folder import current_version, locked
from rcir.terminal import working


@dataclass(frozen=True)
class Choice:
    """The retriever with the smallest sets, marked as chosen."""

    comparison: Comparison  # of all, each certified at delta / `guarantee.chosen_among`
    run: Run  # the chosen one
    size: float  # its mean set size on the test queries, at the level of the guarantee
    guarantee: Guarantee  # in spite of the choice
    tracked: bool  # True if its copy in MLflow is marked, too

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        chosen = {
            "run": self.run.name,
            "retriever": str(self.run.retriever),
            "mean_size": self.size,
            "guarantee": self.guarantee.to_dict(),
            "sentence": str(self.guarantee),
            "marked_in_mlflow": self.tracked,
        }
        return self.comparison.to_dict() | {"choice": chosen}


@working("comparing", logged=True)
def choose(references: Sequence[str], alphas: Sequence[float], delta: float) -> Choice:
    """Choose the retriever with the smallest mean size at the first alpha, and mark it on disk.

    References are folders of calibrations, or MLflow ids of their runs. Each of k retrievers is
    certified at delta / k, see `rcir.risk.corrected`, so that the guarantee holds at `delta`. One
    that was itself chosen among j counts as j.

    Raises:
        InvalidData: these are not two or more calibrations on the same queries.
        RiskUnattainable: nothing is certified for any at delta / k.
        InvalidRiskLevel: an alpha or delta is out of range.
        CorruptRetriever: a retriever is damaged.
    """
    alpha = check_level("alpha", alphas[0])
    check_level("delta", delta)
    runs = _read_candidates(references)
    calibrations, among = [], 0
    for run in runs:  # one encoder in memory at a time
        calibrations.append(_compared_calibration(Retriever.load(run.retriever), run))
        among += calibrations[-1].chosen_among
    request, refusals = make_request(alpha, delta), []
    number = smallest_certified([run.results["test"].parts for run in runs], alpha, delta, among)
    if number is None:
        for calibration in calibrations:
            try:
                calibration.miss_rule.guarantee(request, among)
            except RiskUnattainable as error:
                refusals.append(error)
        raise min(refusals, key=lambda error: error.minimum_alpha or 1)
    comparison = compare(runs, alphas, corrected(delta, among))
    row = comparison.rows[number]
    guarantee = replace(calibrations[number], chosen_among=among).guarantee(request)
    tracked = _mark(row.run.retriever, among)
    return Choice(comparison, row.run, row.sizes[alpha].value, guarantee, tracked)


def _read_candidates(references: Sequence[str]) -> list[Run]:
    """Read calibrations that can be compared on their test queries."""
    runs = read_runs(references)
    if len({run.folder.resolve() for run in runs}) < max(2, len(references)):
        raise InvalidData("--choose takes two or more calibrations, each named once")
    lacking = [str(run.folder) for run in runs if not run.retriever.is_dir()]
    if lacking:
        raise InvalidData(f"no calibrated retriever in {', '.join(lacking)}: run `rcir calibrate`")
    for run in runs:
        if "test" in run.results and not run.results["test"].parts:
            raise InvalidData(
                f"the calibration queries of {run.folder} come in clusters, but only sizes for "
                "independent queries are compared: calibrate on one query of each cluster"
            )
    if [len(group) for group in group_by_queries(runs, "test")] != [len(runs)]:
        raise InvalidData(
            "calibration or test queries differ: calibrate all on the same data set with the same "
            "options, then choose"
        )
    return runs


def _compared_calibration(retriever: Retriever, run: Run) -> Calibration:
    """Return the calibration whose sizes were measured."""
    calibration = retriever.require_calibration()
    rule, (part,) = calibration.miss_rule, run.results["test"].parts
    if calibration.sequential:
        raise InvalidData(
            f"calibration queries were added to {run.retriever}, but only retrievers that were "
            "calibrated once are compared: calibrate again"
        )
    if not np.array_equal(rule.evidence.match_score, part.scores):
        raise InvalidData(f"the results in {run.folder} are of another retriever: calibrate again")
    if rule.bound != "binomial":
        raise InvalidData(
            f"{run.folder} was calibrated with the {rule.bound} bound, but sizes are compared with "
            "the binomial one: calibrate with --bound binomial"
        )
    return calibration


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
