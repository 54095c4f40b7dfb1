"""Relevance of a gallery and of its queries from labels as people have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.relevance import Relevance, SameLabel, SharedLabel, WithinRadius
from rcir.embedding import as_numpy
from rcir.errors import InvalidData, printable

LABEL_KINDS = "whole numbers, texts, or lists of texts"
UNMATCHED = np.iinfo(np.int64).min  # the label of a query that matches no gallery item


def gallery_relevance(labels: object, ids: Sequence[str]) -> tuple[Relevance, dict[int, str]]:
    """The relevance of gallery items, and the names of their labels.

    Args:
        labels: a label for each, whole numbers or texts; a list of texts for each, where items
            match that share one; a `Relevance`, such as places (`WithinRadius`); or None, where the
            labels of a query are to be the ids of its true matches.
        ids: of the items.

    Raises:
        InvalidData: they are none of these.

    Example:
        >>> relevance, names = gallery_relevance(["pear", "fig", "pear"], ["a", "b", "c"])
        >>> relevance.labels.tolist(), names
        ([1, 0, 1], {0: 'fig', 1: 'pear'})
    """
    if labels is None:
        return SharedLabel.items(len(ids)), dict(enumerate(ids))
    if isinstance(labels, Relevance):
        return labels, {}
    values = _listed(labels)
    if isinstance(values, np.ndarray):
        if values.dtype.kind in "iu":
            return SameLabel(values.astype(np.int64)), {}
        unique_labels, codes = np.unique(values, return_inverse=True)
        return SameLabel(codes.astype(np.int64)), dict(enumerate(unique_labels.tolist()))
    names = sorted({name for some in values for name in some})
    column = {name: number for number, name in enumerate(names)}
    lists = [[column[name] for name in some] for some in values]
    return SharedLabel.of_lists(lists, len(names)), dict(enumerate(names))


def query_relevance(
    labels: object, gallery: Relevance, names: Mapping[int, str]
) -> tuple[Relevance, dict[int, str]]:
    """The relevance of queries of a gallery, and the names of the labels of both.

    Args:
        labels: of the kind that the gallery's are, see `gallery_relevance`. One that no gallery
            item has matches nothing; where labels are lists it is left out.
        gallery, names: the gallery's relevance, and the names of its labels.

    Raises:
        InvalidData: they are of another kind, or a true match is not a gallery item.

    Example:
        >>> gallery, names = gallery_relevance(["pear", "fig"], ["a", "b"])
        >>> relevance, names = query_relevance(["fig", "plum"], gallery, names)
        >>> relevance.totals(gallery), names
        (array([1, 0]), {0: 'fig', 1: 'pear', 2: 'plum'})
    """
    if labels is None:
        raise InvalidData("the queries have no labels: what is a true match cannot be told")
    if isinstance(labels, Relevance):
        require_same_kind(labels, gallery)
        return labels, dict(names)
    values = _listed(labels)
    if isinstance(gallery, SameLabel) and isinstance(values, np.ndarray):
        return _same_label(values, gallery, names)
    if not isinstance(gallery, SharedLabel):
        raise _mismatch(values, gallery)
    lists = [[name] for name in values.tolist()] if isinstance(values, np.ndarray) else values
    column = {name: number for number, name in names.items()}
    absent = [name for some in lists for name in some if name not in column]
    if absent and gallery.of_items:
        examples = ", ".join(printable(str(name)) for name in absent[:3])
        raise InvalidData(
            f"{len(absent)} true matches are no gallery items ({examples}): give ids of the "
            "gallery, or labels to both"
        )
    if not all(isinstance(name, str) for some in lists for name in some):
        raise _mismatch(values, gallery)
    columns = [[column[name] for name in some if name in column] for some in lists]
    n_labels = gallery.labels.shape[1]
    return SharedLabel.of_lists(columns, n_labels, gallery.of_items), dict(names)


def reported_relevance(
    labels: Sequence[Any], gallery: Relevance, names: Mapping[int, str]
) -> tuple[Relevance, dict[int, str]]:
    """Return what `query_relevance` does, for queries of which some match no gallery item.

    Args:
        labels: the label of each query, as for `query_relevance`; None if it matches nothing.
        gallery, names: the gallery's relevance, and the names of its labels.

    Raises:
        InvalidData: as `query_relevance`, or gallery items match by location.

    Example:
        >>> gallery, names = gallery_relevance(["pear", "fig"], ["a", "b"])
        >>> relevance, _ = reported_relevance(["fig", None], gallery, names)
        >>> relevance.totals(gallery).tolist()
        [1, 0]
    """
    if isinstance(gallery, SharedLabel):
        lists = [
            [] if label is None else [label] if isinstance(label, str) else label
            for label in labels
        ]
        return query_relevance(lists, gallery, names)
    if not isinstance(gallery, SameLabel):
        raise InvalidData(
            f"the gallery's images match by {gallery.kind}: feedback can report labels or ids of "
            "true matches only"
        )
    codes = np.full(len(labels), UNMATCHED, np.int64)
    rows = [row for row, label in enumerate(labels) if label is not None]
    all_names = dict(names)
    if rows:
        labelled, all_names = query_relevance([labels[row] for row in rows], gallery, names)
        codes[rows] = np.asarray(labelled.single)
    return SameLabel(codes), all_names


def added_relevance(
    labels: object,
    n: int,
    gallery: Relevance,
    names: Mapping[int, str],
    numbered: bool = False,
) -> tuple[Relevance, dict[int, str]]:
    """The relevance of n items that come into a gallery, and the names of all labels.

    Args:
        labels: of the kind that the gallery's are.
        n: number of items.
        gallery, names: the gallery's relevance, and the names of its labels.
        numbered: whether whole numbers are labels as well where these have names, as in a data set
            that gave both; else names are all that is known of them.

    Raises:
        InvalidData: they are of another kind or number; or are lists, and one is new, of which it
            is not known whether queries before had it.
    """
    if isinstance(labels, Relevance):
        relevance, all_names = labels, dict(names)
    else:
        values = _listed(labels)
        lists = [] if isinstance(values, np.ndarray) else values
        new = {name for some in lists for name in some}.difference(names.values())
        if new:
            raise InvalidData(
                f"labels that no gallery item has ({', '.join(map(printable, sorted(new)[:3]))}): "
                "which queries before had them is not known; build the retriever again"
            )
        numbers = numbered and isinstance(values, np.ndarray) and values.dtype.kind in "iu"
        relevance, all_names = query_relevance(values, gallery, {} if numbers else names)
        all_names = dict(names) if numbers else all_names
    if len(relevance) != n:
        raise InvalidData(f"{n} images, {len(relevance)} labels: give one each")
    gallery.joined(relevance)  # raises where they are of another kind
    return relevance, all_names


@singledispatch
def example_labels(relevance: Relevance, names: Mapping[int, str]) -> str:
    """Return up to three labels, or places, of some images, for messages.

    Args:
        relevance: of the images.
        names: names of the labels.

    Example:
        >>> relevance, names = gallery_relevance(["pear", "fig", "plum", "date"], list("abcd"))
        >>> example_labels(relevance, names)
        "'date', 'fig', 'pear', ... (4 labels)"
    """
    return relevance.kind


@example_labels.register
def _(relevance: SameLabel, names: Mapping[int, str]) -> str:
    labels = np.unique(relevance.labels[relevance.labels != UNMATCHED])
    return _examples([names.get(label, label) for label in labels.tolist()], "labels")


@example_labels.register
def _(relevance: SharedLabel, names: Mapping[int, str]) -> str:
    labels = np.unique(relevance.labels.tocoo().coords[1])
    what = "ids of matches" if relevance.of_items else "labels"
    return _examples([names.get(label, label) for label in labels.tolist()], what)


@example_labels.register
def _(relevance: WithinRadius, names: Mapping[int, str]) -> str:
    places = relevance.places[:3].round(3).tolist()
    return _examples(places, "places", len(relevance))


def _examples(values: Sequence[Any], what: str, number: int | None = None) -> str:
    """Return the first three values, and the number of all, by default that of the values."""
    number = len(values) if number is None else number
    shown = ", ".join(printable(repr(value)) for value in values[:3]) or f"no {what}"
    return f"{shown}, ... ({number} {what})" if number > 3 else shown


def require_same_kind(queries: Relevance | None, gallery: Relevance) -> None:
    """Raise `InvalidData` unless queries match as the gallery's images do."""
    kind = None if queries is None else queries.kind
    if kind != gallery.kind:
        raise InvalidData(
            f"the gallery's images match by {gallery.kind}, the queries by {kind}: both must know "
            "the same of their images"
        )
    if isinstance(queries, WithinRadius) and isinstance(gallery, WithinRadius):
        (query_form, gallery_form) = ((of.radius, of.places.shape[1]) for of in (queries, gallery))
        if query_form != gallery_form:
            raise InvalidData(
                f"the queries have a radius of {query_form[0]} and places of {query_form[1]} "
                f"coordinates, the gallery {gallery_form[0]} and {gallery_form[1]}: both must "
                "match alike"
            )


