"""The same picture in two places where a guarantee needs different ones, and how it is recognised.

A calibration query that is also searched finds itself; one that fitted the score function was
fitted to; one that comes five times is one query, counted as five.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b, file_digest
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from rcir.data.bursts import FALSE_RATE, NEIGHBOURS, count_mates
from rcir.data.records import ImageSet, Splits
from rcir.errors import InvalidData

if TYPE_CHECKING:
    from rcir.data.images import ImageLike

BYTES = 16  # of 2**64 different pictures, two would have the same digest
NEAR = 0.02  # of the median distance to the second nearest item
BURST = 0.4  # members of a burst are within this share of the distance to the gallery
MATES = 0.2  # per query: so many make delta = 0.1 fail in 0.12 of the calibrations
LEVEL, PERMUTATIONS = 0.01, 199  # of the tests for bursts
SHOWN = 5
RECURRING = "or give recurring=True if pictures recur in use exactly as they do here"
Digests: TypeAlias = NDArray[np.bytes_]
Neighbours: TypeAlias = tuple[NDArray[np.floating[Any]], NDArray[np.int64]]


def digests(images: Sequence[ImageLike] | NDArray[Any]) -> NDArray[np.bytes_]:
    """A digest of each image, by which the same picture is found again.

    That of a path is of the file's bytes, so that it is read but not decoded; that of an array or
    a PIL image is of shape and pixels as `read_image` gives them. A picture that was encoded anew,
    and a file beside the array of its pixels, have different digests.

    Args:
        images: n of what `read_image` takes; paths are read in threads. Or vectors, an array (n, d)
            of floats: the digest of each is of its numbers.

    Returns:
        (n,) of dtype "S32": BLAKE2b of 128 bits in hexadecimal digits, so that numpy's `isin` and
        `unique` take them.

    Raises:
        InvalidImage: a file cannot be read, or something else is not an image.

    Example:
        >>> first, second, third = digests(np.array([[[1, 2]], [[2, 1]], [[1, 2]]], np.uint8))
        >>> bool(first == third), bool(first == second), first.dtype
        (True, False, dtype('S32'))
        >>> bool(first == digests([np.array([[1], [2]], np.uint8)])[0])  # another shape
        False
    """
    if isinstance(images, np.ndarray) and images.dtype.kind == "f":
        rows = np.ascontiguousarray(images, np.float32)
        hexadecimal = [blake2b(row.data, digest_size=BYTES).hexdigest() for row in rows]
    elif len(images) > 1 and all(isinstance(image, str | os.PathLike) for image in images):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            hexadecimal = list(pool.map(_digest, images))
    else:
        hexadecimal = [_digest(image) for image in images]
    return np.array(hexadecimal, dtype=f"S{2 * BYTES}")


def _digest(image: ImageLike) -> str:
    from PIL import Image

    from rcir.data.images import UntrustedImage, open_image, read_image

    if isinstance(image, str | os.PathLike | bytes | UntrustedImage):
        with open_image(image) as file:
            return file_digest(file, lambda: blake2b(digest_size=BYTES)).hexdigest()
    if isinstance(image, Image.Image):
        grey = image.mode in ("1", "L")
    else:
        grey = np.shape(image)[2:] in ((), (1,))
    pixels = read_image(image, channels=1 if grey else 3)
    digest = blake2b(repr(pixels.shape).encode(), digest_size=BYTES)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def without_repeats(splits: Splits) -> tuple[Splits, dict[str, int]]:
    """Return splits whose queries are all different, and occur nowhere else.

    Left out are queries of the tuning split that are in the gallery; calibration queries that are
    in the gallery, in the tuning split, or earlier among the calibration queries; and test queries
    that are in any of these, or earlier among the test queries. Pictures that train or validate are
    left out of all three. The other parts stay as they are.

    Given all those parts, what remains of the calibration queries is drawn from the pictures that
    are not among them, and what remains of the test queries too: that is what the guarantee speaks
    of. Of a picture with copies the first is kept, so that it calibrates more often than it tests;
    where more than a few are left out, remove copies from the data set before it is divided.

    Returns:
        The splits, and how many queries were left out, by the name of their part.

    Raises:
        InvalidData: no query of a part remains.
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
    elsewhere = np.concatenate([digests(part.images) for part in others])
    remaining: dict[str, ImageSet] = {}
    left_out: dict[str, int] = {}
    for name in ("tuning", "calibration", "test"):
        queries: ImageSet = getattr(splits, name)
        query_digests = digests(queries.images)
        keep = ~_among(query_digests, elsewhere)
        if name != "tuning":
            keep &= ~_repeated(query_digests)
        if len(queries) and not keep.any():
            raise InvalidData(
                f"all {len(queries)} {name} queries are pictures that stand elsewhere too, in "
                "training, gallery, or other queries: give others"
            )
        left_out[name] = int(np.count_nonzero(~keep))
        remaining[name] = queries.subset(np.flatnonzero(keep)) if left_out[name] else queries
        elsewhere = np.concatenate([elsewhere, query_digests])
    return replace(splits, **remaining), left_out


