"""Certification for queries of new labels, or of both new and calibrated ones.

Queries of labels that did not calibrate are not exchangeable with those that did, but labels are:
if they are drawn independently of each other, the mean loss of the queries of a label is one draw,
and the mean over labels is certified as that over clusters. The score function must not have been
fitted on queries of the calibrating labels: it would know these labels and no others.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from rcir.errors import RiskUnattainable
from rcir.risk.bounds import Bound, Certificate
from rcir.risk.groups import bound_of_means, certify_groups
from rcir.risk.refusals import certify_together, refused
from rcir.risk.request import Request
from rcir.risk.results import ScoredResults
from rcir.risk.testing import learn_then_test, require_tuning


def certify_labels(
    request: Request, calibration: ScoredResults, tuning: ScoredResults | None, bound: Bound
) -> Certificate:
    """Certify a request for queries of new or of any labels, see `rcir.risk.certify`.

    For any mix of new and calibrated labels, both means have to be certified: each at half of delta
    where risks fall as sets grow, so that the larger sets satisfy both.
    """
    of_labels = calibration.by_label()
    tuning_of_labels = None if tuning is None else tuning.by_label()
    if request.labels == "new":
        of_request = replace(request, labels="calibrated")
        return certify_groups(of_request, of_labels, tuning_of_labels, bound)
    if not request.monotone:
        assert request.delta is not None  # a request without delta has one monotone risk
        return learn_then_test(
            request.levels,
            request.delta,
            calibration.of_group(request.group),
            require_tuning(tuning),
            bound_of_means(bound, of_labels),
            by_label=True,
        )
    delta = None if request.delta is None else request.delta / 2
    half = replace(request, labels="calibrated", delta=delta)
    new = half, of_labels, tuning_of_labels, bound

    def calibrated_labels() -> Certificate:
        with refused("queries of the calibrated labels"):
            return certify_groups(half, calibration, tuning, bound)

    def new_labels() -> Certificate:
        with refused("queries of new labels"):
            return certify_groups(*new)

    # One kind may be certified at this alpha, but not at the one that the other kind needs.
    joint, _ = certify_together(
        "queries of any labels, each kind at half of delta",
        (calibrated_labels, new_labels),
        least=partial(_minimum_alpha, *new),
    )
    return joint


def _minimum_alpha(
    request: Request, calibration: ScoredResults, tuning: ScoredResults | None, bound: Bound
) -> float | None:
    """Return the alpha of one risk from which on it is certified; None if it never is."""
    tiny = replace(request, levels=dict.fromkeys(request.levels, math.ulp(0.5)))
    try:
        certify_groups(tiny, calibration, tuning, bound)
    except RiskUnattainable as error:
        return error.minimum_alpha
    return 0.0
