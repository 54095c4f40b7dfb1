"""Certified set sizes by cross-validated calibration on the validation images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rcir.data import ImageSet
from rcir.data.relevance import SameLabel
from rcir.data.votes import count_matches
from rcir.data.within_radius import database_of
from rcir.index import DEPTH, build_index, lengths, one_minus_cosine
from rcir.metrics import first_match_ranks
from rcir.metrics.labels import VOTERS
from rcir.risk import Certified, SearchResults, fit_score_function

N_FOLDS = 4


@dataclass(frozen=True)
class FoldRoles:
    """Rows of the validation images by role.

    Attributes:
        searched: the gallery.
        tuning, calibration, measured: queries that have a match in it.
    """

    searched: NDArray[np.int64]
    tuning: NDArray[np.int64]
    calibration: NDArray[np.int64]
    measured: NDArray[np.int64]


def fold_roles(images: ImageSet) -> list[FoldRoles]:
    """Gallery, tuning split, calibration and test, by cross-validation on the validation images
    alone.

    The images are divided into four folds at random, alike for every encoder, of each label as many
    to every fold as can be. One fold is searched, one fits the score function, one calibrates and
    one is measured; then roles rotate, so that each image is measured at most once, by a
    calibration that it had no part in. An image is no query of a fold in which nothing matches
    it: that is so for every encoder. Where it is known which images are searched
    (`WithinRadius.database`), these are, and the others are divided into three folds.

    Returns:
        The four or three, or none if there are too few images for all roles.
    """
    database = database_of(images.relevance)
    folds = _folds(images) if database is None else _asking_folds(database)
    found = []
    for turn in range(len(folds)):
        searched, *asked = folds[turn:] + folds[:turn]
        if database is not None:
            searched, asked = np.flatnonzero(database), [searched, *asked]
        if not len(searched):
            return []
        gallery = images.relevance.subset(searched)
        rows = [row[images.relevance.subset(row).totals(gallery) > 0] for row in asked if len(row)]
        if (
            len(rows) < N_FOLDS - 1 or min(map(len, rows)) < 2
        ):  # as many as a score function is fitted on
            return []
        found.append(FoldRoles(searched, *rows))
    return found


def certify_folds(
    vectors: NDArray[np.float32], uncertainty: NDArray[np.float64] | None, images: ImageSet
) -> list[Certified]:
    """Calibrate in each of the `fold_roles`.

    Args:
        vectors: (n, d) embeddings.
        uncertainty: (n,) of an encoder that states its own, or None.
        images: the n images.
    """
    return [_certify(vectors, uncertainty, images, roles) for roles in fold_roles(images)]


def _asking_folds(database: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Those that ask, in three folds."""
    order = np.random.default_rng(0).permutation(np.flatnonzero(~database))
    return np.array_split(order, N_FOLDS - 1)


def _folds(images: ImageSet) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    order = rng.permutation(len(images))
    if not isinstance(images.relevance, SameLabel):
        return np.array_split(order, N_FOLDS)
    # The images of a label, in random order, are dealt to the folds in an order of its own.
    order = order[np.argsort(images.relevance.labels[order], kind="stable")]
    _, first, label = np.unique(
        images.relevance.labels[order], return_index=True, return_inverse=True
    )
    dealt = rng.permuted(np.tile(np.arange(N_FOLDS), (len(first), 1)), axis=1)
    fold = dealt[label, (np.arange(len(order)) - first[label]) % N_FOLDS]
    return [order[fold == number] for number in range(N_FOLDS)]


def _certify(
    vectors: NDArray[np.float32],
    uncertainty: NDArray[np.float64] | None,
    images: ImageSet,
    roles: FoldRoles,
) -> Certified:
    index, norms = build_index(vectors[roles.searched]), lengths(vectors)
    gallery = images.relevance.subset(roles.searched)

    def searched(rows: NDArray[np.int64]) -> tuple[SearchResults, NDArray[np.float64]]:
        """The search results of some queries, and the ranks of their first matches."""
        distances, positions = index.search(vectors[rows], min(DEPTH, len(index)))
        labels = gallery.labels if isinstance(gallery, SameLabel) else None
        nearest = norms[roles.searched][positions[:, 0]]
        own = one_minus_cosine(distances[:, 0], norms[rows], nearest)
        results = SearchResults(
            own if uncertainty is None else uncertainty[rows],
            positions.shape[1],
            distances,
            None if labels is None else labels[positions],
            None if uncertainty is None else uncertainty[roles.searched][positions],
            count_matches(gallery, positions, VOTERS) if labels is None else None,
        )
        return results, first_match_ranks(images.relevance.subset(rows).of(gallery, positions))

    score_function, _ = fit_score_function("auto", *searched(roles.tuning))
    return Certified(
        score_function.match_scores(*searched(roles.calibration)),
        score_function.rank(searched(roles.measured)[0]).scores,
    )
