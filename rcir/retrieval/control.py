"""From labelled queries to risk controllers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.index import build_index
from rcir.retrieval.results import Judged
from rcir.risk import Bound, Risk, RiskController, fit_score_function
from rcir.risk.choice import Comparison


def control(
    tuning: Judged,
    calibration: Judged,
    score_function: str,
    bound: Bound,
    alphas: Sequence[float],
    delta: float,
) -> tuple[RiskController, Comparison]:
    """The controller of two splits that were searched alike, for every risk with its own score
    function.

    Args:
        tuning, calibration: the tuning split and the calibration queries.
        score_function, alphas, delta: see `rcir.risk.fit_score_function`.
        bound: of the miss risk.

    Returns:
        The controller, and what was compared for the miss risk.
    """

    def of(risk: Risk) -> tuple[RiskController, Comparison]:
        fitted, compared = fit_score_function(
            score_function,
            tuning.found.rankings,
            tuning.relevant,
            alphas,
            delta,
            risk,
            tuning.totals,
        )
        return RiskController(
            fitted,
            tuning.outcomes(fitted),
            calibration.outcomes(fitted),
            bound,
            calibration.groups,
            calibration.cluster,
        ), compared

    main, compared = of("miss")
    # Of one true match at most there is no recall but whether it is missed. The calibration queries
    # have no say in it.
    single = tuning.totals.max() <= 1
    others: tuple[Risk, ...] = ("false-discovery",) if single else ("recall", "false-discovery")
    for risk in others:
        own, _ = of(risk)
        if own.score_function.name != main.score_function.name:
            main.own[risk] = own
    return main, compared


def check_clusters(tuning: Judged, calibration: Judged) -> None:
    """Raise `InvalidData` unless both are of the same kind of clusters, and of different ones."""
    if tuning.cluster != calibration.cluster:
        raise InvalidData(
            f"the tuning split is of clusters {tuning.cluster!r}, the calibration queries of "
            f"{calibration.cluster!r}: judge both with the same"
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


def nearest_other(tuning: Judged, calibration: Judged) -> NDArray[np.float32]:
    """(n,) distance of each calibration query to the nearest other query of the two splits."""
    vectors = calibration.found.vectors
    index = build_index(np.concatenate([vectors, tuning.found.vectors]))
    distances, positions = index.search(vectors, 2)
    itself = positions[:, 0] == np.arange(len(vectors))
    return np.where(itself, distances[:, 1], distances[:, 0])


def extended(controller: RiskController, queries: Judged) -> RiskController:
    """A controller of its calibration queries and further ones, which grow one by one."""
    if controller.cluster is not None or queries.cluster is not None:
        raise InvalidData("no queries can be added where they come in clusters: calibrate again")
    groups = controller.groups
    if (groups is None) != (queries.groups is None):
        raise InvalidData("the calibration queries and those to add all need a group, or none")
    if groups is not None and queries.groups is not None:
        groups = np.concatenate([groups, queries.groups])
    return RiskController(
        controller.score_function,
        controller.tuning,
        controller.calibration.joined(queries.outcomes(controller.score_function)),
        controller.bound,
        groups,
        own={risk: extended(own, queries) for risk, own in controller.own.items()},
        growing=True,
    )
