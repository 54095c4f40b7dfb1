"""Test queries with their sets and pictures, for the report: chosen by rules, not by hand."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.splits import SearchedSplits
from rcir.data import ImageSet
from rcir.errors import RcirError
from rcir.retrieval.answer import UNLIKE, items_of
from rcir.retrieval.pictures import PICTURES
from rcir.risk import Guarantee

SIDE, SMALL_SIDE = 320, 96  # pixels of the longer side of a thumbnail
QUALITIES = (80, 60, 40)  # of JPEG: the first with which a thumbnail has at most `MAX_BYTES`
MAX_BYTES, MAX_PAGE_BYTES = 20_000, 1_300_000  # of a thumbnail, and of all; base64 adds a third
SHOWN_ITEMS, SHOWN_FIRST = 12, 3  # of a set, in a row and in the list of missed queries
SHOWN_MISSED, MAX_PICTURED = 200, 30  # missed queries, and those with pictures
# The places of queries that are found, in the order of set size and uncertainty.
PLACES = {"easy": 0.05, "typical": 0.5, "hard": 0.95}


class Thumbnail(NamedTuple):
    """A small picture: its address, which holds the picture itself, and its size in pixels."""

    source: str
    width: int
    height: int


class Item(NamedTuple):
    """A gallery item at a place of the ranking; its name is its label, or its id without one."""

    place: int
    id: str
    name: str
    probability: float
    is_match: bool
    picture: Thumbnail | None


@dataclass(frozen=True)
class Example:
    """A test query with its set.

    Attributes:
        kind: "easy", "typical", "hard", "missed", "unmatched", "unlike" or "several".
        id, name: the query's, and its label, or again its id if it has none.
        picture: of the query, if there is one.
        n_pictures: number of pictures that are searched as this one query.
        items: the first items of the set, the likeliest first.
        size: of the set.
        is_found: True if the set holds a match.
        match: the first match, if it is outside the set and among the candidates.
        unlike: p-value, small for queries unlike the calibration queries.
        at_most, at_least: shares of the test queries with at most, or at least, this size.
    """

    kind: str
    id: str
    name: str
    picture: Thumbnail | None
    n_pictures: int
    items: list[Item]
    size: int
    is_found: bool
    match: Item | None
    unlike: float
    at_most: float
    at_least: float


@dataclass(frozen=True)
class Gathered:
    """What the report shows of single test queries, at the certified level nearest to `ALPHA`.

    Attributes:
        rows: one query of each kind that exists.
        missed: the first missed queries, those with the largest sets first.
        n_missed: number of all missed queries.
        labels: a gallery picture of each label to show; None if there is none.
        n_labels, n_never_missed: number of labels of test queries.
        called_unlike: how many test queries without a match, and with one, are unlike the
            calibration queries.
    """

    rows: list[Example] = field(default_factory=list)
    missed: list[Example] = field(default_factory=list)
    n_missed: int = 0
    labels: Mapping[str, Thumbnail | None] = field(default_factory=dict)
    n_labels: int = 0
    n_never_missed: int = 0
    called_unlike: tuple[int, int] = (0, 0)


class Pictures:
    """Thumbnails of gallery items and test queries, as long as the page has room for them.

    They are those of the data set, or lie in the folder `Retriever.origin["pictures"]`.
    """

    def __init__(self, splits: SearchedSplits) -> None:
        self._images, self._retriever, self._room = splits.images, splits.retriever, MAX_PAGE_BYTES
        self._gallery = None
        if splits.data is not None and splits.images.pictures:
            self._gallery = splits.data.gallery.images

    def of_item(self, position: int, side: int = SIDE) -> Thumbnail | None:
        """Return the picture of a gallery item; None if there is none that can be read."""
        if self._gallery is not None:
            return self._thumbnail(self._gallery[position], side)
        return self._of_id(self._retriever.ids[position], side)

    def of_query(self, row: int, side: int = SIDE) -> Thumbnail | None:
        """Return the picture of a test query; None if there is none that can be read."""
        if self._images.pictures:
            return self._thumbnail(self._images.images[row], side)
        is_item = self._retriever.searcher.options.leave_one_out  # others are not in the folder
        return self._of_id(self._images.ids[row], side) if is_item else None

    def _of_id(self, name: str, side: int) -> Thumbnail | None:
        folder = self._retriever.origin.get(PICTURES)
        return None if folder is None else self._thumbnail(Path(folder) / name, side)

    def _thumbnail(self, source: Any, side: int) -> Thumbnail | None:
        try:
            from PIL import Image

            from rcir.data import read_image  # imports torch

            image = Image.fromarray(read_image(source, channels=3))
        except (RcirError, OSError, ValueError, ImportError):
            return None
        image.thumbnail((side, side))
        for quality in QUALITIES:
            file = io.BytesIO()
            image.save(file, "JPEG", quality=quality, optimize=True)
            if file.tell() <= MAX_BYTES:
                break
        if file.tell() > self._room:
            return None
        self._room -= file.tell()
        encoded = base64.b64encode(file.getvalue()).decode()
        return Thumbnail(f"data:image/jpeg;base64,{encoded}", *image.size)


def gather(splits: SearchedSplits, guarantee: Guarantee, labels: list[str]) -> Gathered:
    """Choose test queries, and answer them with the sets of a guarantee of the miss risk.

    `labels` are those of which to show a picture.
    """
    test, pictures = splits.scored_test, Pictures(splits)
    sizes, unlike = test.sizes(guarantee.threshold), splits.arranged_test.results.require("unlike")
    missed, low = test.require("match_rank") > sizes, unlike <= UNLIKE
    rows = _answer(splits, guarantee, _choose(splits, sizes), pictures, SIDE, SHOWN_ITEMS)
    shown = {name: _label_picture(splits, pictures, name) for name in labels}
    lost = np.flatnonzero(missed)
    lost = lost[np.argsort(-sizes[lost], kind="stable")][:SHOWN_MISSED]
    in_list = [("missed" if test.matchable[row] else "unmatched", row) for row in lost.tolist()]
    if (classes := class_names(splits.images)) is None:
        classes = np.zeros(len(missed))
    n_labels = len(np.unique(classes))
    return Gathered(
        rows,
        _answer(splits, guarantee, in_list, pictures, SMALL_SIDE, SHOWN_FIRST),
        n_missed=int(missed.sum()),
        labels=shown,
        n_labels=n_labels,
        n_never_missed=n_labels - len(np.unique(classes[missed])),
        called_unlike=(int(low[~test.matchable].sum()), int(low[test.matchable].sum())),
    )


def class_names(images: ImageSet) -> NDArray[Any] | None:
    """Return the class of each image; None without classes."""
    return images.attributes.get("class", images.labels)


def _choose(splits: SearchedSplits, sizes: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Return one test query (kind, row) of each kind that exists, no query twice.

    Queries are ordered by set size, then uncertainty. Of those that are found, the ones at `PLACES`
    are taken; of other kinds, the one in the middle; of those with a match that are unlike the
    calibration queries, the most unlike, unless some have no match.
    """
    test, results = splits.scored_test, splits.arranged_test.results
    order, free = np.lexsort((results.uncertainty, sizes)), np.ones(len(sizes), bool)
    missed, unlike = test.require("match_rank") > sizes, results.require("unlike")
    pictures, chosen = results.require("queries").pictures, []

    def take(kind: str, is_kind: NDArray[np.bool_], place: float = 0.5) -> None:
        rows = order[(is_kind & free)[order]]
        if len(rows):
            row = int(rows[round(place * (len(rows) - 1))])
            free[row] = False
            chosen.append((kind, row))

    for kind, place in PLACES.items():
        take(kind, ~missed, place)
    take("missed", missed & test.matchable)
    if not test.matchable.all():
        take("unmatched", ~test.matchable)
    elif (least := unlike[free].min(initial=1)) <= UNLIKE:
        take("unlike", unlike == least)
    if pictures is not None:
        take("several", pictures > 1)
    return chosen


