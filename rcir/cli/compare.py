"""`rcir compare RUN ...`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from json import dumps

from rcir.levels import ALPHAS, DELTA


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: runs and levels."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a training, sweep or calibration, or MLflow id; compared with the first",
    )
    parser.add_argument("--alpha", type=float, nargs="+", default=list(ALPHAS))
    parser.add_argument("--delta", type=float, default=DELTA)
    parser.add_argument(
        "--choose",
        action="store_true",
        help="mark the calibrated retriever with the smallest sets at the first alpha as chosen "
        "among these: its guarantee then holds in spite of the choice",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> None:
    """Print the runs beside each other, or the choice among them."""
    from rcir.runs.compare import choose, compare_runs, print_choice, print_comparison

    arguments = options.runs, options.alpha, options.delta
    if options.choose:
        choice = choose(*arguments)
        print(dumps(choice.to_dict(), indent=1)) if options.json else print_choice(choice)
        return
    comparison = compare_runs(*arguments)
    print(dumps(comparison.to_dict(), indent=1)) if options.json else print_comparison(comparison)
