"""Division of a data set into the splits that training and calibration need.

If queries to come will be of new clusters, such as other people's drawings, those that calibrate
and those that test must be of different clusters too, so whole clusters are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet, Source, Splits
from rcir.data.relevance import Relevance, WithinRadius
from rcir.errors import InvalidConfig, InvalidData

QueryDivision = Literal["shared-labels", "new-labels"]
DRAWN_PARTS = ("validation", "gallery", "tuning", "calibration")
# Of validation: a recall of one class, or of single images, cannot tell epochs apart.
MIN_CLASSES, MIN_PER_CLASS = 3, 2
CELL_SIDES = (40.0, 20.0, 10.0, 5.0, 2.5, 1.25)  # sides of a grid's cells, of the radius


def get_clusters(images: ImageSet, cluster: str) -> NDArray[Any]:
    """Return the cluster of every image (n,); raise `InvalidConfig` for an unknown attribute."""
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
    """Divide images so that no cluster (n,) is in two parts.

    The size of a part is a share of the clusters (below 1), or a number of images: as many clusters
    as hold it on average, rounded up. The number of clusters is settled before any is drawn: adding
    clusters until they hold enough images would prefer large ones (the inspection paradox), and the
    clusters of the parts would not be exchangeable. `unit` is what messages call them.

    Return the rows of each part, then those that remain, in random order.
    """
    number, n = _number_clusters(clusters)
    counts = [_count_clusters(share, n, len(clusters)) for share in parts.values()]
    if sum(counts) >= n:
        remedy = f"at least {len(parts) + 1} {unit} are needed, preferably many"
        if n > len(parts):
            remedy = f"use smaller parts, or have more {unit}"
        raise InvalidData(
            f"{_state_shares(parts)} of {len(clusters)} queries in {n} {unit}: that is "
            f"{sum(counts)} {unit}, and some must remain to test on; {remedy}"
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
    """Divide queries so that no label is in two parts, and no cluster either if one is named.

    Parts and result are those of `draw_by_cluster`, for labels. No cluster may have several labels.
    """
    relevance = queries.relevance
    if (labels := relevance.single) is None:
        raise InvalidConfig(
            f"queries is 'new-labels', but these queries match by {relevance.kind}, not by one "
            "label each: use 'shared-labels', with a cluster if new queries are of new clusters"
        )
    if cluster is not None:
        number, n = _number_clusters(get_clusters(queries, cluster))
        if np.unique(np.stack([number, labels]), axis=1).shape[1] > n:
            raise InvalidConfig(
                f"queries is 'new-labels' and cluster is {cluster!r}, but some clusters have "
                "several labels, so that dividing labels would divide them: use only one option"
            )
    return draw_by_cluster(rng, labels, parts, "labels")


def draw_gallery(
    rng: np.random.Generator, relevance: Relevance, clusters: NDArray[Any], share: float
) -> list[NDArray[np.int64]] | None:
    """Draw whole clusters for the gallery, which hold every label.

    Of clusters in random order, those that show a label first are searched, and then as many others
    as are missing of `share`: of the clusters, or a number of images. Return the rows of the
    gallery, and the others; None if the labels need more than one and a half times as many clusters
    as requested, for instance if each label has a cluster of its own.
    """
    number, n = _number_clusters(clusters)
    count = _count_clusters(share, n, len(clusters))
    place = rng.permutation(n)[number]
    searched = np.zeros(n, bool)
    if relevance.single is not None:
        labels, label = np.unique(relevance.single, return_inverse=True)
        first = np.full(len(labels), n)
        np.minimum.at(first, label, place)
        searched[first] = True
        if searched.sum() > 1.5 * count:
            return None
    more = max(0, count - int(searched.sum()))
    searched[np.flatnonzero(~searched)[:more]] = True
    is_searched = searched[place]
    return [np.flatnonzero(is_searched), np.flatnonzero(~is_searched)]


def cluster_warning(splits: Splits, attribute: str | None) -> str | None:
    """Return one sentence on what a calibration of these splits does not cover, or None.

    Args:
        splits: of a data set; drawn by the named clusters, if there are.
        attribute: states the cluster of each query; None if queries are taken to be independent.

    Raises:
        InvalidConfig: the calibration queries have no such attribute.
    """
    queries = splits.calibration
    if attribute is None:
        if queries.cluster is None:
            return None
        n = len(np.unique(get_clusters(queries, queries.cluster)))
        if n == len(queries):
            return None
        return (
            f"the {len(queries):,} calibration queries come in {n:,} clusters ({queries.cluster}): "
            f"the guarantee is for further queries of these {n:,} only; for queries of new ones, "
            f"name it: --cluster {queries.cluster}"
        )
    query_clusters = set(get_clusters(queries, attribute).tolist())
    shared: set[Any] = set()
    for part in (splits.train, splits.validation, splits.gallery):
        if attribute in part.attributes:
            shared |= query_clusters.intersection(part.attributes[attribute].tolist())
    if not shared:
        return None
    return (
        f"{len(shared):,} of the {len(query_clusters):,} clusters ({attribute}) of the calibration "
        "queries are also in the gallery or among the training images: nothing is guaranteed for "
        "new clusters that are in neither"
    )


def _number_clusters(clusters: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Return the number of each image's cluster, and the number of clusters."""
    names, number = np.unique(clusters, return_inverse=True)
    return number.astype(np.int64), len(names)


