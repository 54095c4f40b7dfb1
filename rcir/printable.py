"""Names of files and classes as text that a terminal, a page or a figure can show."""

from __future__ import annotations

import unicodedata


def printable(text: object) -> str:
    r"""The text, with escapes for what no printer shows.

    A file system allows names with line ends, control sequences of terminals, marks that turn the
    direction of writing, and bytes that are not UTF-8, which Python keeps as lone surrogates.

    Example:
        >>> printable("person 3"), printable("a\nb"), printable("\x1b[31mred"), printable("\udcff")
        ('person 3', 'a\\nb', '\\x1b[31mred', '\\udcff')
    """
    letters = str(text)
    if letters.isprintable():
        return letters
    return "".join(
        letter
        if letter.isprintable() or unicodedata.category(letter) == "Zs"
        else repr(letter)[1:-1]
        for letter in letters
    )
