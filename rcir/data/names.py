"""Names and labels: one Unicode form, UTF-8 only, and one rule by which they are read.

`as_labels`, `as_texts`, `as_ids` and `as_label_lists` hold this rule, in Python and for all files.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData, printable
from rcir.metrics.labels import UNMATCHED

RENAME = "rename it, for instance with `convmv -f latin1 -t utf8 --notest -r FOLDER`"
LABEL_KINDS = "whole numbers, texts, or lists of texts"
MISSING_VALUES = (  # what programs write where a value is missing
    *("", "nan", "NaN", "NAN", "None", "NaT", "NA", "<NA>", "N/A", "n/a", "#N/A"),
    *("null", "NULL"),
)
SEPARATORS = ";|"  # between the labels of one item
EXACT_FLOATS = 2**53  # up to here, every whole number is a float of 64 bits


def to_nfc(name: str) -> str:
    """Return a name in Unicode's composed form (NFC), by which names are compared.

    macOS stores an accent as a character of its own, other systems mostly as part of the letter.
    """
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def require_utf8(names: Iterable[str], where: str, remedy: str = RENAME) -> None:
    r"""Raise `InvalidData` if a name is not UTF-8, so that no answer could contain it.

    Python keeps bytes of file names that are not UTF-8 as lone surrogates. The message says which
    place (`where`) has the name, and what to do (`remedy`).
    """
    listed = list(names)
    try:
        "".join(listed).encode()
    except UnicodeEncodeError:
        wrong = [name for name in listed if any("\ud800" <= letter <= "\udfff" for letter in name)]
        raise InvalidData(
            f"{where}: the name {wrong[0]!r} is not UTF-8 ({len(wrong)} of {len(listed)} names): "
            f"{remedy}"
        ) from None


def normalise(text: str) -> str:
    """Return the text that is compared, see `as_labels`."""
    return to_nfc(text.strip())


def as_labels(
    values: Sequence[Any] | NDArray[Any], what: str, first: int = 0
) -> NDArray[np.int64] | list[str]:
    """Return labels as they are compared: whole numbers, or texts.

    Blanks around a text are ignored, and letters are composed (NFC). Floats that are whole numbers
    are these numbers. Texts are never numbers: "007", "7" and "7.0" are three labels. Missing
    values (`MISSING_VALUES`), numbers beyond 64 bits and values of other or mixed types are
    refused. Messages call the values `what`, and count rows from `first`.
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
    """
    entries, kinds = _to_python(values)
    rows = range(first, first + len(entries))
    _require_present(entries, kinds, what, rows)
    _require_no_lists(kinds, what)
    return _normalise_texts(_write_texts(entries, kinds), what, rows)


def as_ids(values: Sequence[Any] | NDArray[Any], what: str, first: int = 0) -> list[str]:
    """Return ids as texts. Texts are left as they are; numbers are written as in `as_texts`."""
    entries, kinds = _to_python(values)
    rows = range(first, first + len(entries))
    _require_no_lists(kinds, what)
    wrong = [
        not (entry.strip() if isinstance(entry, str) else _is_present(entry)) for entry in entries
    ]
    _refuse(wrong, entries, what, rows, "are missing", "name each row")
    return _write_texts(entries, kinds)


def as_label_lists(values: Sequence[Any], what: str, first: int = 0) -> list[list[str]]:
    """Return several labels of each item as texts, without blank ones.

    Each value is a list, or a text with `SEPARATORS`; None, NaN and blank texts are empty lists.
    One-hot vectors are refused.
    """
    lists = []
    for row, value in enumerate(values):
        if isinstance(value, str):
            value = re.split(f"[{SEPARATORS}]", value)
        parts = list(value) if is_list(value) else None if _is_present(value) else []
        if parts is None or any(map(is_list, parts)):
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


def is_list(value: object) -> bool:
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


def _normalise_texts(texts: list[str], what: str, rows: Sequence[int]) -> list[str]:
    """Return texts as they are compared, or raise `InvalidData` if some are missing."""
    compared = {text: normalise(text) for text in set(texts)}
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