def _count_clusters(share: float, clusters: int, images: int) -> int:
    """Return the number of clusters that make a share, or hold a number of images on average."""
    if share < 1:
        return max(1, round(share * clusters))
    return max(1, math.ceil(share * clusters / max(1, images)))


def _state_shares(parts: Mapping[str, float]) -> str:
    return " + ".join(f"{name} {share:g}" for name, share in parts.items())


def divide(
    source: Source,
    *,
    seed: int = 0,
    validation: float = 0.1,
    gallery: float = 0.5,
    tuning: float = 0.3,
    calibration: float = 0.3,
    cluster: str | None = None,
    queries: QueryDivision = "shared-labels",
) -> Splits:
    """Draw the splits of a data set at random.

    Every size is a share (below 1; at least one is drawn) or a number (from 1 on).

    Validation images must match each other and be as new to training as queries are:

    - Where the labels of both halves are disjoint, whole classes validate: of a share at least
      three, with two images or more where possible. If there are fewer than six classes, a share of
      the images of each validates instead, two or more, if two classes have as many to spare.
    - Of places (`WithinRadius`), whole cells of a grid validate, so that only images near a cell's
      border match a training image. The cells are 40 times the radius wide; where such cells do not
      hold about the requested number, half as wide, and so on down to 1.25 times the radius.
    - Otherwise, and where the gallery is drawn from the training half, single images validate.

    Args:
        source: the data set; published validation images are used as they are.
        seed: decides who is in which split.
        validation: of the training half: of its classes or its images, see above; of places, half
            to one and a half times as many are drawn.
        gallery: of the half that it is drawn from, unless it is published. In a zero-shot set, a
            share is that of every class, rounded up; a number, at least that of the classes, is met
            exactly and spread evenly. Images of singleton classes go to the gallery.
        tuning, calibration: of the queries; those that remain are the test queries.
        cluster: attribute of the queries: tuning, calibration and test queries are then of
            different clusters (`draw_by_cluster`). A gallery that is drawn from the evaluation half
            then has clusters of its own, which hold every label, unless that takes too many
            clusters (`draw_gallery`). All other images are the same as without.
        queries: "new-labels": tuning, calibration and test queries are of different labels
            (`draw_by_label`), for a guarantee for queries of new labels. All other images are the
            same as with "shared-labels", and the gallery has all labels.
    """
    rng = np.random.default_rng(seed)
    train, pool, validating = source.train, source.queries, source.validation
    if source.gallery == "train":
        shares = {} if validating is not None else {"validation": validation}
        *drawn, searched, rest = _draw(rng, len(train), shares | {"gallery": gallery})
        searched_images = train.subset(searched)
    else:
        if source.gallery == "queries":
            _require_pairs(pool)
        drawn, rest = [], np.arange(len(train))
        if validating is None:
            *drawn, rest = _draw_validation(rng, source, validation)
        if isinstance(source.gallery, ImageSet):
            searched_images = source.gallery
        else:
            searched, others = _draw_of_each_class(rng, pool, gallery)
            if cluster is not None:
                clusters = get_clusters(pool, cluster)
                by_cluster = draw_gallery(rng, pool.relevance, clusters, gallery)
                searched, others = by_cluster or (searched, others)
            searched_images, pool = pool.subset(searched), pool.subset(others)
    parts = {"tuning": tuning, "calibration": calibration}
    for name, share in parts.items():
        _number(name, share, len(pool), "queries")
    if queries == "new-labels":
        rows = draw_by_label(rng, pool, parts, cluster)
    elif cluster is not None:
        rows = draw_by_cluster(rng, get_clusters(pool, cluster), parts)
    else:
        rows = _draw(rng, len(pool), parts, "queries")
    if validating is None:
        validating = train.subset(drawn[0])
    return Splits(train.subset(rest), validating, searched_images, *map(pool.subset, rows))


