"""Verification of pairs: which pairs to compare, and how well a score separates matches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.checks import Floats, check_columns


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
