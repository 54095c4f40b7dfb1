"""Measures of how well an uncertainty, or a score of pairs, separates right from wrong results.

Expected calibration error, correlation with performance, sparsification, detection of other data
sets, and verification of pairs. The papers that report a calibration error for image retrieval
differ in how they group queries and in what they expect of a group; their numbers compare only
within a flavour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.autologging import without_autologging
from rcir.errors import InvalidData
from rcir.metrics.ranking import Floats, check_columns


def equal_width_bins(values: Floats, bins: int) -> NDArray[np.int64]:
    """(n,) the bin of each value in [0, 1], from 0; 1 belongs to the last.

    Raises:
        InvalidData: a value is outside [0, 1], or there is no bin.

    Example:
        >>> equal_width_bins(np.array([0.0, 0.09, 0.1, 1.0]), 10).tolist()
        [0, 0, 1, 9]
    """
    if bins < 1 or not ((values >= 0) & (values <= 1)).all():
        raise InvalidData(
            f"confidences span {values.min():.4g} to {values.max():.4g} for {bins} bins; allowed "
            "are 0 to 1 and at least 1 bin: scale them with `confidence`"
        )
    return np.minimum((values * bins).astype(np.int64), bins - 1)


def equal_count_bins(values: Floats, bins: int) -> NDArray[np.int64]:
    """(n,) the bin of each value, from 0 for the smallest; like values in order of their index.

    Raises:
        InvalidData: there are fewer values than bins, or no bin.

    Example:
        >>> equal_count_bins(np.array([0.3, 9.0, 0.1, 0.2]), 2).tolist()
        [1, 1, 0, 0]
    """
    n = len(values)
    if not 1 <= bins <= n:
        raise InvalidData(f"{bins} bins of {n} values; allowed are 1 to {n} bins")
    of = np.empty(n, np.int64)
    of[np.argsort(values, kind="stable")] = np.arange(n) * bins // n
    return of


def bin_means(
    values: Floats | NDArray[np.bool_], of: NDArray[np.int64], bins: int
) -> NDArray[np.float64]:
    """(bins,) the mean value of each bin; NaN where a bin is empty.

    Example:
        >>> bin_means(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 2]), 3)
        array([ 2., nan,  5.])
    """
    count = np.bincount(of, minlength=bins)
    total = np.bincount(of, weights=values, minlength=bins)
    mean = np.full(bins, np.nan)
    np.divide(total, count, out=mean, where=count > 0)
    return mean


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


PERCENTILES = 100


def kendall_over_bins(
    uncertainty: Floats, performance: NDArray[np.bool_] | Floats, bins: int = 20
) -> float:
    """Return how steadily the mean performance falls from the least to the most uncertain bin.

    Minus Kendall's tau-b of the number of the bin and the mean performance in it (Oh et al., ICLR
    2019).

    Args:
        uncertainty: (n,) larger is less certain.
        performance: (n,) larger is better, such as `knn_correct`.
        bins: number of bins of equal count, 2 to n.

    Returns:
        -1 to 1; 1 where each bin is worse than all before it, NaN where all are the same.

    Raises:
        InvalidData: shapes differ, a value is NaN, there are fewer values than bins, or one bin.

    Example:
        >>> uncertainty = np.array([0.1, 0.4, 0.2, 0.3])
        >>> round(kendall_over_bins(uncertainty, np.array([0.9, 0.2, 0.5, 0.7]), 4), 4)
        0.6667
    """
    check_columns(uncertainty=uncertainty, performance=performance)
    means = bin_means(performance, equal_count_bins(uncertainty, bins), bins)
    return _falling(means)


def kendall_of_pairs(
    uncertainty: Floats, score: Floats, match: NDArray[np.bool_], bins: int = 20
) -> float:
    """Return how steadily verification worsens from the least to the most uncertain bin of pairs.

    Minus Kendall's tau-b of the number of the bin and the average precision in it (Oh et al.,
    ICLR 2019).

    Args:
        uncertainty: (n,) of the pairs, the mean of its two items'.
        score: (n,) larger where a match is more likely.
        match: (n,) whether a pair matches.
        bins: number of bins of equal count, 2 to n.

    Returns:
        -1 to 1; NaN where all bins are the same.

    Raises:
        InvalidData: shapes differ, a value is NaN, a bin holds no matching pair, or there is one
            bin.

    Example:
        >>> score, match = np.array([0.9, 0.1, 0.3, 0.4]), np.array([True, False, True, False])
        >>> kendall_of_pairs(np.array([0.1, 0.2, 0.7, 0.8]), score, match, bins=2)
        1.0
    """
    check_columns(uncertainty=uncertainty, score=score, match=match)
    of = equal_count_bins(uncertainty, bins)
    empty = np.flatnonzero(np.bincount(of[match], minlength=bins) == 0)
    if len(empty):
        raise InvalidData(
            f"{len(empty)} of {bins} bins hold no matching pair: give more pairs or fewer bins"
        )
    precisions = [verification_ap(score[of == bin_], match[of == bin_]) for bin_ in range(bins)]
    return _falling(np.array(precisions))


def pearson(uncertainty: Floats, performance: Floats) -> float:
    """Pearson's correlation of uncertainty and performance, query by query.

    Negative where uncertainty is worth something (Taha et al., 2019, with average precisions).

    Args:
        uncertainty: (n,) larger is less certain, n >= 2.
        performance: (n,) larger is better.

    Returns:
        -1 to 1; NaN where one of the two is constant.

    Raises:
        InvalidData: shapes differ, there are fewer than two queries, or a value is NaN.

    Example:
        >>> round(pearson(np.array([1.0, 2.0, 3.0]), np.array([0.9, 0.8, 0.7])), 6)
        -1.0
    """
    check_columns(uncertainty=uncertainty, performance=performance)
    if len(uncertainty) < 2:
        raise InvalidData("a correlation needs at least two queries; there is one")
    if np.ptp(uncertainty) == 0 or np.ptp(performance) == 0:
        return float("nan")
    from scipy import stats  # slow to import

    return float(stats.pearsonr(uncertainty, performance).statistic)


def pearson_over_percentiles(uncertainty: Floats, performance: Floats) -> float:
    """Pearson's correlation of the mean uncertainty and mean performance of percentiles.

    The percentiles are those of performance: 100 groups of equal count (Taha et al., 2019, figure
    6). Averaging takes out the noise of single queries.

    Args:
        uncertainty: (n,) larger is less certain, n >= 100.
        performance: (n,) larger is better, such as average precision.

    Returns:
        -1 to 1; NaN where one of the two is constant.

    Raises:
        InvalidData: shapes differ, there are fewer than 100 queries, or a value is NaN.

    Example:
        >>> performance = np.linspace(0, 1, 300)
        >>> round(pearson_over_percentiles(2 - performance, performance), 6)
        -1.0
    """
    check_columns(uncertainty=uncertainty, performance=performance)
    of = equal_count_bins(performance, PERCENTILES)
    return pearson(bin_means(uncertainty, of, PERCENTILES), bin_means(performance, of, PERCENTILES))


def _falling(means: NDArray[np.float64]) -> float:
    """Minus tau-b of the bins' order and their means."""
    if len(means) < 2:
        raise InvalidData("a trend needs at least two bins; there is one")
    from scipy import stats  # slow to import

    return -float(stats.kendalltau(np.arange(len(means)), means).statistic)


