"""Risk controllers as arrays and a description, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.retrieval.answer import Distinct
from rcir.risk import LabelledResults, RiskController, score_function_class

Arrays = Mapping[str, NDArray[Any]]


def describe_controllers(
    controllers: Mapping[Distinct, RiskController],
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """What the controllers are as plain values, one each, and all their arrays."""
    described = []
    arrays: dict[str, NDArray[Any]] = {}
    for distinct, controller in controllers.items():
        groups = None if controller.groups is None else controller.groups.tolist()
        stored = {"main": controller} | {str(risk): own for risk, own in controller.own.items()}
        described.append(
            {
                "distinct": distinct,
                "score_functions": {risk: one.score_function.name for risk, one in stored.items()},
                "bound": controller.bound,
                "groups": groups,
                "cluster": controller.cluster,
                "growing": controller.growing,
            }
        )
        for risk, one in stored.items():
            for part, values in (
                ("score_function", one.score_function.state()),
                ("tuning", one.tuning.arrays()),
                ("calibration", one.calibration.arrays()),
            ):
                place = f"{distinct}.{risk}.{part}"
                arrays |= {f"{place}.{name}": array for name, array in values.items()}
    return described, arrays


def controllers_of(
    described: list[dict[str, Any]], arrays: Arrays
) -> dict[Distinct, RiskController]:
    """The controllers that were described."""
    return {kind["distinct"]: _controller(kind, arrays) for kind in described}


def _controller(kind: dict[str, Any], arrays: Arrays) -> RiskController:
    """One controller, with those of risks of their own."""

    def part(risk: str, name: str) -> dict[str, NDArray[Any]]:
        prefix = f"{kind['distinct']}.{risk}.{name}."
        return {
            key.removeprefix(prefix): values
            for key, values in arrays.items()
            if key.startswith(prefix)
        }

    groups = None if kind["groups"] is None else np.array(kind["groups"], str)

    def stored(risk: str, own: dict[str, RiskController]) -> RiskController:
        return RiskController(
            score_function_class(kind["score_functions"][risk]).from_state(
                part(risk, "score_function")
            ),
            LabelledResults.from_arrays(part(risk, "tuning"), None, kind["cluster"]),
            LabelledResults.from_arrays(part(risk, "calibration"), groups, kind["cluster"]),
            kind["bound"],
            own,
            kind["growing"],
        )

    return stored(
        "main", {risk: stored(risk, {}) for risk in kind["score_functions"] if risk != "main"}
    )
