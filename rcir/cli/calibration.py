"""`rcir certify`, `rcir evaluate`, `rcir recalibrate` and `rcir index`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rcir.errors import InvalidConfig


def add_certify_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: the fields of `CertificationConfig`."""
    from calibration import CertificationConfig

    _add_fields(parser, CertificationConfig)


def run_certify(options: Namespace) -> None:
    """Calibrate, measure, write the retriever and its report, and print the table."""
    from calibration import CertificationConfig, certify, print_outcome

    if status := print_outcome(certify(_config(CertificationConfig, options))):
        sys.exit(status)


def add_evaluate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: the fields of `EvaluationConfig`."""
    from calibration import EvaluationConfig

    _add_fields(parser, EvaluationConfig)


def run_evaluate(options: Namespace) -> None:
    """Measure, write the report, and print its table."""
    from calibration import NOTHING_CERTIFIED, EvaluationConfig, evaluate_retriever
    from calibration.screen import print_evaluation

    outcome = evaluate_retriever(_config(EvaluationConfig, options))
    print_evaluation(outcome.evaluation)
    print(f"report: {outcome.report}")
    if outcome.evaluation.refusal:
        sys.exit(NOTHING_CERTIFIED)


def add_recalibrate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever, and changes of its gallery."""
    parser.add_argument("retriever", type=Path, help="folder, which gets a new version")
    parser.add_argument("--add", type=Path, help="vectors to add to the gallery: see certify")
    parser.add_argument(
        "--remove", type=Path, help="file with the ids of items to remove, one on each line"
    )
    parser.add_argument(
        "--feedback",
        type=Path,
        help="file of a server (serve --feedback), whose labelled queries calibrate from now on",
    )
    parser.add_argument(
        "--since",
        type=_time,
        metavar="TIME",
        help="use only queries since this time, such as 2026-11-23T06:00 (local time) or "
        "2026-11-23T06:00Z",
    )


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
        time.timestamp()
    except (ValueError, OverflowError) as error:
        raise ArgumentTypeError(
            f"expected a time such as 2026-11-23T06:00, got {text!r} ({error})"
        ) from None
    return time


def run_recalibrate(options: Namespace) -> None:
    """Change the gallery, calibrate anew, print what is certified."""
    from calibration import recalibrate

    changes = options.add, options.remove, options.feedback, options.since
    print(recalibrate(options.retriever, *changes))
    print(f"retriever: {options.retriever}")


def add_index_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever and index."""
    parser.add_argument("retriever", type=Path, help="folder of the retriever")
    _add_index(parser, None)
    parser.add_argument(
        "--output", type=Path, help="folder to write to; unless given, that of the retriever"
    )
    parser.add_argument(
        "--alpha",
        type=float,
        nargs="+",
        help="levels at which sizes are compared; unless given, those that it was calibrated at",
    )
    parser.add_argument("--delta", type=float, help="likewise")


def run_index(options: Namespace) -> None:
    """Build, compare, calibrate, print."""
    from calibration import reindex
    from rcir.index import IndexConfig

    config = IndexConfig(options.index, option_values(options.index_option))
    reindexed = reindex(options.retriever, config, options.output, options.alpha, options.delta)
    print(reindexed)
    print(f"retriever: {reindexed.folder}")


def _add_fields(parser: ArgumentParser, kind: Any) -> None:
    """Add an argument for each field of a configuration, described as in its docstring.

    `alphas` are the values of --alpha. An index is --index and --index-option.
    """
    from rcir.index import IndexConfig

    hints, texts = get_type_hints(kind), _descriptions(kind)
    for field in fields(kind):
        if field.name == "index":
            _add_index(parser, IndexConfig.kind)
            continue
        hint = hints[field.name]
        arguments, origin = get_args(hint), get_origin(hint)
        if origin is Literal:
            settings: dict[str, Any] = {"choices": arguments}
        else:  # such as float, float | None, or tuple[float, ...]
            settings = {"type": arguments[0] if arguments else hint}
        if origin is tuple:
            settings |= {"nargs": "+", "metavar": "ALPHA"}
        if field.default is MISSING:
            settings["required"] = True
        else:
            settings["default"] = field.default
        flag = "alpha" if field.name == "alphas" else field.name.replace("_", "-")
        parser.add_argument(
            f"--{flag}", dest=field.name, help=texts[field.name].removesuffix("."), **settings
        )


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


def _config(kind: Any, options: Namespace) -> Any:
    """Return the configuration that the arguments of `_add_fields` describe."""
    from rcir.index import IndexConfig

    values = {field.name: getattr(options, field.name) for field in fields(kind)}
    values["alphas"] = tuple(values["alphas"])
    if "index" in values:
        values["index"] = IndexConfig(options.index, option_values(options.index_option))
    return kind(**values)


def _add_index(parser: ArgumentParser, default: str | None) -> None:
    """Add the arguments that choose an index, which is required without a default."""
    parser.add_argument(
        "--index",
        metavar="KIND",
        default=default,
        required=default is None,
        help="flat (exact), hnsw, ivf, ivf-pq, factory, gpu or pgvector",
    )
    parser.add_argument(
        "--index-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the index, such as ef_search=400; as often as needed",
    )


def option_values(texts: Sequence[str]) -> dict[str, Any]:
    """Return options as values of JSON, or as text where they are none.

    Example:
        >>> option_values(["M=32", "exact=false", "factory=IVF64,SQ8"])
        {'M': 32, 'exact': False, 'factory': 'IVF64,SQ8'}
    """
    values: dict[str, Any] = {}
    for option in texts:
        name, sign, text = option.partition("=")
        if not sign or not name:
            raise InvalidConfig(
                f"--index-option {option!r}: give NAME=VALUE, such as ef_search=400"
            )
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values
