"""Names found on first use: classes by import path, and what a package exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from rcir.errors import InvalidConfig
from rcir.extras import naming_extras


def find_class(option: str, name: str, table: Mapping[str, str]) -> type[Any]:
    """A class of a table, or one of the user's own.

    Args:
        option: what the name is called in messages, such as "index.kind".
        name: a name in the table, or an import path, "package.module:Class".
        table: names and the import paths of their classes.

    Raises:
        InvalidConfig: there is no such name or module, or no class of that name in it.

    Example:
        >>> find_class("counter", "collections:Counter", {}).__name__
        'Counter'
        >>> find_class("counter", "tally", {"plain": "collections:Counter"})
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: counter 'tally' is unknown; choose one of plain, or give the \
import path of your own, "package.module:Class"
    """
    path = str(table.get(name, name))
    if ":" not in path:
        raise InvalidConfig(
            f"{option} {name!r} is unknown; choose one of {', '.join(table)}, or give the import "
            'path of your own, "package.module:Class"'
        )
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(
            f"{option} {name!r} cannot be imported ({error}): install the package it is in, or "
            "put its folder on PYTHONPATH"
        ) from error
    if not isinstance(found, type):
        raise InvalidConfig(f"{option} {name!r} is no class")
    return found


def import_path(kind: type) -> str:
    """The path by which `find_class` finds a class.

    Example:
        >>> from collections import Counter
        >>> import_path(Counter)
        'collections:Counter'
    """
    return f"{kind.__module__}:{kind.__qualname__}"


def lazily(
    package: str, module_globals: dict[str, Any], homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` (PEP 562) of a package that imports its names on first use.

    Args:
        package: its name.
        module_globals: its `globals()`.
        homes: modules, and the names that the package exports of each.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extras():
            value = module_globals[name] = getattr(import_module(home_of[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*module_globals, *home_of})

    return find, names
