"""Arguments of commands from the fields of configurations, and options as NAME=VALUE."""

from __future__ import annotations

import json
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields
from functools import partial
from inspect import getdoc
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rcir.errors import InvalidConfig
from rcir.risk.options import RequestOption, request_options

FLAGS = {"alphas": "alpha", "store": "feedback"}  # others are called like their fields


def add_request_options(parser: ArgumentParser, images: Action | None = None) -> None:
    """Add a flag for each option of a request; words behind a value are images, if there are."""
    for option in request_options():
        kind: dict[str, Any] = {"action": "store_true"}
        if option.kind is not bool:
            value = "|".join(option.choices) or option.name.upper()
            kind = {
                "action": partial(_Values, option=option, images=images),
                "nargs": "+" if option.table else 1,
                "metavar": (value, "NAME=NUMBER") if option.table else value,
            }
        flag = f"--{option.name.replace('_', '-')}"
        parser.add_argument(flag, default=option.default, help=option.help, **kind)


class _Values(Action):
    """Read the value of an option; words that follow NAME=NUMBER, or one value, are images."""

    def __init__(self, *, option: RequestOption, images: Action | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.option, self.images = option, images

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, flag: str | None = None
    ) -> None:
        last = next((n for n, word in enumerate(values) if n and "=" not in word), len(values))
        try:
            setattr(namespace, self.dest, self.option.parse(values[:last]))
        except InvalidConfig as error:
            raise ArgumentError(self, str(error)) from None
        if images := values[last:]:
            if self.images is None:
                raise ArgumentError(self, f"unexpected words: {' '.join(images)}")
            self.images(parser, namespace, images)
            self.images.required = False


def add_fields(
    parser: ArgumentParser,
    kind: Any,
    without: Collection[str] = (),
    positional: str | None = None,
    optional: bool = False,
) -> None:
    """Add an argument for each field of a configuration, described as in its docstring.

    An index is --index and --index-option; one field may be positional, and `optional`.
    """
    hints, texts = get_type_hints(kind), _descriptions(kind)
    for field in fields(kind):
        if field.name == "index":
            from rcir.index import IndexConfig

            add_index(parser, IndexConfig.kind)
        elif field.name == positional:
            text = texts[field.name].removesuffix(".")
            nargs = "?" if optional else None
            parser.add_argument(field.name, nargs=nargs, type=hints[field.name], help=text)
        elif field.name not in without:
            flag = FLAGS.get(field.name, field.name)
            settings = _settings(hints[field.name], field.default, flag.upper())
            text = texts[field.name].removesuffix(".")
            name = f"--{flag.replace('_', '-')}"
            parser.add_argument(name, dest=field.name, help=text, **settings)


def _settings(hint: Any, default: Any, metavar: str) -> dict[str, Any]:
    """Return the settings of an argument for a field of some type."""
    arguments, origin = get_args(hint), get_origin(hint)
    settings: dict[str, Any] = {"required": True} if default is MISSING else {"default": default}
    if hint is bool:
        return {"action": "store_true"}
    if origin is Literal:
        return settings | {"choices": arguments}
    if origin is tuple:
        settings["nargs"] = "+"
    kind = arguments[0] if arguments else hint  # such as float, float | None, tuple[float, ...]
    return settings | {"type": kind, "metavar": metavar}


def _descriptions(kind: type) -> dict[str, str]:
    """Return the description of each argument in a docstring."""
    texts: dict[str, str] = {}
    name = ""
    for line in (getdoc(kind) or "").partition("Args:\n")[2].splitlines():
        if line.startswith(" " * 5):  # the description goes on
            texts[name] += f" {line.strip()}"
        else:
            name, _, texts[name] = line.strip().partition(": ")
    return texts


def read_fields(kind: Any, options: Namespace, **further: Any) -> Any:
    """Return the configuration that the arguments of `add_fields`, and further values, describe."""
    names = {field.name for field in fields(kind)} & vars(options).keys()
    values = {name: getattr(options, name) for name in names} | further
    if "alphas" in values:
        values["alphas"] = tuple(values["alphas"])
    if "index" in values:
        values["index"] = read_index(options)
    return kind(**values)


def add_index(parser: ArgumentParser, default: str | None) -> None:
    """Add the arguments that choose an index, which is required without a default."""
    parser.add_argument(
        "--index",
        metavar="KIND",
        default=default,
        required=default is None,
        help="flat (exact), hnsw, ivf, ivf-pq, factory or gpu; for collections lancedb, ...",
    )
    parser.add_argument(
        "--index-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the index, such as ef_search=400; as often as needed",
    )


def read_index(options: Namespace) -> Any:
    """Return the configuration of `add_index`'s arguments; values that are not JSON are text."""
    from rcir.index import IndexConfig

    def read(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return IndexConfig(options.index, read_values("--index-option", options.index_option, read))


def read_values(flag: str, words: Sequence[str], read: Callable[[str], Any]) -> dict[str, Any]:
    """Return values by name from words such as NAME=VALUE."""
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise InvalidConfig(f"{flag} {word!r}: give NAME=VALUE, such as size=200")
        values[name] = read(text)
    return values
