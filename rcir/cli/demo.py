"""`rcir demo`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: encoder, epochs and output."""
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
        help="folder to write to; what an earlier demo left there is replaced",
    )


def run(options: Namespace) -> None:
    """Run the demo."""
    from rcir.demo import run as run_demo

    run_demo(options.output, options.encoder, options.epochs)
