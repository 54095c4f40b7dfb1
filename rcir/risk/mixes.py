"""Guarantees for queries whose groups come in another mix than the calibration queries do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.risk.guarantee import Guarantee
from rcir.risk.request import Request

if TYPE_CHECKING:
    from rcir.risk.controller import RiskController


def certify_any_mix(controller: RiskController, request: Request) -> Guarantee:
    """Certify a request for every mix: with the largest sets that a group needs, each at its part
    of delta.

    Raises:
        InvalidConfig: the calibration queries have no groups.
        RiskUnattainable: a group cannot be certified.
    """
    groups = controller.known_groups()
    if not groups:
        controller.queries("")  # says that there are none
    delta = float(request.delta or 0) / len(groups)
    parts = [replace(request, mix=None, group=group, delta=delta) for group in groups]
    try:
        each = [controller.decide(part) for part in parts]
    except RiskUnattainable as error:
        raise RiskUnattainable(
            f"any mix, for which each of {len(groups)} groups is certified at delta / "
            f"{len(groups)}: {error}",
            minimum_alpha=error.minimum_alpha,
            required_calibration=error.required_calibration,
        ) from None
    return replace(
        controller.guarantee(
            request,
            max(part.threshold for part in each),
            each[0].bound,
            max(part.risk_bound or 0.0 for part in each),
        ),
        n_groups=len(groups),
    )


def mix_weights(controller: RiskController, mix: Mapping[str, float]) -> NDArray[np.float64]:
    """(n,) of mean 1, with which the calibration queries have a mix of groups.

    Raises:
        InvalidConfig: some of these groups have no calibration queries, or queries come in
            clusters.
    """
    if controller.cluster is not None:
        raise InvalidConfig(
            f"queries come in clusters ({controller.cluster}): mix can be 'any' only"
        )
    for group in mix:
        controller.queries(group)  # says which there are if this is none of them
    groups = np.asarray(controller.groups)
    known, which, counts = np.unique(groups, return_inverse=True, return_counts=True)
    shares = np.array([mix.get(group, 0.0) for group in known.tolist()])
    weights: NDArray[np.float64] = (shares / counts)[which] * len(which)
    return weights
