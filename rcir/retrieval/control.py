"""From labelled queries to risk controllers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rcir.errors import InvalidConfig, InvalidData
from rcir.levels import ALPHAS, DELTA
from rcir.retrieval.query_uncertainty import check_uncertainty
from rcir.risk import RISKS, Bound, LabelledResults, RiskController, fit_score_function
from rcir.risk.bounds import check_bound
from rcir.risk.choice import ComparedSizes
from rcir.risk.fits import Fits


@dataclass(frozen=True)
class CalibrationOptions:
    """How a retriever is calibrated, see `CalibratedSearcher.calibrate`."""

    score_function: str = "auto"
    bound: Bound = "binomial"
    alphas: Sequence[float] = ALPHAS
    delta: float = DELTA
    recurring: bool = False
    uncertainty: str = "own"

    def __post_init__(self) -> None:
        check_bound(self.bound)
        check_uncertainty(self.uncertainty)
        if not isinstance(self.alphas, Sequence | np.ndarray) or not len(self.alphas):
            raise InvalidConfig(f"alphas is {self.alphas!r}; give a list of at least one")
        object.__setattr__(self, "alphas", tuple(self.alphas))


def control(
    fits: Fits,
    calibration: LabelledResults,
    options: CalibrationOptions,
    before: RiskController | None = None,
) -> tuple[RiskController, ComparedSizes]:
    """The controller of two splits that were searched alike, for every risk with its own score
    function.

    Args:
        fits: on the tuning split.
        calibration: the calibration queries.
        options: how.
        before: whose kinds of score functions are taken, of each risk; else they are chosen.

    Returns:
        The controller, and what was compared for the miss risk.
    """
    tuning = fits.split
    made: dict[str, RiskController] = {}

    def of(risk: str) -> tuple[RiskController, ComparedSizes]:
        kept = None if before is None else before.own.get(risk, before).score_function.name
        fitted, compared = fit_score_function(
            kept or options.score_function,
            tuning,
            tuning.relevant,
            options.alphas,
            options.delta,
            risk,
            tuning.totals,
            fits,
        )
        if fitted.name not in made:
            made[fitted.name] = RiskController(fitted, tuning, calibration, options.bound)
        return made[fitted.name], compared

    main, compared = of("miss")
    for name, risk in RISKS.items():
        if risk.own_score_function(tuning):
            own, _ = of(name)
            if own.score_function.name != main.score_function.name:
                main.own[name] = own
    return main, compared


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


def grown(controller: RiskController) -> RiskController:
    """The same controller, of calibration queries that grow one by one."""
    own = {risk: grown(one) for risk, one in controller.own.items()}
    return RiskController(
        *(controller.score_function, controller.tuning, controller.calibration, controller.bound),
        own=own,
        growing=True,
    )
