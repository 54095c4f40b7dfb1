"""Command lines and YAML files as typed configurations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from rcir import trust
from rcir.errors import InvalidConfig, RcirError
from rcir.options import spelled

Config = TypeVar("Config")
MAX_YAML_BYTES, MAX_YAML_DEPTH, MAX_YAML_VALUES = 1 << 20, 50, 20_000


def parse(
    kind: type[Config],
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    reads_folders: bool = False,
) -> Config:
    """Return a configuration from a command line: `--config FILE` and dotted overrides.

    `argv` are arguments without the program's name; None for those of this process. If the
    configuration has `alphas`, `--alpha` accepts one or several of them; `reads_folders` adds the
    options of `rcir.trust`. An argument that cannot be parsed ends the process with status 2;
    `InvalidConfig` is raised for a value that the configuration refuses.
    """
    usage = "%(prog)s [--config FILE] [--OPTION VALUE ...]"  # short, as errors print it
    parser = ArgumentParser(prog=prog, description=description, usage=usage)
    parser.add_argument("--config", action="config", help="YAML file with any of these options")
    parser.add_class_arguments(kind, as_group=False)
    if reads_folders:
        trust.add_arguments(parser, "_")
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    words = spelled(sys.argv[1:] if argv is None else argv, "_")
    if "alphas" in names and "alpha" not in names:
        words = _join_alphas(words)
    files = [word for last, word in pairwise(words) if last == "--config"]
    files += [word.partition("=")[2] for word in words if word.startswith("--config=")]
    for file in files:
        _check_yaml(Path(file))
    filled = parser.instantiate(parser.parse_args(words))
    if reads_folders:
        trust.apply_arguments(filled)
    values = {name: value for name, value in vars(filled).items() if name in names}
    return kind(**values)


def _check_yaml(file: Path) -> None:
    """Raise `InvalidConfig` for a file that would end the parser, or keep it busy for hours."""
    if not file.is_file():
        return  # jsonargparse reports it
    refused = f"{file} is not a configuration: it"
    content = file.read_bytes()[: MAX_YAML_BYTES + 1]
    if len(content) > MAX_YAML_BYTES:
        raise InvalidConfig(f"{refused} has more than {MAX_YAML_BYTES:,} bytes")
    sizes: dict[str, int] = {}  # values below each anchor
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    try:
        for event in yaml.parse(content.decode()):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, 0))
                if len(open_nodes) > MAX_YAML_DEPTH:
                    raise InvalidConfig(f"{refused} is nested more than {MAX_YAML_DEPTH} deep")
                continue
            if isinstance(event, yaml.ScalarEvent):
                anchor, size = event.anchor, 1
            elif isinstance(event, yaml.AliasEvent):
                anchor, size = None, sizes.get(str(event.anchor), 1)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, size = open_nodes.pop()
            else:
                continue
            if anchor is not None:
                sizes[anchor] = size
            outer, total = open_nodes[-1]
            open_nodes[-1] = outer, total + size
            if total + size > MAX_YAML_VALUES:
                raise InvalidConfig(f"{refused} holds more than {MAX_YAML_VALUES:,} values")
    except (UnicodeDecodeError, yaml.reader.ReaderError) as error:
        raise InvalidConfig(f"{refused} is not text ({error})") from error
    except yaml.YAMLError:
        return  # jsonargparse reports it


def _join_alphas(words: Sequence[str]) -> list[str]:
    """Return the words with the levels that follow `--alpha` as the one value of `--alphas`."""
    joined, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if name == "--alpha":
            levels = [value] if value else []
            while rest and not rest[0].startswith("--"):
                levels.append(rest.pop(0))
            word = f"--alphas=[{','.join(levels)}]"
        joined.append(word)
    return joined


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