def _same_label(
    values: NDArray[Any], gallery: SameLabel, names: Mapping[int, str]
) -> tuple[SameLabel, dict[int, str]]:
    """One label each: whole numbers, or the names of labels; a new name gets the next number."""
    numbers = values.dtype.kind in "iu"
    if numbers == bool(names):
        raise _mismatch(values, gallery)
    if numbers:
        return SameLabel(values.astype(np.int64)), {}
    number = {name: label for label, name in names.items()}
    unique_labels, codes = np.unique(values, return_inverse=True)
    for name in unique_labels.tolist():
        number.setdefault(name, max(number.values()) + 1)
    table = np.array([number[name] for name in unique_labels.tolist()], np.int64)
    return SameLabel(table[codes]), {label: name for name, label in number.items()}


def _mismatch(values: object, gallery: Relevance) -> InvalidData:
    dtype = values.dtype if isinstance(values, np.ndarray) else "lists"
    return InvalidData(
        f"labels of the queries are of type {dtype}, and the gallery's images match by "
        f"{gallery.kind}: give labels of the type that the gallery has"
    )


def _listed(labels: object) -> NDArray[Any] | list[list[str]]:
    """One label each, as an array of whole numbers or texts; or lists of texts."""
    labels = as_numpy(labels)
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence | np.ndarray):
        raise InvalidData(
            f"labels is a {type(labels).__name__}: give {LABEL_KINDS}, one for each image"
        )
    if (
        len(labels)
        and all(isinstance(each, Sequence | np.ndarray | set) for each in labels)
        and (not any(isinstance(each, str) for each in labels))
    ):
        lists = [list(each) for each in labels]
        if all(isinstance(name, str) for some in lists for name in some):
            return lists
    else:
        kinds = {type(each) for each in labels} if not isinstance(labels, np.ndarray) else set()
        values = np.asarray(labels) if len(labels) else np.empty(0, np.int64)
        if values.dtype.kind == "O" and len({type(each) for each in values.tolist()}) == 1:
            values = np.asarray(values.tolist())  # a column of texts, or of whole numbers
        mixed = values.dtype.kind == "U" and any(not issubclass(kind, str) for kind in kinds)
        fits = values.ndim == 1 and values.dtype.kind in "iuU" and not mixed
        if fits and (values.dtype.kind != "u" or int(values.max(initial=0)) < 2**63):
            return values
    raise InvalidData(f"labels are {str(labels)[:40]}: give {LABEL_KINDS}, one for each image")
