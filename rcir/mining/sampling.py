"""Samples for mining, and batches of images that match."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rcir.data.relevance import Relevance, WithinRadius, find_query_rows
from rcir.errors import InvalidConfig, InvalidData

BLOCK_PAIRS = 1 << 22  # matching pairs in memory at a time, about
BLOCK_TRIES = 1 << 20  # images tried at a time


def sample_images(relevance: Relevance, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw images of a large set, with matches among them.

    Anchors are drawn at random, each with one of its matches: of 5,000 images drawn singly from a
    million, hardly any would match another. An image without a match is never drawn.

    Args:
        relevance: of the n images. If it has a separate database (`WithinRadius.database`), anchors
            are the other images, and matches those of the database.
        size: number of images.
        rng: generator.

    Returns:
        (size,) different rows, ascending; fewer if fewer images have a match. At most one of them
        has no match among them.
    """
    chosen = np.zeros(len(relevance), np.bool_)
    order, used, n_chosen = rng.permutation(find_query_rows(relevance)), 0, 0
    while n_chosen < size and used < len(order):
        anchors = order[used : used + -(-(size - n_chosen) // 2)]
        used += len(anchors)
        anchors, matches = _draw_pairs(relevance, anchors, rng)
        pairs = np.stack([anchors, matches], 1).reshape(-1)
        new, first = np.unique(pairs, return_index=True)
        first = np.sort(first[~chosen[new]])[: size - n_chosen]
        chosen[pairs[first]] = True
        n_chosen += len(first)
    return np.flatnonzero(chosen)


def _draw_pairs(
    relevance: Relevance, anchors: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw one match of each anchor, not itself; return anchors (k,) with a match, and these."""
    if isinstance(relevance, WithinRadius) and relevance.database is not None:
        indptr, columns = relevance.pairs(anchors)
        places = np.repeat(np.arange(len(anchors)), np.diff(indptr))
        positive = relevance.positives(anchors[places], columns)
        counts = np.bincount(places[positive], minlength=len(anchors))
        has, first = counts > 0, np.cumsum(counts) - counts
        chosen = first[has] + rng.integers(0, counts[has])
        return anchors[has], columns[positive][chosen]
    totals = relevance.subset(anchors).totals(relevance)
    anchors, totals = anchors[totals > 1], totals[totals > 1]
    return anchors, _draw_matches(relevance, anchors, totals, rng)


def _draw_matches(
    relevance: Relevance,
    anchors: NDArray[np.int64],
    totals: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Draw one match (m,) of each anchor, not itself.

    Few matches are listed. If there are more than the root of n, that many tries usually find one.
    """
    n = len(relevance)
    matches = np.empty_like(anchors)
    few = totals <= n**0.5
    listed = np.flatnonzero(few)
    block = np.cumsum(totals[listed]) // BLOCK_PAIRS
    for run in np.split(listed, np.flatnonzero(np.diff(block)) + 1):
        indptr, columns = relevance.pairs(anchors[run])
        others = columns[columns != np.repeat(anchors[run], np.diff(indptr))]
        first = indptr[:-1] - np.arange(len(run))  # each anchor was listed itself
        matches[run] = others[first + rng.integers(0, totals[run] - 1)]
    rest = np.flatnonzero(~few)
    while len(rest):
        part = rest[: max(1, BLOCK_TRIES // int(n**0.5 + 1))]
        tries = rng.integers(0, n, (len(part), int(n**0.5) + 1))
        hit = relevance.subset(anchors[part]).matches(relevance, tries)
        hit &= tries != anchors[part, None]
        matches[part] = tries[np.arange(len(part)), hit.argmax(1)]
        rest = np.concatenate([part[~hit.any(1)], rest[len(part) :]])
    return matches


def label_batches(
    labels: NDArray[np.int64], batch: int, samples_per_class: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw batches of a few images of each of several labels (Hermans et al., 2017).

    The labels of a batch are different, and drawn in proportion to their images left. The epoch
    ends when too few labels have images left. It contains every image at most once, except that
    images of a label with fewer than `samples_per_class` images are repeated evenly. Images of a
    larger label are left over if `samples_per_class` does not divide their number.

    Args:
        labels: (n,).
        batch: number of images of a batch, a multiple of `samples_per_class`, at least twice that.
        samples_per_class: number of images of a label in a batch.
        rng: generator.

    Returns:
        (steps, batch) rows; those of one label are next to each other.

    Raises:
        InvalidConfig: `batch` is not such a multiple.
        InvalidData: there are fewer labels than a batch needs.
    """
    if samples_per_class < 1 or batch % samples_per_class or batch < 2 * samples_per_class:
        raise InvalidConfig(
            f"batch is {batch}; it must be a multiple of mining.samples_per_class, "
            f"{samples_per_class}, at least twice that"
        )
    many = batch // samples_per_class
    names, counts = np.unique(labels, return_counts=True)
    if len(names) < many:
        raise InvalidData(
            f"there are images of {len(names)} labels, but a batch of {batch} needs {many}: lower "
            "batch, or raise mining.samples_per_class"
        )
    shuffled = np.lexsort((rng.random(len(labels)), labels))
    first = np.cumsum(counts) - counts
    groups_left = np.maximum(1, counts // samples_per_class)  # groups of images, each for one batch
    used = np.zeros_like(groups_left)
    steps = []
    while len(open_ := np.flatnonzero(groups_left)) >= many:
        # Exponential waiting times draw without replacement in proportion to `groups_left`.
        waiting = rng.exponential(size=len(open_)) / groups_left[open_]
        now = open_[np.argpartition(waiting, many - 1)[:many]]
        members = used[now, None] * samples_per_class + np.arange(samples_per_class)
        members %= counts[now, None]
        steps.append(shuffled[first[now, None] + members].reshape(-1))
        groups_left[now] -= 1
        used[now] += 1
    return np.stack(steps)


def genuine_batches(
    relevance: Relevance, batch: int, samples_per_class: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield batches of matching images without end.

    Args:
        relevance: of the n images.
        batch: number of images of a batch, or fewer if there are fewer labels.
        samples_per_class: images of a label, see `label_batches`. If images do not have one label
            each, matching pairs are drawn instead.
        rng: generator.

    Yields:
        (m,) rows of the n images, and (2, p) places in these: pairs of different images that match.

    Raises:
        InvalidData: no image matches another one.
    """
    if (single := relevance.single) is not None:
        _, number, counts = np.unique(single, return_inverse=True, return_counts=True)
        several = np.flatnonzero(counts[number] > 1)
        labels = single[several]
        if (n_labels := np.count_nonzero(counts > 1)) > 1:
            size = min(batch, int(n_labels) * samples_per_class)
            first = np.arange(0, size, samples_per_class)[:, None]
            in_label = np.triu_indices(samples_per_class, 1)
            pairs = np.stack([(first + places).ravel() for places in in_label])
            while True:
                for rows in several[label_batches(labels, size, samples_per_class, rng)]:
                    # No image is paired with itself.
                    yield rows, pairs[:, rows[pairs[0]] != rows[pairs[1]]]
    while True:
        anchors, matches = _draw_pairs(relevance, rng.permutation(find_query_rows(relevance)), rng)
        if not len(anchors):
            raise InvalidData("no training image matches another one, which variances need")
        for start in range(0, len(anchors), batch // 2):
            part = slice(start, start + batch // 2)
            rows = np.concatenate([anchors[part], matches[part]])
            yield rows, np.arange(len(rows)).reshape(2, -1)
