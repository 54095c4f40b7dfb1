"""The `rcir` command: its subcommands, and the files that hold them, imported when needed."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pkgutil import resolve_name

from rcir import trust
from rcir.errors import reporting_errors
from rcir.imports import naming_extras
from rcir.options import Suggesting, did_you_mean, list_examples, spelled

OVERVIEW = """\
Try it:
  demo         train, calibrate, measure and retrieve on handwritten two-digit numbers

Get a guarantee for a collection:
  embed        embed pictures, and write their vectors to a Parquet file
  certify      calibrate and evaluate a retriever of photographs or vectors
  plan         predict how many queries to label, and the size of the sets
  verify       certify a verifier behind the shortlists of a retriever

Use it:
  retrieve     retrieve a set for each picture, with its guarantee
  serve        answer over HTTP, with a page to explore

Train an encoder, and get a guarantee:
  data         show the data sets, or verify a copy of one
  train        train an encoder
  tune         sweep the options of a training
  calibrate    give an encoder a guarantee
  compare      compare runs by how small their guaranteed sets are

Maintain:
  recalibrate  change the gallery of a retriever, and calibrate with the queries it keeps
  index        give a retriever another index, and calibrate through it; or compare indexes
  evaluate     measure a calibrated retriever on the test queries of its data set
  register     make a calibration a version of a registered model
  completion   print a script that lets a shell complete commands and options

`rcir COMMAND --help` lists the options of a command, with examples."""
SUMMARIES = dict(re.findall(r"^  (\w+) +(.+)$", OVERVIEW, re.MULTILINE))
# The file with `add_NAME_arguments` and `run_NAME`, and a module it uses that is slow to import.
COMMANDS = {
    "certify": ("calibration", "calibration.pipeline"),
    "compare": ("runs", "rcir.runs.show"),
    "completion": ("completion", "rcir.cli.completion"),
    "data": ("data", "rcir.data.images"),
    "demo": ("runs", "rcir.demo"),
    "embed": ("embed", "rcir.runs.embedding"),
    "evaluate": ("calibration", "calibration.data_sets"),
    "index": ("calibration", "calibration.indexing"),
    "plan": ("calibration", "rcir.retrieval.retriever"),
    "recalibrate": ("calibration", "calibration.recalibration"),
    "register": ("runs", "rcir.registry.logged_model"),
    "retrieve": ("retrieval", "rcir.retrieval.retriever"),
    "serve": ("retrieval", "rcir.serving.server"),
    "verify": ("calibration", "calibration.verification"),
}
READ_NO_FOLDERS = ("completion", "data", "demo")
# The configuration of each, and a module it uses that is slow to import.
JOBS = {
    "train": ("training.config:TrainingConfig", "training.run"),
    "calibrate": ("calibration.config:CalibrationConfig", "calibration.pipeline"),
    "tune": ("tuning.config:TuningConfig", "tuning.run"),
}


class Parser(Suggesting, ArgumentParser):
    """A parser that suggests the option that was meant."""


class Formatter(RawDescriptionHelpFormatter, ArgumentDefaultsHelpFormatter):
    """Help with defaults, and examples as they are written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `rcir` command: 0, or `SystemExit` with the status of what failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in JOBS:
        return _run_job(name, arguments[1:])
    if name not in COMMANDS:
        _explain(arguments)
    from rcir.terminal import working  # imports rich, which `rcir --help` does without

    with working("starting", logged=True):
        parser = make_parser(name)
    options = parser.parse_args(spelled(arguments[1:], "-"))
    if name not in READ_NO_FOLDERS:
        trust.apply_arguments(options)
    home, needed = COMMANDS[name]
    with reporting_errors(), naming_extras():
        with working("starting", logged=True):
            import_module(needed)
        getattr(import_module(f"rcir.cli.{home}"), f"run_{name}")(options)
    return 0


def _run_job(name: str, arguments: Sequence[str]) -> int:
    """Run a job, whose options are a configuration; return its exit status."""
    from rcir.terminal import working

    kind, needed = JOBS[name]
    with reporting_errors(), naming_extras():
        with working("starting", logged=True):
            from rcir.config import parse

            config_class = resolve_name(kind)
        config = parse(config_class, arguments, name, reads_folders=name == "calibrate")
        with working("starting", logged=True):  # `--help` and a wrong option do without it
            import_module(needed)
        status: int = getattr(import_module("rcir.cli.jobs"), f"run_{name}")(config)
    return status


def make_parser(name: str) -> ArgumentParser:
    """Return the parser of a command."""
    summary = SUMMARIES[name]
    parser = Parser(
        prog=f"rcir {name}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=list_examples(name),
        formatter_class=Formatter,
    )
    getattr(import_module(f"rcir.cli.{COMMANDS[name][0]}"), f"add_{name}_arguments")(parser)
    if name not in READ_NO_FOLDERS:
        trust.add_arguments(parser)
    return parser


def _explain(arguments: Sequence[str]) -> None:
    """Print help or version and exit, or refuse what is not a command."""
    parser = ArgumentParser(
        prog="rcir",
        usage="%(prog)s COMMAND ...",
        description="Image retrieval with a guarantee.",
        epilog=OVERVIEW,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rcir {version('rcir')}")
    _, words = parser.parse_known_args(arguments)
    problem = "a COMMAND is required"
    if words:
        meant = did_you_mean(words[:1], [*SUMMARIES, "--help", "--version"])
        problem = f"there is no command {words[0]!r}{meant}"
    parser.error(f"{problem}; `rcir --help` lists them")
