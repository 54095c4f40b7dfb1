"""Batches of images of which it is known which match: for losses of genuine pairs alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rcir.data.relevance import SameLabel
from rcir.data.relevance_protocol import Relevance
from rcir.data.within_radius import asking
from rcir.errors import InvalidData
from rcir.mining.sampling import label_batches, matching_pairs


def genuine_batches(
    relevance: Relevance, batch: int, samples_per_class: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Batches of images of which it is known which match, without end.

    Args:
        relevance: of the n images.
        batch: number of images of a batch, or fewer where there are fewer labels.
        samples_per_class: images of a label, see `rcir.mining.label_batches`. Where images have not
            one label each, pairs of images that match are drawn in their place.
        rng: decides.

    Returns:
        (m,) rows of the n images, and (2, p) places in these: pairs of different images that match.

    Raises:
        InvalidData: no image matches another one.

    Example:
        >>> labels = SameLabel(np.array([7, 3, 7, 3, 5]))
        >>> rows, pairs = next(genuine_batches(labels, 4, 2, np.random.default_rng(0)))
        >>> rows.shape, pairs.tolist()
        ((4,), [[0, 2], [1, 3]])
    """
    if isinstance(relevance, SameLabel):
        _, number, counts = np.unique(relevance.labels, return_inverse=True, return_counts=True)
        several = np.flatnonzero(counts[number] > 1)
        labels = relevance.labels[several]
        if (found := np.count_nonzero(counts > 1)) > 1:
            yield from _label_pairs(
                several, labels, min(batch, int(found) * samples_per_class), samples_per_class, rng
            )
    while True:
        anchors, matches = matching_pairs(relevance, rng.permutation(asking(relevance)), rng)
        if not len(anchors):
            raise InvalidData("no training image matches another one: variances need some that do")
        for start in range(0, len(anchors), batch // 2):
            part = slice(start, start + batch // 2)
            rows = np.concatenate([anchors[part], matches[part]])
            yield rows, np.arange(len(rows)).reshape(2, -1)


def _label_pairs(
    rows: NDArray[np.int64],
    labels: NDArray[np.int64],
    batch: int,
    samples_per_class: int,
    rng: np.random.Generator,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """All pairs of each label in batches of some labels; an image makes no pair with itself."""
    first = np.arange(0, batch, samples_per_class)[:, None]
    pairs = np.stack([(first + each).ravel() for each in np.triu_indices(samples_per_class, 1)])
    while True:
        for some in rows[label_batches(labels, batch, samples_per_class, rng)]:
            different = some[pairs[0]] != some[pairs[1]]
            yield some, pairs[:, different]
