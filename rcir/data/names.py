"""Names, labels and numbers, in Python and in files: one rule by which they are read."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData, printable
from rcir.metrics.labels import UNMATCHED

RENAME_ADVICE = "rename it, for instance with `convmv -f latin1 -t utf8 --notest -r FOLDER`"
LABEL_KINDS = "whole numbers, texts, or lists of texts"
MISSING_VALUES = (  # what programs write where a value is missing
    *("", "nan", "NaN", "NAN", "None", "NaT", "NA", "<NA>", "N/A", "n/a", "#N/A"),
    *("null", "NULL"),
)
LABEL_SEPARATORS = ";|"  # between the labels of one item
EXACT_FLOATS = 2**53  # up to here, every whole number is a float of 64 bits


def to_nfc(name: str) -> str:
    """Return a name in Unicode's composed form (NFC), by which names are compared.

    macOS stores an accent as a character of its own, other systems mostly as part of the letter.
    """
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def require_utf8(names: Iterable[str], where: str, remedy: str = RENAME_ADVICE) -> None:
    """Raise `InvalidData` if a name is not UTF-8, so that no answer could contain it.

    Python keeps bytes of file names that are not UTF-8 as lone surrogates.
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


def require_unique(
    names: Sequence[str], what: str, remedy: str, rows: Sequence[int] | None = None
) -> None:
    """Raise `InvalidData` if a name of a column comes twice; `rows` are counted from 1."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        last = len(names) - list(reversed(names)).index(twice[0])
        last = last if rows is None else rows[last - 1]
        raise InvalidData(
            f"{what} has {len(twice)} names twice, such as {printable(twice[0])}, row {last}: "
            f"{remedy}"
        )


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
    column = _Column(values, what, first)
    kinds = column.kinds
    if isinstance(values, np.ndarray) and values.dtype.kind in "mM":  # the column has texts
        kinds = {values.dtype.type}
    if kinds and all(issubclass(kind, str) for kind in kinds):
        return column.normalised()
    column.require_present()
    if not column.are_numbers:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidData(f"{what} are of type {names}: give {LABEL_KINDS}, one for each image")
    if not all(issubclass(kind, Integral) for kind in kinds):
        column.refuse(lambda entry: not _is_whole(entry), "are not whole numbers", "give texts")
    column.refuse(
        lambda entry: not UNMATCHED < entry < 2**63,
        "do not fit into signed integers of 64 bits",
        "give all labels as texts, in gallery and queries alike",
    )
    return np.array([int(entry) for entry in column.entries], np.int64)


def as_texts(values: Sequence[Any] | NDArray[Any], what: str, first: int = 0) -> list[str]:
    """Return names, such as those of groups, as texts that are compared as labels are.

    Values of other types than numbers and texts, such as dates, are written by `str`.
    """
    column = _Column(values, what, first)
    column.require_present()
    column.require_no_lists()
    return column.normalised()


def as_ids(values: Sequence[Any] | NDArray[Any], what: str, first: int = 0) -> list[str]:
    """Return ids as texts, which are left as they are; numbers are written as in `as_texts`."""

    def is_absent(entry: object) -> bool:
        return not entry.strip() if isinstance(entry, str) else _is_missing(entry)

    column = _Column(values, what, first)
    column.require_no_lists()
    column.refuse(is_absent, "are missing", "name each row")
    texts = column.texts()
    require_utf8(texts, what, "rename them")
    return texts


def as_label_lists(values: Sequence[Any], what: str, first: int = 0) -> list[list[str]]:
    """Return several labels of each item as texts, without blank ones.

    Each value is a list, or a text with `LABEL_SEPARATORS`; None, NaN and blank texts are empty
    lists. One-hot vectors are refused.
    """
    lists = []
    for row, value in enumerate(values, first):
        if isinstance(value, str):
            value = re.split(f"[{LABEL_SEPARATORS}]", value)
        parts = list(value) if is_list(value) else [] if _is_missing(value) else None
        if parts is None or any(map(is_list, parts)):
            raise InvalidData(
                f"{what}: row {row} is {printable(str(value))[:40]}: give lists of texts, or texts "
                f"with a separator ({' or '.join(LABEL_SEPARATORS)})"
            )
        lists.append([part for part in parts if not isinstance(part, str) or part.strip()])
    rows = [row for row, parts in enumerate(lists, first) for _ in parts]
    column = _Column([part for parts in lists for part in parts], what, rows)
    column.require_present()
    lengths = set(map(len, lists))
    of_one_length = len(lengths) == 1 and max(lengths) > 1
    if of_one_length and column.are_numbers and set(column.entries) <= {0, 1}:
        raise InvalidData(
            f"{what} are lists of zeros and ones: list the names of the labels of each item"
        )
    texts = iter(column.normalised())
    return [[next(texts) for _ in parts] for parts in lists]


def as_numbers(
    values: Sequence[Any] | NDArray[Any], what: str, first: int = 0
) -> NDArray[np.float64]:
    """Return numbers or their texts; `InvalidData` if one is missing or not finite."""
    try:
        numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    except (ValueError, TypeError):
        numbers = np.array([_number(value) for value in values], np.float64)
    if numbers.ndim != 1:
        raise InvalidData(f"{what} contains lists: use one number per row")
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        raise InvalidData(
            f"{what} is not a finite number in {len(wrong)} of {len(numbers)} rows, first in row "
            f"{first + wrong[0]} ({printable(repr(values[wrong[0]]))[:40]}): write numbers with a "
            "decimal point, or leave the rows out"
        )
    return numbers


def is_list(value: object) -> bool:
    """Return whether a value holds others; scalars of PyTorch have a length, too."""
    if isinstance(value, str | bytes | Mapping) or getattr(value, "ndim", 1) == 0:
        return False
    return isinstance(value, Collection | np.ndarray)


class _Column:
    """Values as Python's own, with their types; what they are and their rows, for messages."""

    def __init__(
        self, values: Sequence[Any] | NDArray[Any], what: str, rows: int | Sequence[int]
    ) -> None:
        if isinstance(values, np.ndarray):
            dates = values.dtype.kind in "mM"  # NumPy would make numbers of them
            values = (values.astype(str) if dates else values).tolist()
        # Scalars of NumPy and PyTorch have an item.
        with_item = {kind for kind in set(map(type, values)) if hasattr(kind, "item")}
        self.entries = [x.item() if type(x) in with_item else x for x in values]
        self.kinds: set[type] = set(map(type, self.entries))
        self.what = what
        self.rows = range(rows, rows + len(self.entries)) if isinstance(rows, int) else rows

    @property
    def are_numbers(self) -> bool:
        return all(
            issubclass(kind, Real | Decimal) and not issubclass(kind, bool) for kind in self.kinds
        )

    def texts(self) -> list[str]:
        """Return numbers and other values as texts; floats that are whole without a point."""
        if self.kinds and self.are_numbers:
            return [str(int(entry) if _is_whole(entry) else entry) for entry in self.entries]
        return [str(entry) for entry in self.entries]

    def normalised(self) -> list[str]:
        """Return texts as they are compared, or raise `InvalidData` if some are missing."""
        texts = self.texts()
        compared = {text: normalise(text) for text in set(texts)}
        if any(text in MISSING_VALUES for text in compared.values()):
            self.require_present()
        require_utf8(compared.values(), self.what, "rename them")
        return [compared[text] for text in texts]

    def require_no_lists(self) -> None:
        for kind in self.kinds:
            if issubclass(kind, Collection) and not issubclass(kind, str):
                raise InvalidData(
                    f"{self.what} are of type {kind.__name__}: give one text for each row"
                )

    def require_present(self) -> None:
        if not all(issubclass(kind, Integral) for kind in self.kinds):
            self.refuse(
                _is_missing,
                "are missing, or stand for a missing value",
                "leave these rows out, or fill the values in; a real name of this kind must be "
                "changed",
            )

    def refuse(self, is_wrong: Callable[[Any], bool], why: str, advice: str) -> None:
        """Raise `InvalidData` if some entries are wrong; the message names the first three."""
        wrong = [place for place, entry in enumerate(self.entries) if is_wrong(entry)]
        if wrong:
            examples = ", ".join(
                f"row {self.rows[place]} ({printable(repr(self.entries[place]))[:40]})"
                for place in wrong[:3]
            )
            raise InvalidData(
                f"{self.what}: {len(wrong)} of {len(self.entries)} values {why}, first {examples}: "
                f"{advice}"
            )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError):
        return np.nan


def _is_missing(value: object) -> bool:
    return str(value).strip() in MISSING_VALUES


def _is_whole(number: Any) -> bool:
    """Return whether a number is whole, and a float exact."""
    if isinstance(number, Integral):
        return True
    return math.isfinite(number) and number == int(number) and abs(number) <= EXACT_FLOATS
