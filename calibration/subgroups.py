"""The risk of parts of the queries, of which one guarantee for all says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data import ImageSet
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults, risk_interval, score

DECILES = 10
SHOWN_CLASSES = 10  # classes, those that are missed most


@dataclass(frozen=True)
class Part:
    """Test queries of one kind.

    Attributes:
        kind: "uncertainty", "class" or "group".
        name: of the decile (1 is the most certain), class or group.
        n: number of queries.
        missed: how many got a set without a true match.
        low, high: exact 95% interval of their miss rate (Clopper-Pearson); None of queries that
            come in clusters, which are not independent.
        mean_size: of their sets.
    """

    kind: str
    name: str
    n: int
    missed: int
    low: float | None
    high: float | None
    mean_size: float

    @property
    def risk(self) -> float:
        """The share that was missed."""
        return self.missed / self.n


def subgroups(
    retriever: Retriever, test: LabelledResults, images: ImageSet, threshold: float
) -> list[Part]:
    """Misses by decile of uncertainty, by class (of many those missed most) and by group.

    Args:
        retriever: that searched the queries.
        test, images: the test queries.
        threshold: of the guarantee for misses that they are answered with.
    """
    scored = score(retriever.require_calibration().main.score_function, test)
    sizes = scored.sizes(threshold)
    missed = scored.require("match_rank") > sizes
    independent = test.clusters is None
    order = np.argsort(test.results.uncertainty, kind="stable")
    decile = np.empty(len(order), np.int64)
    decile[order] = np.arange(len(order)) * min(DECILES, len(order)) // len(order) + 1
    parts = _parts("uncertainty", decile, missed, sizes, independent)
    classes = images.attributes.get("class", images.labels)
    if classes is not None:
        found = _parts("class", np.asarray(classes), missed, sizes, independent)
        parts += sorted(found, key=lambda part: (-part.risk, -part.n))[:SHOWN_CLASSES]
    if test.groups is not None:
        parts += _parts("group", test.groups, missed, sizes, independent)
    return parts


def _parts(
    kind: str,
    names: NDArray[Any],
    missed: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    independent: bool,
) -> list[Part]:
    known, which = np.unique(names, return_inverse=True)
    n = np.bincount(which)
    misses = np.bincount(which, weights=missed).astype(np.int64)
    means = np.bincount(which, weights=sizes) / n
    parts = []
    for name, count, lost, size in zip(known.tolist(), n, misses, means, strict=True):
        low, high = risk_interval(int(lost), int(count)) if independent else (None, None)
        parts.append(Part(kind, str(name), int(count), int(lost), low, high, float(size)))
    return parts
