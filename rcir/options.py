"""Options by name: how a command line spells them, and whether a function accepts them.

And the usual levels of guarantees: the alphas that are shown and compared, the one of them that
decides where one has to, and delta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rcir.errors import InvalidConfig

ALPHA = 0.1
ALPHAS = (0.05, 0.1, 0.2)
DELTA = 0.1
GIVEN = {"root", "seed"}  # to readers, but not as options
NAMES: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a text"},
    **{Path: "a path", NoneType: "null"},
}


def require_options(
    where: str,
    reader: Callable[..., Any],
    options: Mapping[str, Any],
    further: Mapping[str, Any] | None = None,
) -> None:
    """Raise `InvalidConfig` unless a reader takes the options; their ranges are the reader's.

    Args:
        where: what the options are called in messages.
        reader: its annotations state the kinds: numbers, bool, text, paths, `Literal`, sequences.
        options: to be checked.
        further: names of further options, and their kinds.

    Example:
        >>> def read(root: Path, size: int = 0) -> None: ...
        >>> require_options("options", read, {"size": 2.5})
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: options: size is 2.5; it must be a whole number
    """
    parameters = {n: p for n, p in signature(reader).parameters.items() if n not in GIVEN}
    catch_all = {n for n, p in parameters.items() if p.kind is Parameter.VAR_KEYWORD}
    names = [*parameters, *(further or {})]
    if (unknown := [name for name in options if name not in names]) and not catch_all:
        raise InvalidConfig(
            f"{where}: there is no option {', '.join(map(str, unknown))}; there are "
            f"{', '.join(names) or 'none'}"
        )
    needed = {n for n, p in parameters.items() if p.default is Parameter.empty} - catch_all
    if missing := sorted(needed - options.keys()):
        raise InvalidConfig(f"{where}: {', '.join(missing)} is needed; give it")
    kinds = get_type_hints(reader) | dict(further or {})
    for name, value in options.items():
        if name in kinds and not _fits(value, kinds[name]):
            expected = _kind_name(kinds[name])
            raise InvalidConfig(f"{where}: {name} is {value!r}; it must be {expected}")


def _fits(value: object, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in arguments)
    if origin is Sequence:
        # Text is a sequence of letters, which nobody means.
        return isinstance(value, list | tuple) and all(_fits(v, arguments[0]) for v in value)
    if origin is dict:  # whose it is checks what it holds
        return isinstance(value, dict)
    if kind in (int, float):
        allowed = Integral if kind is int else Real
        return isinstance(value, allowed) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def _kind_name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_kind_name(each) for each in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is dict:
        return "values by name"
    if origin is Sequence:
        return f"a list, each {_kind_name(arguments[0])}"
    return NAMES.get(kind, str(kind))


def require_at_least(options: object, **least: float) -> None:
    """Raise `InvalidConfig` of the first named option of a method that is too small."""
    for name, value in least.items():
        if (given := getattr(options, name)) < value:
            raise InvalidConfig(f"encoder.options.{name} is {given}; at least {value}")


def require_choices(options: object, *names: str) -> None:
    """Raise `InvalidConfig` of the first named option, a `Literal`, that is none of its values."""
    hints = get_type_hints(type(options))
    for name in names:
        require_choice(f"encoder.options.{name}", getattr(options, name), hints[name])


def require_choice(name: str, value: object, literal: Any) -> None:
    """Raise `InvalidConfig` unless a value is one of those of a `Literal`.

    Example:
        >>> require_choice("loss.form", "cubic", Literal["linear", "squared"])
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: loss.form 'cubic' is unknown; choose one of linear, squared
    """
    if value not in get_args(literal):
        choices = ", ".join(get_args(literal))
        raise InvalidConfig(f"{name} {value!r} is unknown; choose one of {choices}")


def spelled(words: Sequence[str], separator: str) -> list[str]:
    """Return the words of a command line, with one separator in the names of all options.

    Example:
        >>> spelled(["--num_workers", "2", "--index-option=ef_search=4"], "-")
        ['--num-workers', '2', '--index-option=ef_search=4']
    """

    def one(word: str) -> str:
        name, sign, value = word.partition("=")
        return f"--{name[2:].replace('-', '_').replace('_', separator)}{sign}{value}"

    return [one(word) if word.startswith("--") and len(word) > 2 else word for word in words]
