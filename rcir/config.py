"""Command lines and YAML files as typed configurations."""

from __future__ import annotations

import json
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar, cast

import yaml
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter

from rcir import trust
from rcir.errors import InvalidConfig, RcirError
from rcir.options import Suggesting, list_examples, spelled

Config = TypeVar("Config")


class Parser(Suggesting, ArgumentParser):
    """A parser that suggests the option that was meant."""


class Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help with types and defaults, and examples as they are written."""


def make_parser(kind: type, command: str, reads_folders: bool = False) -> ArgumentParser:
    """Return the parser of a command: `--config FILE`, and dotted options; see `parse`."""
    parser = Parser(
        prog=f"rcir {command}",
        description=kind.__doc__ and kind.__doc__.partition("\n")[0],
        usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",  # short, as errors print it
        epilog=list_examples(command),
        formatter_class=Formatter,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these options")
    parser.add_class_arguments(kind, as_group=False)
    for action in parser._actions:
        if getattr(action, "_typehint", None) is bool:  # the option alone means true
            action.nargs, action.const = "?", True
    if "--alphas" in parser._option_string_actions:
        parser.add_argument("--alpha", type=float, nargs="+", help="the same as --alphas")
    if reads_folders:
        trust.add_arguments(parser, "_")
    return parser


def parse(
    kind: type[Config], argv: Sequence[str] | None, command: str, reads_folders: bool = False
) -> Config:
    """Return a configuration from the command line of a job such as "train".

    `argv` are arguments without the program's name; None for those of this process. `reads_folders`
    adds the options of `rcir.trust`. An argument that cannot be parsed ends the process with status
    2; `InvalidConfig` is raised for a value that the configuration refuses.
    """
    parser = make_parser(kind, command, reads_folders)
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    words = spelled(sys.argv[1:] if argv is None else argv, "_")
    printed, words = "--print_config" in words, [w for w in words if w != "--print_config"]
    try:
        filled = parser.instantiate(parser.parse_args(words))
    except (UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(
            f"the file of --config is not YAML with options ({type(error).__name__}): see "
            f"rcir {command} --print-config"
        ) from error
    if reads_folders:
        trust.apply_arguments(filled)
    values = {name: value for name, value in vars(filled).items() if name in names}
    if "alphas" in names and filled.alpha is not None:
        values["alphas"] = tuple(filled.alpha)
    config: Any = kind(**values)
    if printed:  # with the defaults that it has completed
        print(yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False), end="")
        sys.exit(0)
    return cast("Config", config)


def from_plain(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """Return a configuration from nested plain values, each checked against its type.

    Raises `InvalidConfig` if an option does not exist, or its value has another type or is refused.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False)
    try:
        filled = parser.instantiate(parser.parse_object(dict(values)))
        return kind(**vars(filled))
    except (ArgumentError, TypeError, ValueError) as error:
        if isinstance(error, RcirError):
            raise
        reason = " ".join(str(error).split())
        raise InvalidConfig(f"{kind.__name__} does not accept these values: {reason}") from error


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of nested plain values as one level of dotted names."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        else:
            flat[prefix] = value

    walk("", config)
    return flat
