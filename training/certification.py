"""What set sizes a calibration on the validation images would certify."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rcir.data import ImageSet
from rcir.data.relevance import SameLabel
from rcir.index import FlatIndex
from rcir.metrics import first_match_ranks
from rcir.risk import Certified, Rankings, fit_adapter

PARTS = 4
DEPTH = 200


@dataclass(frozen=True)
class Rehearsal:
    """Rows of the validation images by role.

    Attributes:
        searched: the gallery.
        adapter, calibration, measured: queries that have a match in it.
    """

    searched: NDArray[np.int64]
    adapter: NDArray[np.int64]
    calibration: NDArray[np.int64]
    measured: NDArray[np.int64]


def rehearsals(images: ImageSet) -> list[Rehearsal]:
    """Gallery, adapter split, calibration and test, rehearsed on the validation images alone.

    The images are divided in four at random, alike for every encoder, of each label as many to
    every quarter as can be. One quarter is searched, one fits the size adapter, one calibrates and
    one is measured; then roles rotate, so that each image is measured at most once, by a
    calibration that it had no part in. An image is no query of a quarter in which nothing matches
    it: that is so for every encoder.

    Returns:
        The four, or none if there are too few images for all roles.
    """
    quarters = _quarters(images)
    found = []
    for turn in range(PARTS):
        searched, *asked = (quarters[(turn + role) % PARTS] for role in range(PARTS))
        if not len(searched):
            return []
        gallery = images.relevance.subset(searched)
        rows = [row[images.relevance.subset(row).totals(gallery) > 0] for row in asked if len(row)]
        if len(rows) < PARTS - 1 or min(map(len, rows)) < 2:  # as many as an adapter is fitted on
            return []
        found.append(Rehearsal(searched, *rows))
    return found


def certify(
    vectors: NDArray[np.float32], uncertainty: NDArray[np.float64] | None, images: ImageSet
) -> list[Certified]:
    """What each of the `rehearsals` certifies.

    Args:
        vectors: (n, d) embeddings.
        uncertainty: (n,) of an encoder that states its own, or None.
        images: the n images.
    """
    return [_certify(vectors, uncertainty, images, roles) for roles in rehearsals(images)]


def _quarters(images: ImageSet) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    order = rng.permutation(len(images))
    if not isinstance(images.relevance, SameLabel):
        return np.array_split(order, PARTS)
    # The images of a label, in random order, are dealt to the quarters in an order of its own.
    order = order[np.argsort(images.relevance.labels[order], kind="stable")]
    _, first, label = np.unique(
        images.relevance.labels[order], return_index=True, return_inverse=True
    )
    dealt = rng.permuted(np.tile(np.arange(PARTS), (len(first), 1)), axis=1)
    quarter = dealt[label, (np.arange(len(order)) - first[label]) % PARTS]
    return [order[quarter == number] for number in range(PARTS)]


def _certify(
    vectors: NDArray[np.float32],
    uncertainty: NDArray[np.float64] | None,
    images: ImageSet,
    roles: Rehearsal,
) -> Certified:
    index = FlatIndex(vectors.shape[1])
    index.add(vectors[roles.searched])
    gallery = images.relevance.subset(roles.searched)

    def searched(rows: NDArray[np.int64]) -> tuple[Rankings, NDArray[np.float64]]:
        """The rankings of some queries, and the ranks of their first matches."""
        distances, positions = index.search(vectors[rows], min(DEPTH, len(index)))
        labels = gallery.labels if isinstance(gallery, SameLabel) else None
        # Unit vectors: 1 - cos = |x - y|^2 / 2.
        own = distances[:, 0].astype(np.float64) ** 2 / 2
        rankings = Rankings(
            own if uncertainty is None else uncertainty[rows],
            positions.shape[1],
            distances,
            None if labels is None else labels[positions],
            None if uncertainty is None else uncertainty[roles.searched][positions],
        )
        return rankings, first_match_ranks(images.relevance.subset(rows).of(gallery, positions))

    adapter, _ = fit_adapter("auto", *searched(roles.adapter))
    return Certified(
        adapter.scores(*searched(roles.calibration)),
        adapter.costs(searched(roles.measured)[0]),
    )
