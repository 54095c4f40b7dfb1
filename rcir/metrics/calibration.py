"""Whether an uncertainty means what it says: expected calibration error, in four flavours.

The papers that report one for image retrieval differ in how they group queries and in what they
expect of a group; their numbers compare only within a flavour.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.bins import bin_means, equal_count_bins, equal_width_bins
from rcir.metrics.checks import Floats, check_columns


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: bins of confidence, from least to most confident.

    Attributes:
        confidence: (bins,) what is expected of each bin, such as the mid-point of its confidences.
        accuracy: (bins,) what its queries reach; NaN in an empty bin.
        count: (bins,) number of queries.
        error: expected calibration error, the count-weighted mean of |accuracy - confidence|.
    """

    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    count: NDArray[np.int64]
    error: float


def confidence(uncertainty: Floats, low: float, high: float) -> NDArray[np.float64]:
    """One minus the uncertainty scaled from [low, high] to [0, 1] and clipped.

    `low` and `high` belong to queries other than the ones measured: a range taken from the
    measured queries themselves moves with their outliers.

    Example:
        >>> confidence(np.array([0.5, 1.5, 9.0]), low=1.0, high=2.0)
        array([1. , 0.5, 0. ])
    """
    span = high - low if high > low else 1.0
    return 1 - np.clip((np.asarray(uncertainty, np.float64) - low) / span, 0, 1)


def reliability(
    confidence: Floats, correct: NDArray[np.bool_] | Floats, bins: int = 10
) -> Reliability:
    """Recall at 1 against confidence (Warburg et al., ICCV 2021, section 4), mid-points of bins.

    Args:
        confidence: (n,) in [0, 1]; see `confidence`.
        correct: (n,) whether the top-1 is a true match.
        bins: number of equal-width bins; 1.0 belongs to the last.

    Raises:
        InvalidData: shapes differ, there is no query, or a confidence is outside [0, 1].

    Example:
        >>> diagram = reliability(np.array([0.05, 0.95, 1.0]), np.array([False, True, False]))
        >>> diagram.count[-1], diagram.accuracy[-1], round(diagram.error, 3)
        (np.int64(2), np.float64(0.5), 0.317)
    """
    values = np.asarray(confidence, np.float64)
    check_columns(confidence=values, correct=correct)
    return _diagram(equal_width_bins(values, bins), _middles(bins), correct)


def reliability_btl_width(
    uncertainty: Floats, average_precision: Floats, low: float, high: float, bins: int = 10
) -> Reliability:
    """mAP@k against confidence in bins of equal width: the published ECE@k of the BTL tables.

    Confidence is one minus the min-max-scaled uncertainty and a bin's mid-point is expected of
    it (Warburg et al., ICCV 2021, section 4; only this reading gives their numbers).

    Args:
        uncertainty: (n,) of the queries, larger is less certain.
        average_precision: (n,) in [0, 1] of `average_precision_at_k`, queries without a match
            left out; at k = 1, whether the top-1 is right.
        low: smallest uncertainty of other queries.
        high: largest uncertainty of other queries.
        bins: number of equal-width bins.

    Raises:
        InvalidData: shapes differ, there is no query, or a value is NaN.

    Example:
        >>> found = reliability_btl_width(np.array([0.1, 0.9]), np.array([1.0, 0.0]), 0.0, 1.0)
        >>> round(found.error, 3)
        0.05
    """
    check_columns(uncertainty=uncertainty, average_precision=average_precision)
    return reliability(confidence(uncertainty, low, high), average_precision, bins)


def reliability_btl_percentile(
    uncertainty: Floats, average_precision: Floats, bins: int = 10
) -> Reliability:
    """mAP@k against confidence in bins of equal count: ECE@k as the BTL paper's text has it.

    Of the m-th least uncertain of M bins, 1 - (m - 1/2) / M is expected: the uncertainties count
    by their order only (Warburg et al., ICCV 2021, section 4).

    Args:
        uncertainty: (n,) of the queries; like ones are ordered by index.
        average_precision: (n,) in [0, 1] of `average_precision_at_k`, queries without a match
            left out.
        bins: number of equal-count bins, at most n.

    Raises:
        InvalidData: shapes differ, a value is NaN, or there are fewer queries than bins.

    Example:
        >>> found = reliability_btl_percentile(np.arange(4.0), np.array([1.0, 1.0, 0.0, 0.0]), 2)
        >>> found.confidence.tolist(), found.accuracy.tolist(), found.error
        ([0.25, 0.75], [0.0, 1.0], 0.25)
    """
    check_columns(uncertainty=uncertainty, average_precision=average_precision)
    of = bins - 1 - equal_count_bins(uncertainty, bins)
    return _diagram(of, _middles(bins), average_precision)