def _answer(
    splits: SearchedSplits,
    guarantee: Guarantee,
    chosen: list[tuple[str, int]],
    pictures: Pictures,
    side: int,
    most: int,
) -> list[Example]:
    """Return queries (kind, row) with at most so many items of their sets.

    Only the first `MAX_PICTURED` have pictures.
    """
    if not chosen:
        return []
    rows = np.array([row for _, row in chosen])
    searcher, calibration = splits.retriever.searcher, splits.retriever.require_calibration()
    test, results = splits.scored_test, splits.arranged_test.results[rows]
    every_size, ranks = test.sizes(guarantee.threshold), test.require("match_rank")[rows]
    ranking, sizes = calibration.miss_rule.sets(results, guarantee)
    outside = np.isfinite(ranks) & (ranks > sizes)
    reach = np.where(outside, ranks, sizes).astype(np.int64)
    positions, _ = items_of(searcher, results, ranking, reach)
    fitted = calibration.match_probabilities(guarantee)
    likely, _ = fitted.of_sets(ranking, reach, guarantee)
    ids = searcher.ids[positions].tolist()
    labels, classes = searcher.named_labels(positions) or ids, class_names(splits.images)
    names = splits.images.ids if classes is None else classes
    relevant, unlike = test.require("relevant"), results.require("unlike")
    counts, examples, start = results.require("queries").pictures, [], 0
    for number, (kind, row) in enumerate(chosen):
        size, last, shows = int(sizes[number]), int(reach[number]), number < MAX_PICTURED
        places = [*range(min(size, most)), *([last - 1] if outside[number] else [])]
        items = [
            Item(
                place + 1,
                ids[cell],
                str(labels[cell]),
                float(likely[cell]),
                bool(relevant[row, place]),
                pictures.of_item(int(positions[cell]), side) if shows else None,
            )
            for place in places
            for cell in [start + place]
        ]
        examples.append(
            Example(
                kind=kind,
                id=splits.images.ids[row],
                name=str(names[row]),
                picture=pictures.of_query(row, side) if shows else None,
                n_pictures=1 if counts is None else int(counts[number]),
                items=items[: min(size, most)],
                size=size,
                is_found=bool(ranks[number] <= size),
                match=items[-1] if outside[number] else None,
                unlike=float(unlike[number]),
                at_most=float((every_size <= size).mean()),
                at_least=float((every_size >= size).mean()),
            )
        )
        start += last
    return examples


def _label_picture(splits: SearchedSplits, pictures: Pictures, name: str) -> Thumbnail | None:
    """Return the first picture in the gallery of a label, by the name of its class."""
    classes, labels = class_names(splits.images), splits.images.labels
    if classes is None or labels is None or splits.retriever.labels is None:
        return None
    label = labels[np.asarray(classes).astype(str) == name][0]
    items = np.flatnonzero(splits.retriever.labels == label)
    return pictures.of_item(int(items[0])) if len(items) else None