def require_no_repeats(
    gallery: Digests | None, tuning: Digests, calibration: Digests, recurring: bool = False
) -> None:
    """Raise `InvalidData` for pictures that calibrate, or are fitted to, and occur elsewhere too.

    Args:
        gallery: digests of the pictures that are searched; None if they are not known.
        tuning, calibration: digests of the queries of tuning split and calibration split.
        recurring: allow calibration queries that are in the tuning split too, or come twice.

    Example:
        >>> require_no_repeats(None, digests([np.zeros((1, 1), np.uint8)]), np.array([b"1", b"1"]))
        Traceback (most recent call last):
            ...
        rcir.errors.InvalidData: 1 of 2 calibration queries came before among them (row 1), so ...
    """
    _require_new("queries of the tuning split", tuning, gallery)
    before, known = None if recurring else tuning, "are in the tuning split too"
    _require_new("calibration queries", calibration, gallery, before, known)


def require_new(
    gallery: Digests | None, before: Digests, added: Digests, recurring: bool = False
) -> None:
    """Raise `InvalidData` for pictures that are added to those calibrated with, and are known.

    Args:
        gallery: as in `require_no_repeats`.
        before: digests of all queries that the retriever was tuned or calibrated with.
        added: digests of the queries to add.
        recurring: allow queries that were among those before, or come twice.

    Example:
        >>> require_new(None, np.array([b"1", b"2"]), np.array([b"3", b"2"]))
        Traceback (most recent call last):
            ...
        rcir.errors.InvalidData: 1 of 2 queries to add were tuned or calibrated with before (row ...
    """
    known = "were tuned or calibrated with before"
    _require_new("queries to add", added, gallery, None if recurring else before, known)


def _require_new(
    what: str,
    queries: Digests,
    gallery: Digests | None,
    before: Digests | None = None,
    known: str = "",
) -> None:
    """Refuse queries of the gallery, and if there are others before, these and repeated ones."""
    if gallery is not None:
        therefore = "and each finds itself: leave them out of the queries, or out of the gallery"
        _refuse(_among(queries, gallery), f"{what} are pictures of the gallery", therefore)
    if before is not None:
        advice = f"leave them out, {RECURRING}"
        _refuse(_among(queries, before), f"{what} {known}", f"so that they prove nothing: {advice}")
        fewer = f"so that there are fewer than it seems: {advice}"
        _refuse(_repeated(queries), f"{what} came before among them", fewer)


def warn_of_copies(queries: str, distances: NDArray[np.floating[Any]], known: bool) -> None:
    """Warn of queries that are hardly apart from their nearest gallery item.

    A picture that was encoded anew has another digest and, nearly, the same embedding.

    Args:
        queries: how they are called.
        distances: (n, depth) of each to its gallery items, ascending.
        known: whether it is known that none of them is itself in the gallery.
    """
    rows = np.flatnonzero(distances[:, 0] <= _near(distances))
    if len(rows):
        other = "though the picture is another one" if known else "which may be the same picture"
        warnings.warn(
            f"{len(rows)} of {len(distances)} {queries} ({_row_list(rows)}) lie within {NEAR:g} of "
            f"the usual distance of their nearest gallery image, {other}. If they are copies of "
            "it, encoded anew, each finds itself, and the guarantee is not for new pictures: leave "
            "them out",
            stacklevel=3,
        )


def warn_of_twins(
    queries: str, nearest: NDArray[np.floating[Any]], distances: NDArray[np.floating[Any]]
) -> None:
    """Warn of queries that are hardly apart from another query, see `warn_of_copies`.

    Args:
        queries: how they are called.
        nearest: (n,) distance of each to the nearest query that it must not be.
        distances: (n, depth) of each to its gallery items, ascending.
    """
    rows = np.flatnonzero(nearest <= _near(distances))
    if len(rows):
        warnings.warn(
            f"{len(rows)} of {len(nearest)} {queries} ({_row_list(rows)}) lie within {NEAR:g} of "
            "the usual distance of another query, or of one of the tuning split, though the files "
            "or pixels differ. If they are copies, encoded anew, there are fewer queries than it "
            "seems: leave them out",
            stacklevel=3,
        )


