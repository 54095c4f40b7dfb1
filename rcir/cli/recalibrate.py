"""`rcir recalibrate RETRIEVER`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    """Which retriever, and how its gallery changes."""
    parser.add_argument("retriever", type=Path, help="folder, which is replaced")
    parser.add_argument("--add", type=Path, help="vectors that come into the gallery: see certify")
    parser.add_argument("--remove", type=Path, help="ids of what goes, one on each line of a file")
    parser.add_argument(
        "--feedback",
        type=Path,
        help="file of a server (serve --feedback), whose labelled queries calibrate from now on",
    )


def run(options: Namespace) -> None:
    """Change the gallery, calibrate anew, print what is certified."""
    from calibration import recalibrate

    print(recalibrate(options.retriever, options.add, options.remove, options.feedback))
    print(f"retriever: {options.retriever}")