def _draw(
    rng: np.random.Generator, n: int, parts: dict[str, float], what: str = "images"
) -> list[NDArray[np.int64]]:
    """Return the rows of each part, then those that remain, in random order."""
    numbers = [_number(name, share, n, what) for name, share in parts.items()]
    _require_rest(sum(numbers), parts, n, what)
    return np.split(rng.permutation(n), np.cumsum(numbers))


def _require_rest(number: int, parts: Mapping[str, float], n: int, what: str) -> None:
    """Raise `InvalidData` if parts leave none of n images or classes."""
    if number < n:
        return
    remedy = "use smaller parts"
    if n <= len(parts):  # each part has at least one
        remedy = f"have at least {len(parts) + 1} {what}, preferably many"
        if what == "queries":
            remedy += ": images of the evaluation classes outside the gallery"
    raise InvalidData(f"{_state_shares(parts)} leave none of {n} {what}: {remedy}")


def _number(name: str, share: float, n: int, what: str) -> int:
    """Return the number of n that a share or a number stands for."""
    if isinstance(share, bool) or not (0 < share < 1 or (share >= 1 and share % 1 == 0)):
        raise InvalidData(
            f"{name} is {share}; it must be a share between 0 and 1, or a number of the {n} {what}"
        )
    return max(1, round(share * n)) if share < 1 else int(share)


def _draw_validation(
    rng: np.random.Generator, source: Source, share: float
) -> list[NDArray[np.int64]]:
    """Return the rows of the training half that validate, and the others."""
    relevance = source.train.relevance
    if isinstance(relevance, WithinRadius):
        return _draw_cells(rng, relevance, share)
    labels, query_labels = relevance.single, source.queries.relevance.single
    if labels is None or (
        isinstance(source.gallery, ImageSet)
        and query_labels is not None
        and np.isin(query_labels, labels).any()
    ):
        return _draw(rng, len(source.train), {"validation": share})
    return _draw_classes(rng, labels, share)


