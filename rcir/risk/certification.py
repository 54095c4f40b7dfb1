"""Certification: from a request and scored calibration queries to a certificate.

`certify` prepares the queries; how the procedure follows from the request is in `labels.py` and
`groups.py`. No procedure sees a retriever, and none changes anything.
"""

from __future__ import annotations

from dataclasses import replace

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk.balance import certify_bins
from rcir.risk.bounds import Bound, Certificate, check_bound
from rcir.risk.groups import certify_groups
from rcir.risk.labels import certify_labels
from rcir.risk.open_set import certify_open_set, matchable_queries
from rcir.risk.refusals import refused
from rcir.risk.request import Request, conflict
from rcir.risk.results import ScoredResults


def certify(
    request: Request,
    calibration: ScoredResults,
    tuning: ScoredResults | None = None,
    bound: Bound = "binomial",
) -> Certificate:
    """Certify a request.

    Args:
        request: the guarantee.
        calibration: the scored calibration queries.
        tuning: other queries, of the tuning split, scored by the same score function. The exact
            certificate of the miss risk does not need them.
        bound: of the miss risk; mean losses take "hoeffding-bentkus" in place of "binomial", and
            "betting" for queries in clusters.

    Raises:
        InvalidConfig: the calibration queries do not support such a request.
        InvalidData: tuning and calibration queries do not fit together, or lack the queries with
            or without a match in the gallery that the request needs.
        RiskUnattainable: no threshold is certified; the error states the smallest alpha that is,
            and the number of calibration queries that would do.

    Example:
        >>> import numpy as np
        >>> from rcir.risk import make_request
        >>> scores = np.tile(np.arange(2, dtype=np.float32), (1000, 1))
        >>> relevant = np.array([[True, False]] * 900 + [[False, True]] * 100)
        >>> calibration = ScoredResults.from_scores(scores, relevant)
        >>> requests = [make_request(alpha, 0.1) for alpha in (0.05, 0.15)]
        >>> [certify(request, calibration).threshold for request in requests]
        [1.0, 0.0]
    """
    check_bound(bound)
    if tuning is not None:
        check_depths(tuning, calibration)
    if reason := conflict(request, calibration.population.cluster_word):
        raise InvalidConfig(reason)
    size = request.max_size
    if size is not None and size < calibration.depth:
        # Candidates beyond have an infinite score before anything is certified. If sets were cut
        # afterwards, calibration queries whose match is beyond would count as served.
        with refused(f"sets of at most {size} items"):
            cut = None if tuning is None else tuning.cut(size)
            return certify(replace(request, max_size=None), calibration.cut(size), cut, bound)
    if request.beta is not None:
        return certify_open_set(request, calibration, bound)
    if request.counted == "matchable":
        calibration = matchable_queries(request, calibration)
        if tuning is not None:
            tuning = tuning[tuning.matchable] if tuning.matchable.any() else None
    if request.balance is not None:
        return certify_bins(request, calibration, tuning, bound)
    if request.labels != "calibrated":
        return certify_labels(request, calibration, tuning, bound)
    return certify_groups(request, calibration, tuning, bound)


def check_depths(tuning: ScoredResults, calibration: ScoredResults) -> None:
    """Raise `InvalidData` if the splits were searched to different depths."""
    if tuning.depth != calibration.depth:
        raise InvalidData(
            f"the tuning split was searched to depth {tuning.depth}, the calibration queries to "
            f"{calibration.depth}: search both alike"
        )
