"""`rcir demo`, `rcir compare` and `rcir register`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from json import dumps
from pathlib import Path

from rcir.options import ALPHAS, DELTA
from rcir.terminal import print_next


def add_demo_arguments(parser: ArgumentParser) -> None:
    """Add data, encoder, epochs and output."""
    parser.add_argument(
        "--digits",
        action="store_true",
        help="train on digits even if RCIR_DATA holds photographs of CUB-200-2011 and weights",
    )
    parser.add_argument("--encoder", default="btl", help="method, see docs/methods.md")
    parser.add_argument(
        "--epochs",
        type=int,
        default=8,
        help="passes over the training images; fewer take less time and give larger sets",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        help="folder to write to; the files of an earlier demo are replaced",
    )


def run_demo(options: Namespace) -> None:
    """Run the demo."""
    from rcir import demo

    if not options.digits and (found := demo.find_photographs()):
        demo.run_on_photographs(options.output, *found)
    else:
        demo.run(options.output, options.encoder, options.epochs)


def add_compare_arguments(parser: ArgumentParser) -> None:
    """Add runs and levels."""
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


def run_compare(options: Namespace) -> None:
    """Print the runs side by side, or the choice among them."""
    from rcir.runs.choose import Choice, choose
    from rcir.runs.compare import compare_runs
    from rcir.runs.show import print_choice, print_comparison

    arguments = options.runs, options.alpha, options.delta
    outcome = choose(*arguments) if options.choose else compare_runs(*arguments)
    if options.json:
        print(dumps(outcome.to_dict(), indent=1))
    elif isinstance(outcome, Choice):
        print_choice(outcome)
    else:
        print_comparison(outcome)


def add_register_arguments(parser: ArgumentParser) -> None:
    """Add the calibration, the name and the alias."""
    parser.add_argument("run", metavar="RUN", help="folder of a calibration, or its MLflow id")
    parser.add_argument("--name", required=True, help="name of the registered model")
    parser.add_argument("--alias", help="alias of this version, such as champion")


def run_register(options: Namespace) -> None:
    """Register, and print the URI of the version."""
    from rcir.registry import register

    version = register(options.run, options.name, options.alias)
    print(f"{version.name} version {version.version}: {version.uri}")
    print_next(f"serve {version.uri}")