PERCENTS = np.arange(99)


@dataclass(frozen=True)
class Sparsification:
    """The mean performance of the queries that are left, as ever more are left out.

    Attributes:
        fractions: (99,) of the queries left out, 0 to 0.98.
        curve: (99,) mean performance of the rest, the most uncertain left out first.
        oracle_curve: (99,) the same, the worst performing left out first.
        ausc: area under the curve, divided by the range of the fractions.
        oracle: that of the oracle's curve: no order has more.
        random: that of a random order, on average, which is the mean performance.
    """

    fractions: NDArray[np.float64]
    curve: NDArray[np.float64]
    oracle_curve: NDArray[np.float64]
    ausc: float
    oracle: float
    random: float


def sparsification(uncertainty: Floats, performance: NDArray[np.bool_] | Floats) -> Sparsification:
    """Sparsification curve and the area under it, AUSC.

    For r from 0 to 98 percent, the floor(n r / 100) most uncertain queries are left out. The area
    is by trapezoids, so that a model that is always right has 1 (Warburg et al., NeurIPS 2023;
    their own sum makes that 98/99).

    Args:
        uncertainty: (n,) larger is less certain; of the query, or its sum with that of its first
            candidate. Of like ones, the first is left out first.
        performance: (n,) larger is better, such as whether the top-1 is right or the average
            precision, queries without a match left out.

    Raises:
        InvalidData: shapes differ, there is no query, or a value is NaN.

    Example:
        >>> found = sparsification(np.array([0.1, 0.2, 0.3, 0.9]), np.array([1, 1, 1, 0.0]))
        >>> found.curve[[0, 24, 25]], found.random
        (array([0.75, 0.75, 1.  ]), 0.75)
        >>> found.ausc == found.oracle
        True
    """
    values = np.asarray(performance, np.float64)
    check_columns(uncertainty=uncertainty, performance=values)
    fractions = PERCENTS / 100
    curve = _means_of_rest(values[np.argsort(-uncertainty, kind="stable")])
    oracle_curve = _means_of_rest(np.sort(values))
    return Sparsification(
        fractions,
        curve,
        oracle_curve,
        float(np.trapezoid(curve, fractions) / fractions[-1]),
        float(np.trapezoid(oracle_curve, fractions) / fractions[-1]),
        float(values.mean()),
    )


