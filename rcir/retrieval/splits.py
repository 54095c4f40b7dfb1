"""The labelled queries that tune and those that calibrate: divided, and all of them different."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.clusters import draw_by_cluster
from rcir.data.repeats import require_no_repeats, warn_of_bursts, warn_of_copies, warn_of_twins
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import build_index
from rcir.retrieval.queries import Queries
from rcir.retrieval.search import Searcher
from rcir.risk import LabelledResults

TUNING = 0.3  # of labelled queries that are divided here


def divide_queries(queries: Queries, seed: int, tuning: float = TUNING) -> tuple[Queries, Queries]:
    """A tuning split and the calibration queries, drawn at random, by clusters if there are any.

    Raises:
        InvalidData: one of them would be empty.
        InvalidConfig: of the seed.
    """
    if not isinstance(seed, Integral) or seed < 0:
        raise InvalidConfig(f"seed is {seed!r}; it must be a whole number, at least 0")
    rng = np.random.default_rng(seed)
    if queries.clusters is None:
        first = max(1, round(tuning * len(queries)))
        if first >= len(queries):
            raise InvalidData(
                f"{len(queries)} queries: some must tune and others calibrate; give more"
            )
        rows = np.split(rng.permutation(len(queries)), [first])
    else:
        rows = draw_by_cluster(rng, queries.clusters, {"tuning": tuning})
    return queries[rows[0]], queries[rows[1]]


def check_clusters(tuning: LabelledResults, calibration: LabelledResults) -> None:
    """Raise `InvalidData` unless both are of the same kind of clusters, and of different ones."""
    if tuning.cluster != calibration.cluster:
        raise InvalidData(
            f"the tuning split is of clusters {tuning.cluster!r}, the calibration queries of "
            f"{calibration.cluster!r}: search both with the same"
        )
    if tuning.clusters is None or calibration.clusters is None:
        return
    shared = np.intersect1d(tuning.clusters, calibration.clusters)
    if len(shared):
        names = ", ".join(map(str, shared[:3].tolist()))
        raise InvalidData(
            f"{len(shared)} clusters ({calibration.cluster} {names}) are in the tuning split and "
            "among the calibration queries: divide the queries by clusters"
        )


def check_repeats(
    searcher: Searcher,
    tuning: LabelledResults,
    calibration: LabelledResults,
    recurring: bool,
    again: bool,
) -> None:
    """Raise `InvalidData` for pictures that stand twice, and warn of those that look like it.

    Args:
        searcher: what searched both.
        tuning, calibration: the two splits.
        recurring: see `Retriever.calibrate`.
        again: whether the queries were compared with each other before.
    """
    tuned, calibrated = (digests_of(part) for part in (tuning, calibration))
    if searcher.options.leave_one_out:
        require_no_repeats(None, tuned, calibrated, recurring)
        return
    require_no_repeats(searcher.digests, tuned, calibrated, recurring)
    known = searcher.digests is not None
    distances = vector_distances(searcher, calibration)
    warn_of_copies("queries of the tuning split", vector_distances(searcher, tuning), known)
    warn_of_copies("calibration queries", distances, known)
    if not recurring and not again:
        nearest = _nearest_other(tuning, calibration)
        warn_of_twins("calibration queries", nearest, distances)
        if calibration.cluster is None:
            others = len(tuning) + len(calibration) - 1
            warn_of_bursts(nearest, distances, others, len(searcher.gallery))


def vector_distances(searcher: Searcher, results: LabelledResults) -> NDArray[np.floating[Any]]:
    """Distances of queries to the gallery items whose vectors are nearest, ascending; 2 or more.

    Distances that an encoder re-ranks by are not comparable with those among queries.
    """
    found: NDArray[np.floating[Any]] = results.known("distances")
    if searcher.items is not None:
        found = searcher.nearest(results.known("vectors"), min(2, searcher.depth))[0]
    return found


def digests_of(results: LabelledResults) -> NDArray[np.bytes_]:
    """(n,) of the queries of search results."""
    found: NDArray[np.bytes_] = results.known("queries").identities
    return found


def _nearest_other(tuning: LabelledResults, calibration: LabelledResults) -> NDArray[np.float32]:
    """(n,) distance of each calibration query to the nearest other query of the two splits."""
    vectors = calibration.known("vectors")
    index = build_index(np.concatenate([vectors, tuning.known("vectors")]))
    distances, positions = index.search(vectors, 2)
    itself = positions[:, 0] == np.arange(len(vectors))
    return np.where(itself, distances[:, 1], distances[:, 0])
