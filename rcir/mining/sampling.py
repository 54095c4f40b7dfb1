"""Samples in which tuples are mined, and batches of images that match."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rcir.data.relevance import Relevance, WithinRadius, asking
from rcir.errors import InvalidConfig, InvalidData

PAIRS_AT_ONCE = 1 << 22  # matching pairs held at a time, about
TRIES = 1 << 20  # images tried at a time


def sample_images(relevance: Relevance, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw some images of a large set, most of which have a match among them.

    Anchors are drawn at random, each with one of its matches at random, until there are enough: of
    5,000 images drawn singly from a million, hardly any would match another. An image that matches
    no other is never drawn.

    Args:
        relevance: of the n images. Where it says which are searched (`WithinRadius.database`), the
            others are anchors, and these their matches.
        size: number of images.
        rng: decides.

    Returns:
        (size,) different rows, ascending; fewer where fewer images match another. At most one of
        them has no match among them.

    Example:
        >>> from rcir.data.relevance import SameLabel
        >>> labels = SameLabel(np.array([7, 3, 7, 5, 3, 3]))
        >>> sample_images(labels, 5, np.random.default_rng(0)).tolist()
        [0, 1, 2, 4, 5]
    """
    chosen = np.zeros(len(relevance), np.bool_)
    order, used, n_chosen = rng.permutation(asking(relevance)), 0, 0
    while n_chosen < size and used < len(order):
        anchors = order[used : used + -(-(size - n_chosen) // 2)]
        used += len(anchors)
        anchors, matches = matching_pairs(relevance, anchors, rng)
        pairs = np.stack([anchors, matches], 1).reshape(-1)
        new, first = np.unique(pairs, return_index=True)
        first = np.sort(first[~chosen[new]])[: size - n_chosen]
        chosen[pairs[first]] = True
        n_chosen += len(first)
    return np.flatnonzero(chosen)


def matching_pairs(
    relevance: Relevance, anchors: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One match of each anchor, drawn at random.

    Args:
        relevance: of the n images. Where it says which are searched (`WithinRadius.database`), the
            matches are among these.
        anchors: (m,) rows.
        rng: decides.

    Returns:
        (k,) anchors, those that match another image, and (k,) the match of each, never itself.

    Example:
        >>> from rcir.data.relevance import SameLabel
        >>> labels = SameLabel(np.array([7, 3, 7, 5]))
        >>> matching_pairs(labels, np.array([0, 1, 2]), np.random.default_rng(0))
        (array([0, 2]), array([2, 0]))
    """
    if isinstance(relevance, WithinRadius) and relevance.database is not None:
        return _searched_matches(relevance, anchors, rng)
    totals = relevance.subset(anchors).totals(relevance)
    anchors, totals = anchors[totals > 1], totals[totals > 1]
    return anchors, _matches(relevance, anchors, totals, rng)


def _searched_matches(
    relevance: WithinRadius, anchors: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The anchors that have positives among the images that are searched, and one of each."""
    indptr, columns = relevance.pairs(anchors)
    of = np.repeat(np.arange(len(anchors)), np.diff(indptr))
    good = relevance.positives(anchors[of], columns)
    columns, counts = columns[good], np.bincount(of[good], minlength=len(anchors))
    has = counts > 0
    first = np.cumsum(counts) - counts
    return anchors[has], columns[first[has] + rng.integers(0, counts[has])]


def _matches(
    relevance: Relevance,
    anchors: NDArray[np.int64],
    totals: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """(m,) a match of each anchor, not itself, each as likely as any other.

    Few matches are listed. Where there are more than the root of n, as many tries find one.
    """
    n = len(relevance)
    matches = np.empty_like(anchors)
    few = totals <= n**0.5
    listed = np.flatnonzero(few)
    block = np.cumsum(totals[listed]) // PAIRS_AT_ONCE
    for run in np.split(listed, np.flatnonzero(np.diff(block)) + 1):
        indptr, columns = relevance.pairs(anchors[run])
        others = columns[columns != np.repeat(anchors[run], np.diff(indptr))]
        first = indptr[:-1] - np.arange(len(run))  # itself was one of each
        matches[run] = others[first + rng.integers(0, totals[run] - 1)]
    rest = np.flatnonzero(~few)
    while len(rest):
        some = rest[: max(1, TRIES // int(n**0.5 + 1))]
        tries = rng.integers(0, n, (len(some), int(n**0.5) + 1))
        hit = relevance.subset(anchors[some]).of(relevance, tries)
        hit &= tries != anchors[some, None]
        matches[some] = tries[np.arange(len(some)), hit.argmax(1)]
        rest = np.concatenate([some[~hit.any(1)], rest[len(some) :]])
    return matches


def label_batches(
    labels: NDArray[np.int64], batch: int, samples_per_class: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Batches of a few images of each of several labels.

    Hermans et al., 2017. The labels of a batch are different, and drawn by how many images they
    have left. An epoch ends when too few labels have any: every image is in it at most once, but
    those of a label with fewer than `samples_per_class` images are repeated, as evenly as can be.
    Of the images of a larger label, some are left over where `samples_per_class` does not divide
    their number.

    Args:
        labels: (n,).
        batch: number of images of a batch, a multiple of `samples_per_class`.
        samples_per_class: number of images of a label in a batch.
        rng: decides.

    Returns:
        (steps, batch) rows; those of one label are next to each other.

    Raises:
        InvalidConfig: `batch` is not a multiple, at least twofold, of `samples_per_class`.
        InvalidData: there are fewer labels than a batch needs.

    Example:
        >>> labels = np.array([7, 3, 7, 3, 7, 3, 7, 3])
        >>> rows = label_batches(labels, 4, 2, np.random.default_rng(0))
        >>> rows.shape, np.sort(labels[rows]).tolist()
        ((2, 4), [[3, 3, 7, 7], [3, 3, 7, 7]])
    """
    if samples_per_class < 1 or batch % samples_per_class or batch < 2 * samples_per_class:
        raise InvalidConfig(
            f"batch is {batch} and mining.samples_per_class {samples_per_class}: give a batch "
            "that is a multiple of it, of two labels or more"
        )
    many = batch // samples_per_class
    names, counts = np.unique(labels, return_counts=True)
    if len(names) < many:
        raise InvalidData(
            f"there are images of {len(names)} labels, but a batch of {batch} with "
            f"mining.samples_per_class {samples_per_class} needs {many}: lower batch, or raise "
            "mining.samples_per_class"
        )
    shuffled = np.lexsort((rng.random(len(labels)), labels))
    first = np.cumsum(counts) - counts
    groups_left = np.maximum(1, counts // samples_per_class)  # groups of images, each for one batch
    used = np.zeros_like(groups_left)
    steps = []
    while len(open_ := np.flatnonzero(groups_left)) >= many:
        # The shortest exponential waiting times: without replacement, in proportion to `groups`.
        waiting = rng.exponential(size=len(open_)) / groups_left[open_]
        now = open_[np.argpartition(waiting, many - 1)[:many]]
        members = (used[now, None] * samples_per_class + np.arange(samples_per_class)) % counts[
            now, None
        ]
        steps.append(shuffled[first[now, None] + members].reshape(-1))
        groups_left[now] -= 1
        used[now] += 1
    return np.stack(steps)


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
        >>> from rcir.data.relevance import SameLabel
        >>> labels = SameLabel(np.array([7, 3, 7, 3, 5]))
        >>> rows, pairs = next(genuine_batches(labels, 4, 2, np.random.default_rng(0)))
        >>> rows.shape, pairs.tolist()
        ((4,), [[0, 2], [1, 3]])
    """
    if (single := relevance.single) is not None:
        _, number, counts = np.unique(single, return_inverse=True, return_counts=True)
        several = np.flatnonzero(counts[number] > 1)
        labels = single[several]
        if (n_labels := np.count_nonzero(counts > 1)) > 1:
            size = min(batch, int(n_labels) * samples_per_class)
            first = np.arange(0, size, samples_per_class)[:, None]
            of_label = np.triu_indices(samples_per_class, 1)
            pairs = np.stack([(first + each).ravel() for each in of_label])
            while True:  # all pairs of each label in batches of some labels
                for rows in several[label_batches(labels, size, samples_per_class, rng)]:
                    # No image is paired with itself.
                    yield rows, pairs[:, rows[pairs[0]] != rows[pairs[1]]]
    while True:
        anchors, matches = matching_pairs(relevance, rng.permutation(asking(relevance)), rng)
        if not len(anchors):
            raise InvalidData("no training image matches another one: variances need some that do")
        for start in range(0, len(anchors), batch // 2):
            part = slice(start, start + batch // 2)
            rows = np.concatenate([anchors[part], matches[part]])
            yield rows, np.arange(len(rows)).reshape(2, -1)
