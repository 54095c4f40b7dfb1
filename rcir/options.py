"""Options by name, as command lines spell them and functions accept them, and default levels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from rcir.errors import InvalidConfig, as_option

ALPHA = 0.1  # where one alpha decides
ALPHAS = (0.05, 0.1, 0.2)  # that are shown and compared
DELTA = 0.1
NOT_OPTIONS = {"root", "seed"}  # parameters of readers
KIND_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    NoneType: "null",
}

EXAMPLES = """
rcir demo --output runs/demo
rcir embed photos --model timm:tf_efficientnet_lite0 --output photos.parquet
rcir certify photos --model timm:tf_efficientnet_lite0 --output runs/birds
rcir certify gallery.parquet --queries queries.parquet --alpha 0.05 0.1
rcir plan --alpha 0.1 --retriever runs/birds/retriever
rcir verify --retriever runs/birds/retriever --queries queries.parquet --images photos
rcir retrieve photo.jpg --retriever runs/birds/retriever --alpha 0.1
rcir serve runs/birds/retriever
rcir data check folder --option path=photos
rcir train --config configs/digits-btl.yaml --name first
rcir tune --config configs/tune-digits-btl.yaml --calibrate true
rcir calibrate --run runs/first --alpha 0.05 0.1
rcir compare runs/first runs/second --choose
rcir recalibrate runs/birds/retriever --add new.parquet
rcir index runs/birds/retriever --index hnsw --output runs/birds-hnsw
rcir evaluate --retriever runs/first/retriever
rcir register runs/first --name birds --alias champion
rcir completion bash > ~/.local/share/bash-completion/completions/rcir
"""


def require_options(
    where: str,
    reader: Callable[..., Any],
    options: Mapping[str, Any],
    further: Mapping[str, Any] | None = None,
) -> None:
    """Raise `InvalidConfig` unless a reader accepts the options by its annotations.

    `further` are kinds of options beside its own, and `where` is the options' name in messages.
    """
    parameters = {n: p for n, p in signature(reader).parameters.items() if n not in NOT_OPTIONS}
    catch_all = {n for n, p in parameters.items() if p.kind is Parameter.VAR_KEYWORD}
    hints = get_type_hints(reader)
    kinds = {name: hints.get(name, Any) for name in parameters} | dict(further or {})
    if catch_all:
        kinds = dict.fromkeys(options, Any) | kinds
    require_kinds(where, kinds, options)
    needed = {n for n, p in parameters.items() if p.default is Parameter.empty} - catch_all
    if missing := sorted(needed - options.keys()):
        raise InvalidConfig(f"{where}: {', '.join(missing)} is required")


def require_kinds(where: str, kinds: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise `InvalidConfig` for the first option that is unknown or not of its kind."""
    if unknown := [str(name) for name in options if name not in kinds]:
        meant, (group, of, _) = did_you_mean(unknown, kinds), where.partition(" of ")
        of_file = of and group != "options" and not meant
        advice = f". {as_option(group, {})} leaves out those of a file" if of_file else ""
        raise InvalidConfig(
            f"{where}: there is no option {', '.join(unknown)}{meant}; there are "
            f"{', '.join(kinds) or 'none'}{advice}"
        )
    for name, value in options.items():
        if not _fits(value, kinds[name]):
            expected = _kind_name(kinds[name])
            raise InvalidConfig(f"{where}: {name} is {value!r}; it must be {expected}")


def _fits(value: object, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is Sequence:  # but not text, a sequence of letters
        return isinstance(value, list | tuple) and all(_fits(v, arguments[0]) for v in value)
    if origin is dict:  # the reader checks its values
        return isinstance(value, dict)
    if origin is Mapping:
        names, numbers = arguments
        return isinstance(value, Mapping) and all(
            _fits(name, names) and _fits(number, numbers) for name, number in value.items()
        )
    if kind in (int, float):
        allowed = Integral if kind is int else Real
        return isinstance(value, allowed) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def _kind_name(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_kind_name, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (dict, Mapping):
        return "values by name"
    if origin is Sequence:
        return f"a list, each {_kind_name(arguments[0])}"
    return KIND_NAMES.get(kind, str(kind))


def require_at_least(options: object, prefix: str = "", **minima: float) -> None:
    """Raise `InvalidConfig` for an option that is below its minimum or not finite; None is fine."""
    for name, least in minima.items():
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise InvalidConfig(f"{prefix}{name} is {value}; it must be at least {least}")


def require_text(name: str, value: object) -> str:
    """Return a text, as Python's own, or raise `InvalidConfig` if it is not one."""
    if not isinstance(value, str):
        raise InvalidConfig(f"{name} is {value!r}; it must be a text")
    return str(value)


def require_choice(name: str, value: object, literal: Any) -> None:
    """Raise `InvalidConfig` unless a value is in a `Literal`."""
    if value not in get_args(literal):
        choices = ", ".join(get_args(literal))
        raise InvalidConfig(f"{name} {value!r} is unknown; choose one of {choices}")


def did_you_mean(words: Iterable[str], known: Iterable[str]) -> str:
    """Return a question that names what resembles unknown words, or nothing."""
    choices = list(known)
    unknown = [word for word in words if word not in choices]
    meant = [close[0] for word in unknown if (close := get_close_matches(word, choices, 1))]
    return f" (did you mean {' and '.join(dict.fromkeys(meant))}?)" if meant else ""


def list_examples(command: str) -> str:
    """Return the examples of a command, as the last lines of its help."""
    lines = [f"  {line}" for line in EXAMPLES.splitlines() if line.startswith(f"rcir {command} ")]
    return "\n".join(["example:" if len(lines) == 1 else "examples:", *lines])


class Suggesting:
    """Lets a parser of command lines suggest the options and values that were meant."""

    def error(self, message: str, *further: Any) -> NoReturn:
        """Print the message with a suggestion, and exit with status 2."""
        flags = [flag.replace("_", "-") for flag in self._option_string_actions]  # type: ignore[attr-defined]
        words = re.findall(r"--[\w.-]+", message)
        words += [f"--{name}" for name in re.findall(r"Option '(\w[\w.]*)", message)]  # of files
        meant = did_you_mean([word.replace("_", "-") for word in words], flags)
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            meant = did_you_mean([choice[1]], re.findall(r"[\w-]+", choice[2]))
        report: Callable[..., NoReturn] = super().error  # type: ignore[misc]
        report(message + meant, *further)


def spelled(words: Sequence[str], separator: str) -> list[str]:
    """Return the words of a command line with one separator in the names of options."""

    def spell(word: str) -> str:
        name, sign, value = word.partition("=")
        return f"--{name[2:].replace('-', '_').replace('_', separator)}{sign}{value}"

    return [spell(word) if word.startswith("--") and len(word) > 2 else word for word in words]
