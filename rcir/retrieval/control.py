"""From labelled queries to risk controllers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.index import build_index
from rcir.risk import RISKS, Bound, LabelledResults, RiskController, fit_score_function
from rcir.risk.choice import ComparedSizes


def control(
    tuning: LabelledResults,
    calibration: LabelledResults,
    score_function: str,
    bound: Bound,
    alphas: Sequence[float],
    delta: float,
) -> tuple[RiskController, ComparedSizes]:
    """The controller of two splits that were searched alike, for every risk with its own score
    function.

    Args:
        tuning, calibration: the tuning split and the calibration queries.
        score_function, alphas, delta: see `rcir.risk.fit_score_function`.
        bound: of the miss risk.

    Returns:
        The controller, and what was compared for the miss risk.
    """

    def of(risk: str) -> tuple[RiskController, ComparedSizes]:
        fitted, compared = fit_score_function(
            score_function, tuning, tuning.relevant, alphas, delta, risk, tuning.totals
        )
        return RiskController(fitted, tuning, calibration, bound), compared

    main, compared = of("miss")
    for name, risk in RISKS.items():
        if risk.own_score_function(tuning):
            own, _ = of(name)
            if own.score_function.name != main.score_function.name:
                main.own[name] = own
    return main, compared


def check_clusters(tuning: LabelledResults, calibration: LabelledResults) -> None:
    """Raise `InvalidData` unless both are of the same kind of clusters, and of different ones."""
    if tuning.cluster != calibration.cluster:
        raise InvalidData(
            f"the tuning split is of clusters {tuning.cluster!r}, the calibration queries of "
            f"{calibration.cluster!r}: search both with the same"
        )
    if tuning.clusters is None or calibration.clusters is None:
        return
    shared = np.intersect1d(tuning.clusters, calibration.clusters)
    if len(shared):
        names = ", ".join(shared[:3].tolist())
        raise InvalidData(
            f"{len(shared)} clusters ({calibration.cluster} {names}) are in the tuning split and "
            "among the calibration queries: divide the queries by clusters"
        )


def nearest_other(tuning: LabelledResults, calibration: LabelledResults) -> NDArray[np.float32]:
    """(n,) distance of each calibration query to the nearest other query of the two splits."""
    vectors = calibration.known("vectors")
    index = build_index(np.concatenate([vectors, tuning.known("vectors")]))
    distances, positions = index.search(vectors, 2)
    itself = positions[:, 0] == np.arange(len(vectors))
    return np.where(itself, distances[:, 1], distances[:, 0])


def extended(controller: RiskController, queries: LabelledResults) -> RiskController:
    """A controller of its calibration queries and further ones, which grow one by one."""
    if controller.cluster is not None or queries.cluster is not None:
        raise InvalidData("no queries can be added where they come in clusters: calibrate again")
    return RiskController(
        controller.score_function,
        controller.tuning,
        controller.calibration.joined(queries.scored(controller.score_function)),
        controller.bound,
        own={risk: extended(own, queries) for risk, own in controller.own.items()},
        growing=True,
    )
