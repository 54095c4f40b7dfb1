"""Duplicates: the same picture in two places where a guarantee needs different ones.

A calibration query that is also in the gallery finds itself; the score function is fitted to one
that is also in the tuning split; one that comes five times is one query, counted as five.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b, file_digest
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from rcir.data.bursts import FALSE_RATE, N_NEIGHBOURS, count_mates
from rcir.data.records import ImageSet, Splits
from rcir.errors import InvalidData, warn

if TYPE_CHECKING:
    from rcir.data.images import ImageLike

DIGEST_BYTES = 16  # of 2**64 different pictures, two would have the same digest
NEAR_SHARE = 0.02  # of the median distance to the second nearest item
BURST_SHARE = 0.4  # members of a burst are within this share of the distance to the gallery
MIN_MATES = 0.2  # per query: so many make delta = 0.1 fail in 0.12 of the calibrations
TEST_LEVEL, PERMUTATIONS = 0.01, 199  # of the tests for bursts
MAX_SHOWN = 5
RECURRING_ADVICE = "or give recurring=True if pictures recur in use exactly as they do here"
Digests: TypeAlias = NDArray[np.bytes_]
Neighbours: TypeAlias = tuple[NDArray[np.floating[Any]], NDArray[np.int64]]


def digests(images: Sequence[ImageLike] | NDArray[Any]) -> NDArray[np.bytes_]:
    """Return a digest of each image, (n,) "S32", which is equal for duplicates.

    BLAKE2b of 128 bits in hexadecimal digits: of the bytes of a file, which is not decoded; of
    shape and pixels of an array or PIL image as `read_image` returns them; of the numbers of each
    of n vectors (n, d). Two encodings of a picture have different digests.

    Example:
        >>> first, second, third = digests(np.array([[[1, 2]], [[2, 1]], [[1, 2]]], np.uint8))
        >>> bool(first == third), bool(first == second)
        (True, False)
    """
    if isinstance(images, np.ndarray) and images.dtype.kind == "f":
        rows = np.ascontiguousarray(images, np.float32)
        hexadecimal = [blake2b(row.data, digest_size=DIGEST_BYTES).hexdigest() for row in rows]
    elif len(images) > 1 and all(isinstance(image, str | os.PathLike) for image in images):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hexadecimal = list(pool.map(_digest, images))
    else:
        hexadecimal = [_digest(image) for image in images]
    return np.array(hexadecimal, dtype=f"S{2 * DIGEST_BYTES}")


def _digest(image: ImageLike) -> str:
    from PIL import Image

    from rcir.data.images import UntrustedImage, open_image, read_image

    if isinstance(image, str | os.PathLike | bytes | UntrustedImage):
        with open_image(image) as file:
            return file_digest(
                cast("BytesIO", file), lambda: blake2b(digest_size=DIGEST_BYTES)
            ).hexdigest()
    if isinstance(image, Image.Image):
        grey = image.mode in ("1", "L")
    else:
        grey = np.shape(image)[2:] in ((), (1,))
    pixels = read_image(image, channels=1 if grey else 3)
    digest = blake2b(repr(pixels.shape).encode(), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def without_repeats(splits: Splits) -> tuple[Splits, dict[str, int]]:
    """Leave out queries that occur in an earlier split, or twice.

    The order is training, validation, gallery, tuning, calibration, test. Tuning queries may come
    twice in their split; calibration and test queries may not.

    Given the earlier splits, the remaining calibration and test queries are drawn from the pictures
    that are not in them, for which the guarantee holds. The first of several copies stays, so that
    it calibrates more often than it tests: if more than a few queries are left out, remove copies
    from the data set before it is divided.

    Returns:
        The splits, and the number of queries that were left out, by the name of their split.

    Raises:
        InvalidData: no query of a split remains.
        InvalidImage: a file cannot be read.

    Example:
        >>> pictures = np.arange(7, dtype=np.uint8)[:, None, None]
        >>> def part(*rows):
        ...     return ImageSet(pictures[[*rows]], np.zeros(len(rows), int), [*map(str, rows)])
        >>> splits = Splits(part(0), part(1), part(2), part(3, 3), part(4, 4, 2), part(5, 4, 6))
        >>> splits, left_out = without_repeats(splits)
        >>> left_out, splits.calibration.ids, splits.test.ids
        ({'tuning': 0, 'calibration': 2, 'test': 1}, ['4'], ['5', '6'])
    """
    others = (splits.train, splits.validation, splits.gallery)
    earlier = np.concatenate([digests(part.images) for part in others])
    remaining: dict[str, ImageSet] = {}
    left_out: dict[str, int] = {}
    for name in ("tuning", "calibration", "test"):
        queries: ImageSet = getattr(splits, name)
        query_digests = digests(queries.images)
        is_new = ~_is_among(query_digests, earlier)
        if name != "tuning":
            is_new &= ~_is_repeated(query_digests)
        if len(queries) and not is_new.any():
            raise InvalidData(
                f"all {len(queries)} {name} queries are duplicates of training or gallery images, "
                "or of other queries: give others"
            )
        left_out[name] = int(np.count_nonzero(~is_new))
        remaining[name] = queries.subset(np.flatnonzero(is_new)) if left_out[name] else queries
        earlier = np.concatenate([earlier, query_digests])
    return replace(splits, **remaining), left_out


def require_no_repeats(
    gallery: Digests | None, tuning: Digests, calibration: Digests, recurring: bool = False
) -> None:
    """Raise `InvalidData` for duplicates among tuning and calibration queries, or in the gallery.

    The gallery is None if its digests are unknown.

    With `recurring`, calibration queries may be in the tuning split too, and may come twice.
    """
    _require_new("queries of the tuning split", tuning, gallery)
    before = None if recurring else tuning
    _require_new("calibration queries", calibration, gallery, before, "are in the tuning split too")


def require_new(
    gallery: Digests | None, before: Digests, added: Digests, recurring: bool = False
) -> None:
    """Raise `InvalidData` for duplicates among queries that are added to a calibration.

    With `recurring`, they may be among those that the retriever was tuned or calibrated with.
    """
    problem = "were tuned or calibrated with before"
    _require_new("queries to add", added, gallery, None if recurring else before, problem)


def _require_new(
    what: str,
    queries: Digests,
    gallery: Digests | None,
    before: Digests | None = None,
    problem: str = "",
) -> None:
    """Refuse queries that are in the gallery or, with `before`, among these or repeated."""
    if gallery is not None:
        advice = "and each finds itself: leave them out of the queries, or out of the gallery"
        _refuse(_is_among(queries, gallery), f"{what} are pictures of the gallery", advice)
    if before is not None:
        advice = f"so that they are no new evidence: leave them out, {RECURRING_ADVICE}"
        _refuse(_is_among(queries, before), f"{what} {problem}", advice)
        advice = f"so that there are fewer queries than rows: leave them out, {RECURRING_ADVICE}"
        _refuse(_is_repeated(queries), f"{what} came before among them", advice)


def warn_of_copies(queries: str, distances: NDArray[np.floating[Any]], known: bool) -> None:
    """Warn of queries hardly apart from their nearest item, such as other encodings of a picture.

    `distances` (n, depth) are ascending; `known` if digests show that no query is in the gallery.
    """
    rows = np.flatnonzero(distances[:, 0] <= _near(distances))
    if len(rows):
        other = "though the file is another one" if known else "which may be the same picture"
        warn(
            f"{len(rows)} of {len(distances)} {queries} ({_list_rows(rows)}) lie within "
            f"{NEAR_SHARE:g} of the usual distance of their nearest gallery image, {other}. If "
            "they are other encodings of it, each finds itself, and the guarantee is not for new "
            "pictures: leave them out"
        )


def warn_of_twins(
    queries: str, nearest: NDArray[np.floating[Any]], distances: NDArray[np.floating[Any]]
) -> None:
    """Warn of queries that are hardly apart from another query, see `warn_of_copies`.

    `nearest` (n,) is the distance to the nearest query that a query must not be.
    """
    rows = np.flatnonzero(nearest <= _near(distances))
    if len(rows):
        warn(
            f"{len(rows)} of {len(nearest)} {queries} ({_list_rows(rows)}) lie within "
            f"{NEAR_SHARE:g} of the usual distance of another query, or of one of the tuning "
            "split, though the files or pixels differ. If they are other encodings of it, there "
            "are fewer queries than it seems: leave them out"
        )


def warn_of_bursts(
    queries: str, among: Neighbours, gallery: Neighbours, n_queries: int, n_items: int
) -> None:
    """Warn of queries that come in bursts, such as frames of one video.

    The mates of a query are the other queries within `BURST_SHARE` of the distance to its nearest
    gallery item. They count only if no more than as many again are nearer than that item: otherwise
    the queries come from another source than the gallery. With m mates per query, n queries are
    about as informative as n / (1 + m) independent ones. The test is exact: if queries and gallery
    items are independent draws from one population, each neighbour of a query is equally likely to
    be any of the others, and permuting them gives the distribution of the number of mates.

    `among` has distances and numbers of the other queries of a sample, nearest first, for each
    query of another sample; `gallery` distances and positions of its nearest gallery items.
    """
    p_value, mates = _test_of_bursts(among, gallery, n_queries, n_items)
    if p_value <= TEST_LEVEL and mates >= MIN_MATES:
        warn(
            f"{queries} have on average {mates:.2f} other queries within {BURST_SHARE:g} of the "
            f"distance to their nearest gallery image (p = {p_value:.2g} if they were "
            "independent). If they come in clusters, such as frames of one video or photographs of "
            f"one burst, they carry about {1 + mates:.1f} times less information than independent "
            "ones, and the guarantee fails more often than delta says: pass the cluster of each "
            "query, or keep one query of each cluster"
        )


def warn_of_gallery_bursts(
    queries: str, distances: NDArray[np.floating[Any]], relevant: NDArray[np.bool_], remedy: str
) -> None:
    """Warn of queries from the gallery that find other members of their own burst there.

    The share of queries with near-copies among their matches (`count_mates`) is then more than
    three times that of independent queries, at a level of 0.01. Fewer bursts hardly affect delta.
    """
    nearest = np.where(relevant & (distances > 0), distances, np.inf)
    nearest = np.sort(nearest, axis=1)[:, :N_NEIGHBOURS]
    if nearest.shape[1] < 2:
        return
    rows = np.flatnonzero(count_mates(nearest, np.count_nonzero(relevant, axis=1)))
    p_value = bdtrc(len(rows) - 1, len(distances), 3 * FALSE_RATE) if len(rows) else 1.0
    if p_value <= TEST_LEVEL:
        warn(
            f"{len(rows)} of {len(distances)} {queries} ({_list_rows(rows)}) have matches in the "
            "gallery that are far nearer than all others. If these are photographs of one moment "
            "or frames of one video, each query finds its own burst, which no new picture does, "
            f"and the guarantee is not for new pictures: {remedy}"
        )


def _test_of_bursts(
    among: Neighbours, gallery: Neighbours, n_queries: int, n_items: int
) -> tuple[float, float]:
    """Return a p-value of independence and the mean number of mates, see `warn_of_bursts`."""
    n, n_others = among[0].shape
    numbers, items = np.unique(gallery[1], return_inverse=True)
    # Items before queries: at equal distances, a query has no mates.
    distances = np.concatenate([gallery[0], among[0]], axis=1)
    neighbours = np.concatenate([n_others + items.reshape(gallery[1].shape), among[1]], axis=1)
    order = np.argsort(distances, axis=1, kind="stable")
    distances = np.take_along_axis(distances, order, axis=1)
    neighbours = np.take_along_axis(neighbours, order, axis=1)
    # If the nearest item of a query is at place p of its neighbours, it has mates[p] mates.
    mates = np.array([np.searchsorted(row, BURST_SHARE * row) for row in distances])
    mates[np.arange(distances.shape[1]) > 2 * mates] = 0
    rows, n_neighbours = np.arange(n), n_others + len(numbers)
    n_items = max(n_items, len(numbers))  # -1, for no item, counts too

    def total(is_item: NDArray[np.bool_]) -> int:
        return int(mates[rows, is_item[neighbours].argmax(axis=1)].sum())

    observed = total(np.arange(n_neighbours) >= n_others)
    rng, as_large = np.random.default_rng(0), 1
    for _ in range(PERMUTATIONS):
        is_item = np.ones(n_neighbours, bool)
        simulated = rng.hypergeometric(n_others, n_items, n_neighbours)
        is_item[rng.permutation(n_neighbours)[:simulated]] = False
        as_large += total(is_item) >= observed
    return as_large / (PERMUTATIONS + 1), observed / n * (n_queries - 1) / n_others


def _near(distances: NDArray[np.floating[Any]]) -> float:
    """Return the distance up to which queries may be copies."""
    return NEAR_SHARE * float(np.median(distances[:, min(1, distances.shape[1] - 1)]))


def _is_among(queries: Digests, others: Digests) -> NDArray[np.bool_]:
    """Return whether each is one of others, which are more numerous and looked up, not sorted."""
    shared = set(queries.tolist()).intersection(others.tolist())
    return np.array([digest in shared for digest in queries.tolist()], bool)


def _is_repeated(queries: Digests) -> NDArray[np.bool_]:
    """Return whether each came before."""
    is_repeated = np.ones(len(queries), bool)
    is_repeated[np.unique(queries, return_index=True)[1]] = False
    return is_repeated


def _refuse(wrong: NDArray[np.bool_], what: str, advice: str) -> None:
    rows = np.flatnonzero(wrong)
    if len(rows):
        raise InvalidData(f"{len(rows)} of {len(wrong)} {what} ({_list_rows(rows)}), {advice}")


def _list_rows(rows: NDArray[np.int64]) -> str:
    listed = ", ".join(map(str, rows[:MAX_SHOWN].tolist())) + ", ..." * (len(rows) > MAX_SHOWN)
    return f"row{'s' * (len(rows) > 1)} {listed}"
