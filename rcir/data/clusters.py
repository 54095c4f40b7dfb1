"""Clusters of images, such as all that one person drew or that one panorama was cut into.

Images of one cluster resemble each other. Where queries to come will be of new clusters, those that
calibrate and those that test must be of different clusters too, so whole clusters are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet, Splits
from rcir.data.relevance import SameLabel
from rcir.data.relevance_protocol import Relevance
from rcir.errors import InvalidConfig, InvalidData

QueryDivision = Literal["shared-labels", "new-labels"]


def clusters_of(images: ImageSet, cluster: str) -> NDArray[Any]:
    """The cluster of every image, (n,): the values of an attribute.

    Raises:
        InvalidConfig: the images have no such attribute.
    """
    if cluster not in images.attributes:
        raise InvalidConfig(
            f"cluster is {cluster!r}, but the queries have no such attribute; they have "
            f"{', '.join(images.attributes) or 'none'}"
        )
    return images.attributes[cluster]


def draw_by_cluster(
    rng: np.random.Generator,
    clusters: NDArray[Any],
    parts: Mapping[str, float],
    unit: str = "clusters",
) -> list[NDArray[np.int64]]:
    """Rows of each part, then those that remain, in random order; no cluster is in two parts.

    How many clusters a part gets is settled before any is drawn. Adding clusters until they hold
    enough images would prefer large clusters (the inspection paradox), and the clusters of the
    parts would not be exchangeable.

    Args:
        rng: decides which cluster is where.
        clusters: (n,) of each image.
        parts: of each a share of the clusters (below 1), or a number of images: as many clusters
            as hold it on average, rounded up.
        unit: what the clusters are called in messages.

    Raises:
        InvalidData: no cluster would remain.

    Example:
        >>> clusters = np.repeat(["a", "b", "c", "d", "e"], 4)
        >>> rows = draw_by_cluster(np.random.default_rng(0), clusters, {"first": 0.2, "second": 6})
        >>> [sorted(set(clusters[part].tolist())) for part in rows]
        [['d'], ['a', 'e'], ['b', 'c']]
    """
    number, n = _numbered(clusters)
    counts = [_count(asked, n, len(clusters)) for asked in parts.values()]
    if sum(counts) >= n:
        sizes = " + ".join(f"{name} {share:g}" for name, share in parts.items())
        remedy = f"at least {len(parts) + 1} {unit} are needed, better many"
        if n > len(parts):
            remedy = f"use smaller parts, or have more {unit}"
        raise InvalidData(
            f"{sizes} of {len(clusters)} queries in {n} {unit}: that is {sum(counts)} {unit}, and "
            f"some must remain to test on; {remedy}"
        )
    which = np.repeat(np.arange(len(counts) + 1), [*counts, n - sum(counts)])
    order = rng.permutation(len(clusters))
    part = rng.permutation(which)[number[order]]
    return [order[part == k] for k in range(len(counts) + 1)]


def draw_by_label(
    rng: np.random.Generator,
    queries: ImageSet,
    parts: Mapping[str, float],
    cluster: str | None = None,
) -> list[NDArray[np.int64]]:
    """Rows of each part, then those that remain, in random order; no label is in two parts.

    Args:
        rng: decides which label is where.
        queries: with one label each.
        parts: as in `draw_by_cluster`, of labels.
        cluster: attribute of the queries whose clusters are not to be divided.

    Raises:
        InvalidConfig: the queries have no labels, or not one each, or no attribute `cluster`, or
            its clusters hold queries of several labels.
        InvalidData: no label would remain.
    """
    relevance = queries.relevance
    if not isinstance(relevance, SameLabel):
        raise InvalidConfig(
            f"queries is 'new-labels', but these queries match by {type(relevance).__name__}, not "
            "by one label each: use 'shared-labels', and name a cluster if new queries come from "
            "new clusters"
        )
    labels = relevance.labels
    if cluster is not None:
        number, n = _numbered(clusters_of(queries, cluster))
        if np.unique(np.stack([number, labels]), axis=1).shape[1] > n:
            raise InvalidConfig(
                f"queries is 'new-labels' and cluster is {cluster!r}, but clusters hold queries of "
                "several labels, so that labels cannot be divided without dividing clusters: use "
                "only one of the two options"
            )
    return draw_by_cluster(rng, labels, parts, "labels")


def draw_gallery(
    rng: np.random.Generator, relevance: Relevance, clusters: NDArray[Any], asked: float
) -> list[NDArray[np.int64]] | None:
    """Rows of the clusters that are searched, which hold every label, and the others.

    Clusters are put into a random order. Those that show a label first are searched, and then as
    many others as are missing. None if every label needs more than one and a half times as many
    clusters as were asked for, for instance if each label is in one cluster alone.

    Args:
        rng: decides the order.
        relevance: of n images; labels are minded where they are what matches.
        clusters: (n,) of each image.
        asked: a share of the clusters, or a number of images, see `draw_by_cluster`.
    """
    number, n = _numbered(clusters)
    count = _count(asked, n, len(clusters))
    place = rng.permutation(n)[number]
    searched = np.zeros(n, bool)
    if isinstance(relevance, SameLabel):
        labels, label = np.unique(relevance.labels, return_inverse=True)
        first = np.full(len(labels), n)
        np.minimum.at(first, label, place)
        searched[first] = True
        if searched.sum() > 1.5 * count:
            return None
    more = max(0, count - int(searched.sum()))
    searched[np.flatnonzero(~searched)[:more]] = True
    held = searched[place]
    return [np.flatnonzero(held), np.flatnonzero(~held)]


def cluster_warning(splits: Splits, named: str | None) -> str | None:
    """One sentence on what a calibration of these splits does not cover; None if nothing is known.

    Args:
        splits: of a data set; drawn by the named clusters, if one is named.
        named: the attribute that the calibration takes for the cluster of a query; None if each
            query is taken to be independent of the others.

    Raises:
        InvalidConfig: the calibration queries have no such attribute.
    """
    queries = splits.calibration
    if named is None:
        if queries.cluster is None:
            return None
        n = len(np.unique(clusters_of(queries, queries.cluster)))
        if n == len(queries):
            return None
        return (
            f"the {len(queries):,} calibration queries come in {n:,} clusters ({queries.cluster}): "
            f"the guarantee is for further queries of these {n:,} only; for queries of new ones, "
            f"name it: --cluster {queries.cluster}"
        )
    asked = np.unique(clusters_of(queries, named))
    parts = (splits.train, splits.validation, splits.gallery)
    known = [part.attributes[named] for part in parts if named in part.attributes]
    shared = int(np.isin(asked, np.concatenate(known)).sum()) if known else 0
    if not shared:
        return None
    return (
        f"{shared:,} of the {len(asked):,} clusters ({named}) of the calibration queries are also "
        "in the gallery or among the training images: nothing is guaranteed for new clusters that "
        "are in neither"
    )


def _numbered(clusters: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """The number of each image's cluster, and how many clusters there are."""
    names, number = np.unique(clusters, return_inverse=True)
    return number.astype(np.int64), len(names)


def _count(asked: float, clusters: int, images: int) -> int:
    if asked < 1:
        return max(1, round(asked * clusters))
    return max(1, math.ceil(asked * clusters / max(1, images)))