def warn_of_bursts(
    queries: str, among: Neighbours, gallery: Neighbours, n_queries: int, n_items: int
) -> None:
    """Warn of queries that come in bursts, such as frames of one video.

    The mates of a query are the other queries within `BURST` of the distance to its nearest gallery
    item. They count only if no more than as many again are nearer than that item. Otherwise the
    queries are nearer to each other because they come from another source than the gallery. With m
    mates per query, n queries carry about as much information as n / (1 + m) independent ones.

    The test is exact. If queries and gallery items are independent draws from one population,
    however clumpy, each neighbour of a query is equally likely to be any of the other queries and
    items. Permuting them gives the distribution of the number of mates.

    Args:
        queries: how they are called.
        among: distances and numbers (0, 1, ...) of some other queries, all for each of some
            queries, nearest first.
        gallery: distances and positions of the nearest gallery items of the same queries.
        n_queries, n_items: how many there are in total.
    """
    p_value, mates = _test_of_bursts(among, gallery, n_queries, n_items)
    if p_value <= LEVEL and mates >= MATES:
        warnings.warn(
            f"{queries} have on average {mates:.2f} other queries within {BURST:g} of the distance "
            f"to their nearest gallery image (p = {p_value:.2g} if they were independent). If they "
            "come in clusters, such as frames of one video or photographs of one burst, they carry "
            f"about {1 + mates:.1f} times less information than independent ones, and the "
            "guarantee fails more often than delta says: pass the cluster of each query, or keep "
            "one query of each cluster",
            stacklevel=3,
        )


def warn_of_gallery_bursts(
    queries: str, distances: NDArray[np.floating[Any]], relevant: NDArray[np.bool_], remedy: str
) -> None:
    """Warn of queries from the gallery that find other members of their own burst there.

    More queries have near-copies among their matches (`rcir.data.bursts.count_mates`) than three
    times the share of independent queries that are taken for such, at a level of 0.01. Of fewer
    bursts, delta hardly suffers.

    Args:
        queries: how they are called.
        distances: (n, depth) of each to its gallery items, ascending.
        relevant: (n, depth) True for the matches.
        remedy: what to do about it.
    """
    nearest = np.where(relevant & (distances > 0), distances, np.inf)
    nearest = np.sort(nearest, axis=1)[:, :NEIGHBOURS]
    if nearest.shape[1] < 2:
        return
    rows = np.flatnonzero(count_mates(nearest, np.count_nonzero(relevant, axis=1)))
    p_value = bdtrc(len(rows) - 1, len(distances), 3 * FALSE_RATE) if len(rows) else 1.0
    if p_value <= LEVEL:
        warnings.warn(
            f"{len(rows)} of {len(distances)} {queries} ({_row_list(rows)}) have matches in the "
            "gallery that are far nearer than all others. If these are photographs of one moment "
            "or frames of one video, each query finds its own burst, which no new picture does, "
            f"and the guarantee is not for new pictures: {remedy}",
            stacklevel=3,
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
    mates = np.array([np.searchsorted(row, BURST * row) for row in distances])
    mates[np.arange(distances.shape[1]) > 2 * mates] = 0
    rows, n_neighbours = np.arange(n), n_others + len(numbers)

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
    """The distance up to which queries may be copies."""
    return NEAR * float(np.median(distances[:, min(1, distances.shape[1] - 1)]))


def _among(own_digests: Digests, others: Digests) -> NDArray[np.bool_]:
    """Return whether each is one of others, which are more numerous and looked up, not sorted."""
    shared = set(own_digests.tolist()).intersection(others.tolist())
    return np.array([digest in shared for digest in own_digests.tolist()], bool)


def _repeated(own_digests: Digests) -> NDArray[np.bool_]:
    """Return whether each came before."""
    again = np.ones(len(own_digests), bool)
    again[np.unique(own_digests, return_index=True)[1]] = False
    return again


def _refuse(wrong: NDArray[np.bool_], what: str, therefore: str) -> None:
    rows = np.flatnonzero(wrong)
    if len(rows):
        raise InvalidData(f"{len(rows)} of {len(wrong)} {what} ({_row_list(rows)}), {therefore}")


def _row_list(rows: NDArray[np.int64]) -> str:
    listed = ", ".join(map(str, rows[:SHOWN].tolist())) + ", ..." * (len(rows) > SHOWN)
    return f"row{'s' * (len(rows) > 1)} {listed}"
