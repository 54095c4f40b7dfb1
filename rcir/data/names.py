"""Names of files and labels: one Unicode form, and UTF-8 only."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from rcir.errors import InvalidData

RENAME = "rename it, for instance with `convmv -f latin1 -t utf8 --notest -r FOLDER`"


def to_nfc(name: str) -> str:
    """Return a name in Unicode's composed form (NFC), by which names are compared.

    macOS stores an accent as a character of its own, other systems mostly as part of the letter.

    Example:
        >>> "e\\u0301" == "é", to_nfc("e\\u0301") == "é"
        (False, True)
    """
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def require_utf8(names: Iterable[str], where: str, remedy: str = RENAME) -> None:
    r"""Raise `InvalidData` if a name is not UTF-8, so that no answer could contain it.

    Python keeps bytes of file names that are not UTF-8 as lone surrogates.

    Args:
        names: to check.
        where: what has the names, for the message.
        remedy: what to do, for the message.

    Example:
        >>> require_utf8(["a.jpg", "caf\udce9.jpg"], "photos")
        Traceback (most recent call last):
        rcir.errors.InvalidData: photos: the name 'caf\udce9.jpg' is not UTF-8 (1 of 2 names): ...
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
