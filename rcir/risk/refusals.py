"""Refusals: what to do where a request cannot be certified."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import numpy as np
from scipy.special import rel_entr

from rcir.errors import RiskUnattainable, as_option
from rcir.risk import bounds
from rcir.risk.bounds import Bound, Certificate, check_level
from rcir.risk.results import ScoredResults


@contextmanager
def refused(subject: str) -> Iterator[None]:
    """Begin the message of `RiskUnattainable` with what cannot be certified."""
    try:
        yield
    except RiskUnattainable as error:
        raise RiskUnattainable(
            f"{subject}: {error}",
            minimum_alpha=error.minimum_alpha,
            required_calibration=error.required_calibration,
        ) from None


def certify_together(
    subject: str,
    procedures: Iterable[Callable[[], Certificate]],
    least: Callable[[], float | None] = lambda: 0.0,
) -> tuple[Certificate, list[Certificate]]:
    """Return a certificate for a subject that needs several certificates, and these.

    It has the largest of their thresholds. If some are refused, one error is raised; `least`
    returns the alpha from which on the others are certified, None if they never are.
    """
    certificates, refusals = [], []
    for procedure in procedures:
        try:
            certificates.append(procedure())
        except RiskUnattainable as error:
            refusals.append(error)
    if not refusals:
        joint = replace(
            max(certificates, key=lambda certificate: certificate.threshold),
            bound=" and ".join(dict.fromkeys(certificate.bound for certificate in certificates)),
            risk_bound=max(certificate.risk_bound or 0.0 for certificate in certificates),
        )
        return joint, certificates
    others = least()
    smallest = [others, *(error.minimum_alpha for error in refusals)]
    required = [error.required_calibration for error in refusals]
    minimum = None if None in smallest else max(filter(None, smallest))
    if minimum is not None and minimum == others:
        subject += f", which alpha >= {rounded_up(others):.4f} certifies together"
    raise RiskUnattainable(
        f"{subject}: {'; '.join(map(str, refusals))}",
        minimum_alpha=minimum,
        required_calibration=None if None in required else max(filter(None, required)),
    )


def refusal(
    alpha: float,
    delta: float | None,
    calibration: ScoredResults,
    *,
    minimum_alpha: float | None,
    required_calibration: int | None,
    lacking: tuple[str, float] | None = None,
) -> RiskUnattainable:
    """Return the error that states what could be certified instead.

    `lacking` is what the largest sets lack, and the share of it; None if only the first match of a
    query counts.
    """
    advice, n, unit = [], calibration.population.n_units, calibration.population.unit_word
    rounded = rounded_up(minimum_alpha or 1)
    if rounded < 1:
        advice.append(
            f"request alpha >= {rounded:.4f} (on new queries, as it is chosen after looking)"
        )
    if required_calibration is not None and required_calibration > n:
        advice.append(
            f"calibrate on about {required_calibration} new {unit}"
            if unit in ("queries", "clusters")
            else f"calibrate on queries of about {required_calibration - n} more {unit}"
        )
    if deeper := _deeper(calibration, lacking):
        advice.append(deeper)
    absent = _without_match(calibration)
    if not advice:
        advice.append(
            "put matches of the queries into the gallery"
            if absent
            else f"request a larger alpha and calibrate on more {unit}"
        )
    of = "calibration" if unit == "queries" else f"{unit} of calibration"
    at = "on average" if delta is None else f"at delta = {float(delta):g}"
    return RiskUnattainable(
        f"alpha = {float(alpha):g} {at} cannot be certified with {n} {of} queries: "
        f"{', or '.join(advice)}{f'. {absent}' if absent else ''}",
        minimum_alpha=minimum_alpha,
        required_calibration=required_calibration,
    )


def required_queries(alpha: float, delta: float | None, bound: Bound, lost: float) -> int | None:
    """Return the calibration queries needed if no set prevents the share `lost` of the loss."""
    if bound == "betting" and delta is not None:
        if lost >= alpha:
            return None
        # The best stake on losses of 0 and 1 with mean `lost` is one on all of them.
        gain = float(rel_entr(lost, alpha) + rel_entr(1 - lost, 1 - alpha))
        return math.ceil(math.log(1 / delta) / gain)
    if delta is not None:
        return bounds.required_calibration(alpha, delta, bound, lost)
    level = Fraction(check_level("alpha", alpha))
    return None if lost >= alpha else math.ceil((1 - level) / (level - Fraction(lost)))


def _deeper(calibration: ScoredResults, lacking: tuple[str, float] | None) -> str | None:
    """Return the advice to search deeper; None if no query has further matches there."""
    unmatched = np.isinf(calibration.match_score)
    totals, relevant = calibration.n_relevant, calibration.relevant
    if totals is None or relevant is None:  # it is not known how many matches there are
        beyond, where = unmatched, "have no match among them"
    else:
        beyond, where = totals > np.count_nonzero(relevant, axis=1), "have matches beyond them"
        if lacking is None:  # the other matches of a query make no difference
            beyond, where = beyond & unmatched, "have their first match beyond them"
    if not beyond.any():
        return None
    first = (
        f"allow more than {calibration.depth} items in a set"
        if calibration.is_cut
        else f"search deeper than {calibration.depth} candidates "
        f"({as_option('depth', 2 * calibration.depth)} in a new calibration)"
    )
    number = f"{np.count_nonzero(beyond)} of {len(calibration)} calibration queries {where}"
    if lacking is None:
        return f"{first} ({number})"
    return f"{first} (a share {lacking[1]:.4f} of the {lacking[0]} is not among them; {number})"


def _without_match(calibration: ScoredResults) -> str | None:
    """State how many queries have no match in the gallery; None if all have some."""
    totals = calibration.n_relevant
    if totals is None or (totals > 0).all():
        return None
    return (
        f"{np.count_nonzero(totals == 0)} of {len(calibration)} calibration queries have no match "
        "anywhere in the gallery, so that no depth and no size of their sets is enough: request a "
        "beta, which gives such queries no set, or leave them out by "
        f"{as_option('counted', 'matchable')}"
    )


def rounded_up(alpha: float) -> float:
    """Return an alpha with the four digits that errors state."""
    return math.ceil(alpha * 1e4) / 1e4
