"""Equal risk for certain and uncertain queries: a threshold for each quarter of the uncertainty.

The smallest sets on average leave most misses to the uncertain queries. Here the risk is at most
alpha in each of four bins, all of them together at delta: each bin is certified by itself, at
delta / 4. The bins are quarters of the tuning split, so that no calibration query decides them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, as_option
from rcir.risk.bounds import Bound, Certificate
from rcir.risk.groups import certify_groups
from rcir.risk.refusals import certify_together, refused
from rcir.risk.request import Request
from rcir.risk.results import ScoredResults

BINS = 4


def certify_bins(
    request: Request, calibration: ScoredResults, tuning: ScoredResults | None, bound: Bound
) -> Certificate:
    """Certify a request in each bin of the uncertainty, see `rcir.risk.certify`."""
    asked = as_option("balance", "uncertainty")
    if tuning is None or tuning.uncertainty is None or calibration.uncertainty is None:
        raise InvalidConfig(
            f"{asked} needs a tuning split with uncertainties, which fixes the bins"
        )
    assert request.delta is not None  # `balance` needs one
    cuts = quarters(tuning.uncertainty)
    if len(cuts) < BINS - 1:
        raise InvalidConfig(
            f"{asked} needs {BINS} bins, but the uncertainties of the tuning split have too few "
            f"different values for more than {len(cuts) + 1}: calibrate with another uncertainty "
            "(query_uncertainty)"
        )
    in_bin = bins_of(calibration.uncertainty, cuts)
    share = replace(request, balance=None, delta=request.delta / BINS)

    def certify_bin(number: int) -> Certificate:
        rows = in_bin == number
        with refused(f"quarter {number + 1} of the uncertainty, {rows.sum()} queries"):
            if not rows.any():
                raise InvalidConfig(
                    f"{asked}: no calibration query is in quarter {number + 1} of the uncertainty"
                )
            return certify_groups(share, calibration[rows], tuning, bound)

    joint, certificates = certify_together(
        f"{asked}: {BINS} bins, each at delta / {BINS}",
        (partial(certify_bin, number) for number in range(BINS)),
    )
    thresholds = tuple(certificate.threshold for certificate in certificates)
    return replace(joint, cuts=tuple(cuts.tolist()), thresholds=thresholds)


def quarters(uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cuts between quarters, midway between different values; fewer if values tie.

    Example:
        >>> quarters(np.array([1.0, 1.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0])).tolist()
        [1.5, 3.5, 6.5]
    """
    values, counts = np.unique(uncertainty, return_counts=True)
    midway = (values[1:] + values[:-1]) / 2
    below = np.cumsum(counts)[:-1] / len(uncertainty)
    if not len(midway):
        return midway
    wanted = np.arange(1, BINS) / BINS
    return np.unique(midway[np.abs(below[:, None] - wanted).argmin(axis=0)])


def bins_of(uncertainty: NDArray[np.float64], cuts: NDArray[np.float64]) -> NDArray[np.int64]:
    """(n,) number of the bin of each query, from 0 on."""
    return np.searchsorted(cuts, uncertainty)


def thresholds_of(
    certificate: Certificate, uncertainty: NDArray[np.float64] | None
) -> float | NDArray[np.float64]:
    """Return the threshold of all queries, or (n,) those of each."""
    if not certificate.thresholds:
        return certificate.threshold
    if uncertainty is None:
        raise InvalidData("the sets depend on the uncertainty of the queries, which they lack")
    return np.array(certificate.thresholds)[bins_of(uncertainty, np.array(certificate.cuts))]
