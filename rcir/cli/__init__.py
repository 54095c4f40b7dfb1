"""The `rcir` command: its subcommands, and the files that hold them, imported when needed."""

from __future__ import annotations

import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from rcir import trust
from rcir.errors import reporting_errors
from rcir.imports import naming_extras
from rcir.options import spelled

# Module and summary; the module has `add_NAME_arguments(parser)` and `run_NAME(options)`.
COMMANDS = {
    "retrieve": ("retrieval", "retrieve a set for each picture, with its guarantee"),
    "certify": ("calibration", "calibrate and evaluate a retriever of photographs or vectors"),
    "plan": ("calibration", "predict how many queries to label, and the size of the sets"),
    "recalibrate": (
        "calibration",
        "change the gallery of a retriever, and calibrate with the queries it keeps",
    ),
    "index": (
        "calibration",
        "give a retriever another index, and calibrate through it; or compare indexes",
    ),
    "verify": ("calibration", "certify a verifier behind the shortlists of a retriever"),
    "evaluate": (
        "calibration",
        "measure a calibrated retriever on the test queries of its data set",
    ),
    "compare": ("runs", "compare runs by how small their guaranteed sets are"),
    "register": ("runs", "make a calibration a version of a registered model"),
    "embed": ("embed", "embed pictures, and write their vectors to a Parquet file"),
    "data": ("data", "show the data sets, or verify a copy of one"),
    "serve": ("retrieval", "answer over HTTP, with a page to explore"),
    "demo": ("runs", "train, calibrate, measure and retrieve on handwritten two-digit numbers"),
}
READ_NO_FOLDERS = ("data", "demo")
# `ray job submit` runs these as `python -m PACKAGE`.
JOBS = {
    "train": ("training", "train an encoder"),
    "calibrate": ("calibration", "give a trained encoder a guarantee"),
    "tune": ("tuning", "sweep the options of a training"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `rcir` command: 0, or `SystemExit` with the status of what failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] and arguments[0] in JOBS:
        package, _ = JOBS[arguments[0]]
        status: int = import_module(f"{package}.__main__").main(arguments[1:])
        return status
    parser = ArgumentParser(prog="rcir", description="Image retrieval with a guarantee.")
    parser.add_argument("--version", action="version", version=f"rcir {version('rcir')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (_, summary) in JOBS.items():
        commands.add_parser(name, help=summary)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=ArgumentDefaultsHelpFormatter,
        )
        if name in arguments[:1]:  # the others' libraries take seconds to import
            getattr(import_module(f"rcir.cli.{module}"), f"add_{name}_arguments")(command)
            if name not in READ_NO_FOLDERS:
                trust.add_arguments(command)
    options, unknown = parser.parse_known_args(spelled(arguments, "-"))
    if unknown:  # with the usage of the command, not of `rcir`
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command not in READ_NO_FOLDERS:
        trust.apply_arguments(options)
    with reporting_errors(), naming_extras():
        module, _ = COMMANDS[options.command]
        getattr(import_module(f"rcir.cli.{module}"), f"run_{options.command}")(options)
    return 0
