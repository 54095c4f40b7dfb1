"""Relevance of a gallery and of its queries, from labels in any form that users pass."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.names import LABEL_KINDS, as_label_lists, as_labels, is_list, normalise
from rcir.data.relevance import Relevance, SameLabel, SharedLabel, WithinRadius
from rcir.embedding import as_numpy
from rcir.errors import InvalidData, printable
from rcir.metrics.labels import UNMATCHED


def gallery_relevance(labels: object, ids: Sequence[str]) -> tuple[Relevance, dict[int, str]]:
    """Return the relevance of gallery items, and the names of their labels by number.

    `labels` are whole numbers or texts; lists of texts, where items match that share one; a
    `Relevance`; or None, if the labels of a query will be the ids of its true matches.
    """
    if labels is None:
        return SharedLabel.items(len(ids)), dict(enumerate(ids))
    if isinstance(labels, Relevance):
        return labels, {}
    values = _read_labels(labels)
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "iu":
            return SameLabel(values.astype(np.int64)), {}
        unique_labels, codes = _number_texts(values)
        return SameLabel(codes), dict(enumerate(unique_labels))
    unique_labels = sorted({name for names in values for name in names})
    column = {name: number for number, name in enumerate(unique_labels)}
    lists = [[column[name] for name in names] for names in values]
    return SharedLabel.from_lists(lists, len(unique_labels)), dict(enumerate(unique_labels))


def query_relevance(
    labels: object, gallery: Relevance, names: Mapping[int, str]
) -> tuple[Relevance, dict[int, str]]:
    """Return the relevance of queries, and the names of the labels of gallery and queries.

    The labels are of the gallery's kind; one that no gallery item has matches nothing.

    Example:
        >>> gallery, names = gallery_relevance(["pear", "fig"], ["a", "b"])
        >>> relevance, names = query_relevance(["fig", "plum"], gallery, names)
        >>> relevance.totals(gallery), names
        (array([1, 0]), {0: 'fig', 1: 'pear', 2: 'plum'})
    """
    if labels is None:
        raise InvalidData("the queries have no labels, which define true matches: pass labels")
    if isinstance(labels, Relevance):
        require_same_kind(labels, gallery)
        return labels, dict(names)
    of_items = isinstance(gallery, SharedLabel) and gallery.of_items
    values = _read_labels(labels, as_ids=of_items)
    if isinstance(gallery, SameLabel) and isinstance(values, np.ndarray):
        return _same_label(values, gallery, names)
    if not isinstance(gallery, SharedLabel):
        raise _mismatch(values, gallery)
    lists = [[name] for name in values.tolist()] if isinstance(values, np.ndarray) else values
    column = {name: number for number, name in names.items()} if of_items else _numbers_of(names)
    absent = [name for names in lists for name in names if name not in column]
    if absent and of_items:
        examples = ", ".join(printable(str(name)) for name in absent[:3])
        raise InvalidData(
            f"{len(absent)} true matches are not in the gallery ({examples}): use ids of the "
            "gallery, or label both"
        )
    if not all(isinstance(name, str) for names in lists for name in names):
        raise _mismatch(values, gallery)
    _require_same_spelling(absent, column)
    columns = [[column[name] for name in names if name in column] for names in lists]
    n_labels = gallery.labels.shape[1]
    return SharedLabel.from_lists(columns, n_labels, gallery.of_items), dict(names)


def reported_relevance(
    labels: Sequence[Any], gallery: Relevance, names: Mapping[int, str]
) -> tuple[Relevance, dict[int, str]]:
    """Return what `query_relevance` does; queries with None as their label match nothing."""
    if isinstance(gallery, SharedLabel):
        known = ([] if label is None else label for label in labels)
        lists = [[label] if isinstance(label, str) else label for label in known]
        return query_relevance(lists, gallery, names)
    if not isinstance(gallery, SameLabel):
        raise InvalidData(
            f"the gallery's images match by {gallery.kind}: feedback can report labels or ids of "
            "true matches only"
        )
    codes = np.full(len(labels), UNMATCHED, np.int64)
    rows = [row for row, label in enumerate(labels) if label is not None]
    if not rows:
        return SameLabel(codes), dict(names)
    relevance, all_names = query_relevance([labels[row] for row in rows], gallery, names)
    codes[rows] = np.asarray(relevance.single)
    return SameLabel(codes), all_names


def added_relevance(
    labels: object,
    n: int,
    gallery: Relevance,
    names: Mapping[int, str],
    numbered: bool = False,
) -> tuple[Relevance, dict[int, str]]:
    """Return the relevance of n items that are added to a gallery, and the names of all labels.

    With `numbered`, whole numbers are labels even if these have names. Lists must have no new ones.
    """
    if isinstance(labels, Relevance):
        relevance, all_names = labels, dict(names)
    else:
        values = _read_labels(labels)
        lists = [] if isinstance(values, np.ndarray) else values
        if new := sorted({name for each in lists for name in each}.difference(names.values())):
            raise InvalidData(
                f"no gallery item has the labels {', '.join(map(printable, new[:3]))}, and which "
                "earlier queries had them is unknown: build the retriever again"
            )
        numbers = numbered and isinstance(values, np.ndarray) and values.dtype.kind in "iu"
        relevance, all_names = query_relevance(values, gallery, {} if numbers else names)
        all_names = dict(names) if numbers else all_names
    if len(relevance) != n:
        raise InvalidData(f"got {len(relevance)} labels for {n} images")
    gallery.joined(relevance)  # raises if they are of another kind
    return relevance, all_names


def example_labels(relevance: Relevance, names: Mapping[int, str]) -> str:
    """Return up to three labels, or places, of some images, for messages."""
    what = "labels"
    if isinstance(relevance, WithinRadius):
        n, what, examples = len(relevance), "places", relevance.places[:3].round(3).tolist()
    else:
        if isinstance(relevance, SameLabel):
            labels = relevance.labels[relevance.labels != UNMATCHED]
        elif isinstance(relevance, SharedLabel):
            labels = relevance.labels.tocoo().coords[1]
            what = "ids of matches" if relevance.of_items else what
        else:
            return relevance.kind
        unique_labels = np.unique(labels).tolist()
        n, examples = len(unique_labels), [names.get(x, x) for x in unique_labels[:3]]
    shown = ", ".join(printable(repr(example)) for example in examples) or f"no {what}"
    return f"{shown}, ... ({n} {what})" if n > 3 else shown


def require_same_kind(queries: Relevance | None, gallery: Relevance) -> None:
    """Raise `InvalidData` unless queries match as the gallery's images do."""
    kind = None if queries is None else queries.kind
    if kind != gallery.kind:
        raise InvalidData(
            f"the gallery's images match by {gallery.kind}, the queries by {kind}: label both alike"
        )
    if isinstance(queries, WithinRadius) and isinstance(gallery, WithinRadius):
        (radius, dim), expected = ((x.radius, x.places.shape[1]) for x in (queries, gallery))
        if (radius, dim) != expected:
            raise InvalidData(
                f"the queries have a radius of {radius} and places of {dim} coordinates, the "
                f"gallery {expected[0]} and {expected[1]}: make them equal"
            )


