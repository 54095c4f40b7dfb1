"""Relevance of a gallery and of its queries from labels as people have them.

`as_labels`, `as_texts` and `as_label_lists` hold the one rule by which labels, groups and clusters
are read, in Python and from all files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.names import require_utf8, to_nfc
from rcir.data.relevance import Relevance, SameLabel, SharedLabel, WithinRadius
from rcir.embedding import as_numpy
from rcir.errors import InvalidData, printable
from rcir.metrics.labels import UNMATCHED

LABEL_KINDS = "whole numbers, texts, or lists of texts"
MISSING_VALUES = (  # what programs write where a value is missing
    *("", "nan", "NaN", "NAN", "None", "NaT", "NA", "<NA>", "N/A", "n/a", "#N/A"),
    *("null", "NULL"),
)
SEPARATORS = ";|"  # between the labels of one item
EXACT_FLOATS = 2**53  # up to here, every whole number is a float of 64 bits


def gallery_relevance(labels: object, ids: Sequence[str]) -> tuple[Relevance, dict[int, str]]:
    """Return the relevance of gallery items, and the names of their labels.

    Args:
        labels: a label for each, whole numbers or texts; a list of texts for each, where items
            match that share one; a `Relevance`, such as places (`WithinRadius`); or None, if the
            labels of a query will be the ids of its true matches.
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
    """Return the relevance of queries of a gallery, and the names of the labels of both.

    Args:
        labels: of the kind of the gallery's, see `gallery_relevance`. A label that no gallery item
            has matches nothing; from lists it is left out.
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

    Args:
        labels: of the kind of the gallery's.
        n: number of items.
        gallery, names: the gallery's relevance, and the names of its labels.
        numbered: whether whole numbers are labels even if these have names, as in a data set that
            has both.

    Raises:
        InvalidData: they are of another kind or number; or are lists with a new label, which
            earlier queries may have had.
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
    """Return up to three labels, or places, of some images, for messages.

    Args:
        relevance: of the images.
        names: names of the labels.

    Example:
        >>> relevance, names = gallery_relevance(["pear", "fig", "plum", "date"], list("abcd"))
        >>> example_labels(relevance, names)
        "'date', 'fig', 'pear', ... (4 labels)"
    """
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
        numbers.setdefault(_normalise(name), number)
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


def _mismatch(values: object, gallery: Relevance) -> InvalidData:
    dtype = values.dtype if isinstance(values, np.ndarray) else "lists"
    return InvalidData(
        f"labels of the queries are of type {dtype}, and the gallery's images match by "
        f"{gallery.kind}: use labels of the gallery's type"
    )


def _read_labels(labels: object, as_ids: bool = False) -> NDArray[Any] | list[list[str]]:
    """Return one label each, as an array of whole numbers or texts; or lists of texts.

    Args:
        labels: as people have them.
        as_ids: whether the texts are ids, which are compared as they are.
    """
    labels = as_numpy(labels)
    if isinstance(labels, str | bytes) or not isinstance(labels, Sequence | np.ndarray):
        raise InvalidData(
            f"labels is a {type(labels).__name__}: give {LABEL_KINDS}, one for each image"
        )
    plain = isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind != "O"
    are_lists = [] if plain else [_is_list(label) for label in labels]
    if any(are_lists):
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


# The rule by which labels are read


def as_labels(
    values: Sequence[Any] | NDArray[Any], what: str, first: int = 0
) -> NDArray[np.int64] | list[str]:
    """Return labels as they are compared: whole numbers, or texts.

    Blanks around a text are ignored, and letters are composed (NFC). Floats that are whole numbers
    are these numbers. Texts are never numbers: "007", "7" and "7.0" are three labels.

    Args:
        values: n numbers or texts.
        what: the name of the values, for messages.
        first: the number of the first row, for messages.

    Raises:
        InvalidData: some are missing (`MISSING_VALUES`), do not fit into 64 bits, or are of other
            types or of several.

    Example:
        >>> as_labels([2.0, 1.0], "labels").tolist(), as_labels([" pear", "fig"], "labels")
        ([2, 1], ['pear', 'fig'])
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        smallest, largest = int(values.min(initial=0)), int(values.max(initial=0))
        if smallest > UNMATCHED and largest < 2**63:
            return np.asarray(values, np.int64)
    entries, kinds = _to_python(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "mM":
        kinds = {values.dtype.type}
    rows = range(first, first + len(entries))
    if kinds and all(issubclass(kind, str) for kind in kinds):
        return _normalise_texts(entries, what, rows)
    _require_present(entries, kinds, what, rows)
    if not _are_numbers(kinds):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidData(f"{what} are of type {names}: give {LABEL_KINDS}, one for each image")
    if not all(issubclass(kind, Integral) for kind in kinds):
        wrong = [not _is_whole(entry) for entry in entries]
        _refuse(wrong, entries, what, rows, "are not whole numbers", "give texts")
        entries = [int(entry) for entry in entries]
    if entries and not (min(entries) > UNMATCHED and max(entries) < 2**63):
        wrong = [not UNMATCHED < entry < 2**63 for entry in entries]
        advice = "give all labels as texts, in gallery and queries alike"
        _refuse(wrong, entries, what, rows, "do not fit into signed integers of 64 bits", advice)
    return np.array(entries, np.int64)


def as_texts(values: Sequence[Any] | NDArray[Any], what: str, first: int = 0) -> list[str]:
    """Return names, such as those of groups, as texts that are compared as labels are.

    Values of other types than numbers and texts, such as dates, are written by `str`.

    Args:
        values, what, first: see `as_labels`.

    Raises:
        InvalidData: some are missing (`MISSING_VALUES`).

    Example:
        >>> as_texts([1.0, 2.5], "groups"), as_texts([True, False], "groups")
        (['1', '2.5'], ['True', 'False'])
    """
    entries, kinds = _to_python(values)
    rows = range(first, first + len(entries))
    _require_present(entries, kinds, what, rows)
    _require_no_lists(kinds, what)
    return _normalise_texts(_write_texts(entries, kinds), what, rows)


def as_ids(values: Sequence[Any] | NDArray[Any], what: str, first: int = 0) -> list[str]:
    """Return ids as texts. Numbers are written as `as_texts` does, and texts are left as they are.

    Args:
        values, what, first: see `as_labels`.

    Raises:
        InvalidData: some are missing or blank.

    Example:
        >>> as_ids([7.0, 8.0], "ids"), as_ids(["a ", "NA"], "ids")
        (['7', '8'], ['a ', 'NA'])
    """
    entries, kinds = _to_python(values)
    rows = range(first, first + len(entries))
    _require_no_lists(kinds, what)
    wrong = [
        not (entry.strip() if isinstance(entry, str) else _is_present(entry)) for entry in entries
    ]
    _refuse(wrong, entries, what, rows, "are missing", "name each row")
    return _write_texts(entries, kinds)


def as_label_lists(values: Sequence[Any], what: str, first: int = 0) -> list[list[str]]:
    """Return the labels of items that may have several, as texts that are compared as labels are.

    Args:
        values: a list for each item, or a text with `SEPARATORS`; None, NaN and blank texts are not
            labels.
        what, first: see `as_labels`.

    Raises:
        InvalidData: a value is of another type, a text is one of `MISSING_VALUES`, or the lists are
            one-hot vectors.

    Example:
        >>> as_label_lists(["red; small", ["red"], None], "labels")
        [['red', 'small'], ['red'], []]
    """
    lists = []
    for row, value in enumerate(values):
        if isinstance(value, str):
            value = re.split(f"[{SEPARATORS}]", value)
        parts = list(value) if _is_list(value) else None if _is_present(value) else []
        if parts is None or any(map(_is_list, parts)):
            raise InvalidData(
                f"{what}: row {first + row} is {printable(str(value))[:40]}: give lists of texts, "
                f"or texts with a separator ({' or '.join(SEPARATORS)})"
            )
        lists.append([part for part in parts if not isinstance(part, str) or part.strip()])
    entries, kinds = _to_python([part for parts in lists for part in parts])
    rows = [first + row for row, parts in enumerate(lists) for _ in parts]
    _require_present(entries, kinds, what, rows)
    lengths = set(map(len, lists))
    if _are_numbers(kinds) and len(lengths) == 1 and max(lengths) > 1 and set(entries) <= {0, 1}:
        raise InvalidData(
            f"{what} are lists of zeros and ones: list the names of the labels of each item"
        )
    texts = iter(_normalise_texts(_write_texts(entries, kinds), what, rows))
    return [[next(texts) for _ in parts] for parts in lists]


def _to_python(values: Sequence[Any] | NDArray[Any]) -> tuple[list[Any], set[type]]:
    """Return values as Python's own, and their types."""
    if isinstance(values, np.ndarray):
        dates = values.dtype.kind in "mM"  # NumPy would make numbers of them
        values = (values.astype(str) if dates else values).tolist()
    entries = list(values)
    kinds = set(map(type, entries))
    if any(hasattr(kind, "item") for kind in kinds):  # scalars of NumPy and PyTorch
        entries = [entry.item() if hasattr(entry, "item") else entry for entry in entries]
        kinds = set(map(type, entries))
    return entries, kinds


def _is_list(value: object) -> bool:
    """Return whether a value holds others; scalars of PyTorch have a length, too."""
    if isinstance(value, str | bytes | Mapping) or getattr(value, "ndim", 1) == 0:
        return False
    return isinstance(value, Collection | np.ndarray)


def _require_no_lists(kinds: set[type], what: str) -> None:
    for kind in kinds:
        if issubclass(kind, Collection) and not issubclass(kind, str):
            raise InvalidData(f"{what} are of type {kind.__name__}: give one text for each row")


def _is_present(value: object) -> bool:
    return str(value).strip() not in MISSING_VALUES


def _is_whole(number: Any) -> bool:
    """Return whether a number is whole, and a float exact."""
    if isinstance(number, Integral):
        return True
    return math.isfinite(number) and number == int(number) and abs(number) <= EXACT_FLOATS


def _are_numbers(kinds: set[type]) -> bool:
    return all(
        issubclass(kind, Real | Decimal) and not issubclass(kind, bool | np.bool_) for kind in kinds
    )


def _write_texts(entries: list[Any], kinds: set[type]) -> list[str]:
    """Return numbers and other values as texts; floats that are whole without a point."""
    if kinds and _are_numbers(kinds):
        return [str(int(entry) if _is_whole(entry) else entry) for entry in entries]
    return [str(entry) for entry in entries]


def _normalise(text: str) -> str:
    """Return the text that is compared, see `as_labels`."""
    return to_nfc(text.strip())


def _normalise_texts(texts: list[str], what: str, rows: Sequence[int]) -> list[str]:
    """Return texts as they are compared, or raise `InvalidData` if some are missing."""
    compared = {text: _normalise(text) for text in set(texts)}
    if any(text in MISSING_VALUES for text in compared.values()):
        _require_present(texts, {str}, what, rows)
    require_utf8(compared.values(), what, "rename them")
    return [compared[text] for text in texts]


def _require_present(entries: list[Any], kinds: set[type], what: str, rows: Sequence[int]) -> None:
    """Raise `InvalidData` if some entries are missing."""
    if all(issubclass(kind, Integral) for kind in kinds):
        return
    wrong = [not _is_present(entry) for entry in entries]
    advice = "leave these rows out, or fill the values in; a real name of this kind must be changed"
    _refuse(wrong, entries, what, rows, "are missing, or stand for a missing value", advice)


def _refuse(
    wrong: Sequence[bool],
    entries: Sequence[Any],
    what: str,
    rows: Sequence[int],
    why: str,
    advice: str,
) -> None:
    """Raise `InvalidData` if some entries are wrong; the message names the first three."""
    places = np.flatnonzero(wrong).tolist()
    if not places:
        return
    examples = ", ".join(
        f"row {rows[place]} ({printable(repr(entries[place]))[:40]})" for place in places[:3]
    )
    raise InvalidData(
        f"{what}: {len(places)} of {len(entries)} values {why}, first {examples}: {advice}"
    )