def _draw_classes(
    rng: np.random.Generator, labels: NDArray[np.int64], share: float
) -> list[NDArray[np.int64]]:
    """Return the rows of whole classes, or of a part of each of few classes, and the others."""
    _, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    n = len(counts)
    number = _number("validation", share, n, "classes")
    if share < 1:
        spare = counts >= 2 * MIN_PER_CLASS  # some images train, others validate
        if n < 2 * MIN_CLASSES and spare.sum() >= 2:
            sizes = np.maximum(MIN_PER_CLASS, np.round(share * counts).astype(np.int64))
            sizes = np.where(spare, np.minimum(sizes, counts - MIN_PER_CLASS), 0)
            order, place = shuffle_by_class(rng, which, counts)
            part = place < sizes[which[order]]
            return [np.sort(order[part]), np.sort(order[~part])]
        number = max(number, min(MIN_CLASSES, n // 2))
    _require_rest(number, {"validation": share}, n, "classes")
    order = rng.permutation(n)
    matched = order[counts[order] >= MIN_PER_CLASS]
    if np.isin(order[:number], matched).sum() < min(MIN_CLASSES, number):
        # Mostly classes of one image, which match nothing.
        first = matched[:MIN_CLASSES]
        order = np.concatenate([first, order[~np.isin(order, first)]])
    chosen = np.isin(which, order[:number])
    return [np.flatnonzero(chosen), np.flatnonzero(~chosen)]


def shuffle_by_class(
    rng: np.random.Generator, which: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all rows in random order, and the place of each among those of its class, from 0."""
    order = rng.permutation(len(which))
    by_class = np.argsort(which[order], kind="stable")
    place = np.empty(len(which), np.int64)
    place[by_class] = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order, place


def _draw_cells(
    rng: np.random.Generator, where: WithinRadius, share: float
) -> list[NDArray[np.int64]]:
    """Return the rows of whole cells of a grid, and the others."""
    n = len(where)
    number = _number("validation", share, n, "images")
    _require_rest(number, {"validation": share}, n, "images")
    for times in CELL_SIDES:
        steps = (where.places - where.places.min(0)) // (times * where.radius)
        _, cell, counts = np.unique(steps, axis=0, return_inverse=True, return_counts=True)
        is_drawn, n_drawn = np.zeros(len(counts), bool), 0
        for chosen in rng.permutation(len(counts)):
            if n_drawn < number and n_drawn + counts[chosen] <= min(1.5 * number, n - 1):
                is_drawn[chosen] = True
                n_drawn += counts[chosen]
        if 2 * n_drawn >= number:
            validates = is_drawn[cell.reshape(-1)]
            return [np.flatnonzero(validates), np.flatnonzero(~validates)]
    raise InvalidData(
        f"validation {share:g} of {n} images, about {number}, cannot be separated from the "
        f"training images: too many places lie within {times:g} times the radius of "
        f"{where.radius:g}; choose another number, or have more places"
    )


def _require_pairs(images: ImageSet) -> None:
    if images.relevance.single is None:
        return
    n = len(np.unique(images.relevance.single))
    if n == len(images):
        raise InvalidData(
            f"no query remains: each of the {n} evaluation classes has one image, which goes to "
            "the gallery; have at least two images in some classes, one to search and one to query"
        )


def _draw_of_each_class(
    rng: np.random.Generator, images: ImageSet, share: float
) -> list[NDArray[np.int64]]:
    """Return the rows of a share of every class, or of a number spread evenly, and the others."""
    if (labels := images.relevance.single) is None:
        return _draw(rng, len(images), {"gallery": share})
    n = len(images)
    number = _number("gallery", share, n, "images")
    _require_rest(number, {"gallery": share}, n, "images")
    _, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order, place = shuffle_by_class(rng, which, counts)
    which = which[order]
    if share < 1:
        # 0.07 of 100 is 7, and a little more in floating point.
        is_searched = place < np.ceil(np.round(share * counts, 9))[which]
    elif number < len(counts):
        raise InvalidData(
            f"gallery is {number}, less than the {len(counts)} classes to evaluate on: use one "
            "image for each or more, or a share"
        )
    else:
        is_searched = np.zeros(n, bool)
        is_searched[np.argsort(place / counts[which], kind="stable")[:number]] = True
    if is_searched.all():
        raise InvalidData(
            f"gallery {share:g} of each of {len(counts)} classes, rounded up, is all of their {n} "
            "images, and no query remains: use a smaller share"
        )
    return [order[is_searched], order[~is_searched]]