def _same_label(
    values: NDArray[Any], gallery: SameLabel, names: Mapping[int, str]
) -> tuple[SameLabel, dict[int, str]]:
    """Return what `query_relevance` does, for one label each; a new name gets the next number."""
    numbers = values.dtype.kind in "iu"
    if numbers == bool(names):
        raise _mismatch(values, gallery)
    if numbers:
        return SameLabel(values.astype(np.int64)), {}
    number = _numbers_of(names)
    unique_labels, codes = _number_texts(values)
    new = [name for name in unique_labels if name not in number]
    _require_same_spelling(new, number)
    new_names = dict(enumerate(new, max(names) + 1))
    number |= {name: code for code, name in new_names.items()}
    table = np.array([number[name] for name in unique_labels], np.int64)
    return SameLabel(table[codes]), dict(names) | new_names


def _number_texts(values: NDArray[np.str_]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the distinct texts in order, and the place of each text among them."""
    texts = values.tolist()  # sorting the array would take the memory of the longest text for each
    distinct = sorted(set(texts))
    place = {text: number for number, text in enumerate(distinct)}
    return distinct, np.fromiter(map(place.__getitem__, texts), np.int64, len(texts))


def _numbers_of(names: Mapping[int, str]) -> dict[str, int]:
    """Return the number of each label by its name, as it is and as labels are compared."""
    numbers = {name: number for number, name in names.items()}
    for name, number in list(numbers.items()):
        numbers.setdefault(normalise(name), number)
    return numbers


def _require_same_spelling(new: Sequence[Any], names: Collection[str]) -> None:
    """Raise `InvalidData` if new labels differ from others as 2.0 does from 2.

    A table that was saved with a column of floats has texts such as "2.0".
    """
    for name in new:
        whole = re.fullmatch(r"(-?\d+)(\.0+)?", str(name))
        if whole is None:
            continue
        other = f"{name}.0" if whole[2] is None else whole[1]
        if other in names:
            raise InvalidData(
                f"some labels are texts such as {name!r}, which the gallery has as {other!r}: "
                "write whole numbers alike in both, without a decimal point"
            )


def _are_one_hot(labels: Sequence[Any] | NDArray[Any]) -> bool:
    """Return whether each row is zero but for one 1, and rows have the same length, at least 2."""
    rows = [list(row) for row in labels]
    return len(rows[0]) > 1 and all(
        len(row) == len(rows[0]) and row.count(1) == 1 and row.count(0) == len(row) - 1
        for row in rows
    )


def _mismatch(values: object, gallery: Relevance) -> InvalidData:
    dtype = values.dtype if isinstance(values, np.ndarray) else "lists"
    return InvalidData(
        f"labels of the queries are of type {dtype}, and the gallery's images match by "
        f"{gallery.kind}: use labels of the gallery's type"
    )


def _read_labels(labels: object, as_ids: bool = False) -> NDArray[Any] | list[list[str]]:
    """Return one label each, as an array of whole numbers or texts; or lists of texts.

    With `as_ids`, texts are ids, which are compared as they are.
    """
    labels = as_numpy(labels)
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence | np.ndarray):
        raise InvalidData(
            f"labels is a {type(labels).__name__}: give {LABEL_KINDS}, one for each image"
        )
    plain = isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind != "O"
    are_lists = [] if plain else [is_list(label) for label in labels]
    if any(are_lists):
        if all(are_lists) and _are_one_hot(labels):
            raise InvalidData(
                f"labels are one-hot, {len(labels[0])} numbers for each image: give the number of "
                "the label, such as labels.argmax(axis=1)"
            )
        if not all(are_lists) or not all(isinstance(x, str) for names in labels for x in names):
            raise InvalidData(
                f"labels are {str(labels)[:40]}: give {LABEL_KINDS}, one for each image"
            )
        lists = [list(names) for names in labels]
        return lists if as_ids else as_label_lists(lists, "labels")
    if as_ids and all(isinstance(label, str) for label in labels):
        return np.array(labels, np.str_)
    values = as_labels(labels, "labels")
    return values if isinstance(values, np.ndarray) else np.array(values, np.str_)
