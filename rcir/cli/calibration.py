"""`rcir certify`, `rcir evaluate`, `rcir recalibrate` and `rcir index`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rcir.cli import add_levels
from rcir.errors import InvalidConfig


def add_certify_arguments(parser: ArgumentParser) -> None:
    """The vectors, what matches what, and at which levels."""
    parser.add_argument(
        "--gallery",
        required=True,
        help="vectors to search: .parquet, .npz, .npy beside a .csv, or a folder of shards",
    )
    parser.add_argument(
        "--queries", help="labelled vectors of queries; without, the gallery's own items ask"
    )
    add_levels(parser)
    parser.add_argument("--output", default="runs/certified", help="folder to write to")
    parser.add_argument(
        "--matches", help="table of true matches: columns query and gallery, of ids"
    )
    parser.add_argument("--radius", type=float, help="distance up to which places match")
    parser.add_argument(
        "--cluster",
        metavar="COLUMN",
        help="column of the vectors' clusters, such as encounters, or none; default: the column "
        "cluster if there is one, else moments that are found by vectors and capture times",
    )
    parser.add_argument("--metric", choices=["cosine", "euclidean"], default="cosine")
    parser.add_argument("--score-function", default="auto", help="how set size depends on a query")
    parser.add_argument(
        "--tuning",
        choices=["auto", "queries", "labels", "gallery"],
        default="auto",
        help="what fits the set sizes: a quarter of the queries, those of a quarter of the labels, "
        "or the gallery's items, so that more queries calibrate; auto: the items if they can and "
        "there are fewer than 200 queries",
    )
    parser.add_argument("--depth", type=int, default=200, help="candidates searched per query")
    _add_index_choice(parser, "flat")
    parser.add_argument(
        "--seed",
        type=int,
        help="decides which queries do what, which the guarantee then states; by default the "
        "queries alone decide",
    )


def run_certify(options: Namespace) -> None:
    """Calibrate, measure, write the retriever and its report, and print the table."""
    from calibration import CertificationConfig, certify, print_outcome
    from rcir.index import IndexConfig

    values = vars(options)
    values.pop("command")
    index = IndexConfig(values.pop("index"), option_values(values.pop("index_option")))
    config = CertificationConfig(alphas=tuple(values.pop("alpha")), index=index, **values)
    if status := print_outcome(certify(config)):
        sys.exit(status)


def add_evaluate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever and levels."""
    parser.add_argument("--retriever", required=True, help="folder or MLflow URI")
    parser.add_argument("--ood", help="data set whose test images are asked as well")
    parser.add_argument("--output", help="folder to write to (default: evaluation, beside it)")
    add_levels(parser)


def run_evaluate(options: Namespace) -> None:
    """Measure, write the report, and print its table."""
    from calibration import NOTHING_CERTIFIED, EvaluationConfig, evaluate_retriever
    from calibration.screen import print_evaluation

    place, alphas = options.retriever, tuple(options.alpha)
    config = EvaluationConfig(place, options.output, alphas, options.delta, options.ood)
    outcome = evaluate_retriever(config)
    print_evaluation(outcome.evaluation)
    print(f"report: {outcome.report}")
    if outcome.evaluation.refusal:
        sys.exit(NOTHING_CERTIFIED)


def add_recalibrate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever, and changes of its gallery."""
    parser.add_argument("retriever", type=Path, help="folder, which gets a new version")
    parser.add_argument("--add", type=Path, help="vectors that come into the gallery: see certify")
    parser.add_argument("--remove", type=Path, help="ids of what goes, one on each line of a file")
    parser.add_argument(
        "--feedback",
        type=Path,
        help="file of a server (serve --feedback), whose labelled queries calibrate from now on",
    )
    parser.add_argument(
        "--since",
        type=_time,
        metavar="TIME",
        help="use only queries asked since this time, such as 2026-11-23T06:00 (local time) "
        "or 2026-11-23T06:00Z",
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
    _add_index_choice(parser, None)
    parser.add_argument("--output", type=Path, help="folder to write to, in place of the first")
    parser.add_argument(
        "--alpha",
        type=float,
        nargs="+",
        help="levels at which sizes are compared; unless given those that it was calibrated at",
    )
    parser.add_argument("--delta", type=float, help="likewise")


def _add_index_choice(parser: ArgumentParser, default: str | None) -> None:
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


def run_index(options: Namespace) -> None:
    """Build, compare, calibrate, print."""
    from calibration import reindex
    from rcir.index import IndexConfig

    config = IndexConfig(options.index, option_values(options.index_option))
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