def reliability_rcir(
    uncertainty: Floats, hit: NDArray[np.bool_], low: float, high: float, bins: int = 10
) -> Reliability:
    """R@k against confidence in bins of equal width of which the upper edge is expected.

    As Cai et al. (AAAI 2025) compute it. Half a bin too much is expected of every bin: for a
    statement on an encoder, not for a comparison with their tables, use `reliability`.

    Args:
        uncertainty: (n,) of the queries, larger is less certain.
        hit: (n,) whether a true match is among the first k.
        low: smallest uncertainty of other queries.
        high: largest uncertainty of other queries.
        bins: number of equal-width bins.

    Raises:
        InvalidData: shapes differ, there is no query, or a value is NaN.

    Example:
        >>> found = reliability_rcir(np.array([0.05, 0.95]), np.array([True, False]), 0.0, 1.0)
        >>> round(found.error, 3)
        0.05
    """
    check_columns(uncertainty=uncertainty, hit=hit)
    of = equal_width_bins(confidence(uncertainty, low, high), bins)
    return _diagram(of, np.arange(1, bins + 1) / bins, hit)


def reliability_lam(
    votes: NDArray[np.int64], labels: NDArray[np.int64], bins: int = 10
) -> Reliability:
    """Accuracy against confidence of a vote among samples of the weights.

    Each sample votes for the label of the image it finds nearest; the prediction is the most
    frequent label, the smallest of several, and the confidence is its share of the votes. A bin's
    mean confidence is expected of it (Warburg et al., NeurIPS 2023, supplement; there the last
    bin loses the votes that agree fully, here it has them).

    Args:
        votes: (T, n) labels of the nearest other image, T samples of the weights.
        labels: (n,) true labels.
        bins: number of equal-width bins of confidence.

    Returns:
        The diagram, with NaN as confidence of an empty bin.

    Raises:
        InvalidData: shapes do not fit.

    Example:
        >>> found = reliability_lam(np.array([[3, 5], [3, 4], [2, 4], [3, 4]]), np.array([3, 5]))
        >>> found.count[7], found.confidence[7], found.accuracy[7], found.error
        (np.int64(2), np.float64(0.75), np.float64(0.5), 0.25)
    """
    if votes.ndim != 2 or 0 in votes.shape or votes.shape[1:] != labels.shape:
        raise InvalidData(
            f"votes have shape {votes.shape}, labels {labels.shape}; needed are (T, n) and (n,), "
            "T and n at least 1"
        )
    predicted, share = _most_frequent(votes)
    of = equal_width_bins(share, bins)
    return _diagram(of, bin_means(share, of, bins), predicted == labels)


def _most_frequent(votes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(n,) the most frequent label of each column, the smallest of several, and its share."""
    ordered = np.sort(votes, axis=0)
    place = np.arange(len(votes))[:, None]
    starts = np.ones(votes.shape, bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    run = place - np.maximum.accumulate(np.where(starts, place, 0), axis=0)
    # The first of the longest runs to be complete is that of the smallest label.
    end = run.argmax(axis=0)
    column = np.arange(votes.shape[1])
    return ordered[end, column], (run[end, column] + 1) / len(votes)


def _middles(bins: int) -> NDArray[np.float64]:
    """(bins,) mid-points of equal-width bins of [0, 1]."""
    return (np.arange(bins) + 0.5) / bins


def _diagram(
    of: NDArray[np.int64], expected: NDArray[np.float64], reached: NDArray[np.bool_] | Floats
) -> Reliability:
    """The diagram of queries in bins, where `expected` is the confidence of each bin."""
    bins = len(expected)
    count = np.bincount(of, minlength=bins)
    accuracy = bin_means(reached, of, bins)
    gap = np.where(count > 0, np.abs(accuracy - expected), 0)
    return Reliability(expected, accuracy, count, float((gap * count).sum() / count.sum()))