def _means_of_rest(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """(99,) the means of what follows the first r percent."""
    n = len(ordered)
    dropped = n * PERCENTS // 100
    sums = np.cumsum(ordered[::-1])[::-1]
    return np.asarray(sums[dropped] / (n - dropped), np.float64)


@dataclass(frozen=True)
class OutOfDistribution:
    """Detection of out-of-distribution images, which are the positives, by uncertainty.

    Attributes:
        auroc: area under the ROC curve: how often one of them is more uncertain than an image
            in distribution, like values counted half.
        auprc: average precision, which is the area under the precision-recall curve by steps.
        auprc_trapezoid: the same area by trapezoids, which is too large but is what some papers
            report (Warburg et al., NeurIPS 2023).
    """

    auroc: float
    auprc: float
    auprc_trapezoid: float

    @classmethod
    @without_autologging()
    def of(cls, inside: Floats, outside: Floats) -> Self:
        """Measure the uncertainties of images in and out of distribution.

        Args:
            inside: (n,) of images in distribution, larger is less certain.
            outside: (m,) of images out of distribution.

        Raises:
            InvalidData: one of the two is empty, not one-dimensional, or holds NaN.

        Example:
            >>> found = OutOfDistribution.of(np.array([0.1, 0.2, 0.6]), np.array([0.5, 0.9]))
            >>> round(found.auroc, 4), round(found.auprc, 4)
            (0.8333, 0.8333)
        """
        check_columns(inside=inside)
        check_columns(outside=outside)
        from sklearn.metrics import (
            auc,
            average_precision_score,
            precision_recall_curve,
            roc_auc_score,
        )

        positive = np.arange(len(inside) + len(outside)) >= len(inside)
        score = np.concatenate([inside, outside])
        precision, recall, _ = precision_recall_curve(positive, score)
        return cls(
            float(roc_auc_score(positive, score)),
            float(average_precision_score(positive, score)),
            float(auc(recall, precision)),
        )


def sample_pairs(labels: NDArray[Any], n_pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Random pairs of items, half of them matching (Oh et al., ICLR 2019).

    Every matching pair is as likely as every other, and so is every other pair; drawn with
    replacement, and no item with itself.

    Args:
        labels: (n,) items match where these are equal.
        n_pairs: even, at least 2.
        rng: source of randomness.

    Returns:
        (n_pairs, 2) indices of items, the matching pairs first.

    Raises:
        InvalidData: n_pairs is odd or below 2, no label occurs twice, or there is only one label.

    Example:
        >>> labels = np.array([4, 4, 7])
        >>> pairs = sample_pairs(labels, 6, np.random.default_rng(0))
        >>> (labels[pairs[:, 0]] == labels[pairs[:, 1]]).tolist()
        [True, True, True, False, False, False]
    """
    if n_pairs < 2 or n_pairs % 2:
        raise InvalidData(f"n_pairs is {n_pairs}; half of the pairs match: give an even number")
    n, half = len(labels), n_pairs // 2
    _, of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if n < 2 or counts.max() < 2 or len(counts) < 2:
        raise InvalidData(
            f"{n} items have {len(counts)} labels, none more than {max(counts, default=0)} times; "
            "needed are two labels and one of them twice"
        )
    # Items in the order of their labels: those of one label are a run.
    order = np.argsort(of, kind="stable")
    size = np.repeat(counts, counts)
    start = np.repeat(np.cumsum(counts) - counts, counts)
    pairs = np.empty((n_pairs, 2), np.int64)

    first = rng.choice(n, half, p=(size - 1) / (size - 1).sum())
    other = start[first] + rng.integers(0, size[first] - 1)
    pairs[:half] = np.stack([first, other + (other >= first)], axis=1)

    first = rng.choice(n, half, p=(n - size) / (n - size).sum())
    other = rng.integers(0, n - size[first])
    pairs[half:] = np.stack(
        [first, other + np.where(other >= start[first], size[first], 0)], axis=1
    )
    return order[pairs]


@without_autologging()
def verification_ap(score: Floats, match: NDArray[np.bool_]) -> float:
    """Average precision of "these two match" (Oh et al., ICLR 2019).

    Args:
        score: (n,) of pairs, larger where a match is more likely.
        match: (n,) whether a pair matches.

    Returns:
        0 to 1; of a score that knows nothing, the fraction of matching pairs.

    Raises:
        InvalidData: shapes differ, a score is NaN, or no pair matches.

    Example:
        >>> round(verification_ap(np.array([0.9, 0.8, 0.4]), np.array([True, False, True])), 4)
        0.8333
    """
    check_columns(score=score, match=match)
    if not match.any():
        raise InvalidData(f"none of {len(match)} pairs matches; needed is at least one")
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(match, score))
