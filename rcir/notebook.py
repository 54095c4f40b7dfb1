"""How notebooks show objects: as HTML of notebook.html, in which all text is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rcir.errors import printable

MAX_TILES = 12


def as_html(title: str, **parts: Any) -> str:
    """Return HTML of facts by name, tiles of n_items, notes, a table with a header, and remarks."""
    return str(_template().render(title=title, **parts))


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, trim_blocks=True)
    environment.filters["printable"] = printable
    return environment.get_template("notebook.html")


class Report:
    """Sentences, a table with a header, and remarks: as text and as HTML."""

    def _parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        raise NotImplementedError

    def __str__(self) -> str:
        sentences, table, remarks = self._parts()
        widths = [max(6, *map(len, column)) for column in zip(*table, strict=True)]
        rows = ("  ".join(map(str.rjust, row, widths)).rstrip() for row in table)
        return "\n".join([*sentences, *rows, *remarks])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        (title, *notes), table, remarks = self._parts()
        return as_html(title, notes=notes, table=table, remarks=remarks)
