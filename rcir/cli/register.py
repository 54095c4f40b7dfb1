"""`rcir register RUN --name NAME --alias champion`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rcir.levels import ALPHA, DELTA


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: what is registered, its name, and the levels that decide on the alias."""
    parser.add_argument("run", metavar="RUN", help="folder of a calibration, or its MLflow id")
    parser.add_argument("--name", required=True, help="of the registered model")
    parser.add_argument(
        "--alias", help="of this version; one that another has only for smaller certified sets"
    )
    parser.add_argument("--alpha", type=float, default=ALPHA, help="level of the comparison")
    parser.add_argument("--delta", type=float, default=DELTA, help="level of the comparison")
    parser.add_argument("--force", action="store_true", help="give the alias without comparing")


def run(options: Namespace) -> None:
    """Register, and print where it is and why."""
    from rcir.registry import register

    registered = register(
        options.run,
        options.name,
        options.alias,
        options.alpha,
        options.delta,
        options.force,
    )
    print(f"{registered.version.name} version {registered.version.version}: {registered.uri}")
    if registered.promotion:
        print(f"{registered.alias}: {registered.promotion}")
