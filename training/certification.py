"""What set sizes a calibration on the validation images would certify."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rcir.data import ImageSet
from rcir.data.relevance import SameLabel
from rcir.index import FlatIndex
from rcir.metrics import first_match_ranks
from rcir.risk import Certified, Rankings, fit_adapter

PARTS = 4
FEWEST = 2 * PARTS  # an adapter is fitted on two queries at least
DEPTH = 200


def certify(
    vectors: NDArray[np.float32], uncertainty: NDArray[np.float64] | None, images: ImageSet
) -> list[Certified]:
    """A rehearsal of gallery, adapter split, calibration and test, on the validation images alone.

    The images are divided in four at random, alike for every encoder. One quarter is searched, one
    fits the size adapter, one calibrates and one is measured; then roles rotate, so that each image
    is measured once, by a calibration that it had no part in. What is calibrated and tested after
    training plays no role.

    Args:
        vectors: (n, d) embeddings.
        uncertainty: (n,) of an encoder that states its own, or None.
        images: the n images.

    Returns:
        The four rehearsals; none with fewer than 8 images.
    """
    if len(images) < FEWEST:
        return []
    quarters = _quarters(len(images))
    return [
        _rehearse(vectors, uncertainty, images, [quarters[(i + role) % PARTS] for role in range(4)])
        for i in range(PARTS)
    ]


def _quarters(n: int) -> list[NDArray[np.int64]]:
    return np.array_split(np.random.default_rng(0).permutation(n), PARTS)


def _rehearse(
    vectors: NDArray[np.float32],
    uncertainty: NDArray[np.float64] | None,
    images: ImageSet,
    roles: list[NDArray[np.int64]],
) -> Certified:
    searched, *asked = roles
    index = FlatIndex(vectors.shape[1])
    index.add(vectors[searched])
    queries, gallery = np.concatenate(asked), images.relevance.subset(searched)
    distances, positions = index.search(vectors[queries], min(DEPTH, len(searched)))
    labels = gallery.labels if isinstance(gallery, SameLabel) else None
    rankings = Rankings(
        # Unit vectors: 1 - cos = |x - y|^2 / 2.
        distances[:, 0].astype(np.float64) ** 2 / 2
        if uncertainty is None
        else uncertainty[queries],
        positions.shape[1],
        distances,
        None if labels is None else labels[positions],
        None if uncertainty is None else uncertainty[searched][positions],
    )
    ranks = first_match_ranks(images.relevance.subset(queries).of(gallery, positions))
    adapter_split, calibration, measured = np.split(
        np.arange(len(queries)), np.cumsum([len(rows) for rows in asked[:-1]])
    )
    adapter, _ = fit_adapter("auto", rankings[adapter_split], ranks[adapter_split])
    return Certified(
        adapter.scores(rankings[calibration], ranks[calibration]),
        adapter.costs(rankings[measured]),
    )
