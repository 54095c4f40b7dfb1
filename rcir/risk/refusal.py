"""Refusals: the error where nothing can be certified, with the remedies."""

from __future__ import annotations

import math
from fractions import Fraction

from rcir.errors import RiskUnattainable
from rcir.risk import bounds
from rcir.risk.bounds import Bound, check_level


def required(alpha: float, delta: float | None, bound: Bound, lost: float) -> int | None:
    """Calibration queries needed where no set size prevents the share `lost` of the loss."""
    if delta is not None:
        return bounds.required_calibration(alpha, delta, bound, lost)
    level = Fraction(check_level("alpha", alpha))
    return None if lost >= alpha else math.ceil((1 - level) / (level - Fraction(lost)))


def unattainable(
    alpha: float,
    delta: float | None,
    n: int,
    *,
    minimum_alpha: float | None,
    required_calibration: int | None,
    deeper: str | None,
    unit: str = "queries",
) -> RiskUnattainable:
    """The error that says what can be had instead."""
    advice = []
    rounded = math.ceil((minimum_alpha or 1) * 1e4) / 1e4
    if rounded < 1:
        advice.append(f"ask for alpha >= {rounded:.4f} (chosen after looking: on new queries)")
    if required_calibration is not None and required_calibration > n:
        advice.append(f"calibrate on about {required_calibration} new {unit}")
    if deeper:
        advice.append(deeper)
    of = "calibration" if unit == "queries" else f"{unit} of calibration"
    at = "on average" if delta is None else f"at delta = {float(delta):g}"
    return RiskUnattainable(
        f"alpha = {float(alpha):g} {at} cannot be certified with {n} {of} queries: "
        f"{', or '.join(advice) or f'ask for a larger alpha and calibrate on more {unit}'}",
        minimum_alpha=minimum_alpha,
        required_calibration=required_calibration,
    )
