"""`rcir certify --gallery VECTORS --queries VECTORS`"""

from __future__ import annotations

import sys
import warnings
from argparse import ArgumentParser, Namespace

from rcir.cli.index import add_index_arguments, option_values
from rcir.levels import ALPHAS, DELTA


def add_arguments(parser: ArgumentParser) -> None:
    """The vectors, what matches what, and at which levels."""
    parser.add_argument(
        "--gallery",
        required=True,
        help="vectors to search: .parquet, .npz, .npy beside a .csv, or a folder of shards",
    )
    parser.add_argument(
        "--queries", help="labelled vectors of queries; without, the gallery's own items ask"
    )
    parser.add_argument("--alpha", type=float, nargs="+", default=list(ALPHAS))
    parser.add_argument("--delta", type=float, default=DELTA)
    parser.add_argument("--output", default="runs/certified", help="folder to write to")
    parser.add_argument(
        "--matches", help="table of true matches: columns query and gallery, of ids"
    )
    parser.add_argument("--radius", type=float, help="distance up to which places match")
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
    add_index_arguments(parser, "flat")
    parser.add_argument(
        "--seed",
        type=int,
        help="decides which queries do what, which the guarantee then states; by default the "
        "queries alone decide",
    )


def run(options: Namespace) -> None:
    """Calibrate, measure, write the retriever and its report, and print the table."""
    from calibration import NOTHING_CERTIFIED, CertificationConfig, certify, print_evaluation
    from rcir.index import IndexConfig

    values = {name: value for name, value in vars(options).items() if name != "command"}
    index = IndexConfig(values.pop("index"), option_values(values.pop("index_option")))
    config = CertificationConfig(alphas=tuple(values.pop("alpha")), index=index, **values)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        outcome = certify(config)
    print_evaluation(outcome.evaluation)
    print(f"retriever: {outcome.folder}\nreport: {outcome.report}")
    if outcome.evaluation.refusal:
        sys.exit(NOTHING_CERTIFIED)
