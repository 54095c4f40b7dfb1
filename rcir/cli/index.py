"""`rcir index RETRIEVER --index KIND`"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rcir.errors import InvalidConfig


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever and index."""
    parser.add_argument("retriever", type=Path, help="folder of the retriever")
    add_index_arguments(parser, "auto")
    parser.add_argument("--output", type=Path, help="folder to write to, in place of the first")
    parser.add_argument(
        "--alpha",
        type=float,
        nargs="+",
        help="levels at which sizes are compared; unless given those that it was calibrated at",
    )
    parser.add_argument("--delta", type=float, help="likewise")


def add_index_arguments(parser: ArgumentParser, default: str) -> None:
    """Add the arguments that choose an index."""
    parser.add_argument(
        "--index",
        metavar="KIND",
        default=default,
        help="flat (exact), hnsw, ivf, ivf-pq, factory, auto, pgvector or milvus",
    )
    parser.add_argument(
        "--index-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the index, such as ef_search=400; as often as needed",
    )


def run(options: Namespace) -> None:
    """Build, compare, calibrate, print."""
    from calibration import reindex
    from rcir.index import IndexConfig

    given = option_values(options.index_option)
    config = IndexConfig(options.index, given) if options.index != "auto" or given else None
    reindexed = reindex(options.retriever, config, options.output, options.alpha, options.delta)
    print(reindexed)
    print(f"retriever: {reindexed.folder}")


def option_values(texts: Sequence[str]) -> dict[str, Any]:
    """Options as values of JSON, or as text where they are none.

    Example:
        >>> option_values(["M=32", "exact=false", "factory=IVF64,SQ8"])
        {'M': 32, 'exact': False, 'factory': 'IVF64,SQ8'}
    """
    values: dict[str, Any] = {}
    for one in texts:
        name, sign, text = one.partition("=")
        if not sign or not name:
            raise InvalidConfig(f"--index-option {one!r}: give NAME=VALUE, such as ef_search=400")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values
