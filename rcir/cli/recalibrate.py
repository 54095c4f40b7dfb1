"""`rcir recalibrate RETRIEVER`"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from datetime import datetime
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
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
        help="of these queries only those asked since then, such as 2026-11-23T06:00 (local time) "
        "or 2026-11-23T06:00Z",
    )


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
        time.timestamp()
    except (ValueError, OverflowError) as error:
        raise ArgumentTypeError(
            f"{text!r} is no time ({error}): give one such as 2026-11-23T06:00"
        ) from None
    return time


def run(options: Namespace) -> None:
    """Change the gallery, calibrate anew, print what is certified."""
    from calibration import recalibrate

    changes = (options.add, options.remove, options.feedback, options.since)
    print(recalibrate(options.retriever, *changes))
    print(f"retriever: {options.retriever}")
