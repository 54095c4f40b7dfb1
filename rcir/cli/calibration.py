"""`rcir certify`, `plan`, `verify`, `evaluate`, `recalibrate` and `index`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any, get_args

from rcir.cli.arguments import (
    add_fields,
    add_index,
    add_request_options,
    read_fields,
    read_index,
)
from rcir.errors import InvalidConfig
from rcir.risk.options import request_options
from rcir.risk.planning import NUMBERS, Pilot
from rcir.storage import as_text, is_uri
from rcir.terminal import print_next

RESULT_OPTIONS = {"output", "score_function", "depth", "alphas", "delta"}  # of a table of results


def add_certify_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: the fields of `CertificationConfig`, or a table of results."""
    from calibration import CertificationConfig

    add_fields(parser, CertificationConfig, positional="gallery", optional=True)
    parser.add_argument(
        "--results",
        type=Path,
        metavar="TABLE",
        help="in place of a gallery, what a search engine returned: columns query, id, distance or "
        "score, and relevant, or label and query_label",
    )


def run_certify(options: Namespace) -> None:
    """Calibrate, measure, write the retriever and its report, and print the table."""
    from calibration import CertificationConfig, certify, print_outcome

    if (options.results is None) == (options.gallery is None):
        raise InvalidConfig("name either a gallery, or a table of --results")
    results = vars(options).pop("results")
    if results is not None:
        return _certify_results(results, options)
    if status := print_outcome(certify(read_fields(CertificationConfig, options))):
        sys.exit(status)


def _certify_results(path: Path, options: Namespace) -> None:
    """Certify the results of an engine, write the rule, and print what was measured."""
    from calibration import CertificationConfig
    from calibration.pipeline import check_output
    from rcir.retrieval.result_tables import CertifiedResults, ResultTable
    from rcir.risk import make_request

    given, default = read_fields(CertificationConfig, options, gallery=""), CertificationConfig("")
    names = vars(default).keys() - RESULT_OPTIONS
    if unused := sorted(n for n in names if getattr(given, n) != getattr(default, n)):
        raise InvalidConfig(f"--results needs no {', '.join(unused)}: leave them out")
    if is_uri(options.output):
        raise InvalidConfig(f"--output is {options.output}; a rule is written to a local folder")
    check_output(Path(options.output))
    table = ResultTable.read(path, options.depth)
    certified = CertifiedResults.certify(
        table, options.score_function, options.alphas, options.delta
    )
    folder = Path(options.output) / "rule"
    certified.save(folder)
    print(certified.rule.guarantee(make_request(max(options.alphas), options.delta)))
    print(certified)
    for alpha in sorted(
        alpha for alpha in options.alphas if f"{alpha:g}" not in certified.measured
    ):
        print(f"{alpha:>6g}  not certified: add queries")
    print(f"rule: {folder}")
    print_next(f"retrieve --results NEW.parquet --retriever {quote(str(folder))}")


def add_plan_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: the guarantee, and the retriever whose queries are the pilot."""
    parser.add_argument(
        "--retriever",
        help="folder or MLflow URI of a calibrated retriever, whose queries predict sizes",
    )
    numbers: dict[str, Any] = {"type": int, "nargs": "+", "default": list(NUMBERS)}
    parser.add_argument(
        "--queries", metavar="NUMBER", help="numbers of queries to label", **numbers
    )
    parser.add_argument(
        "--pilot",
        choices=get_args(Pilot),
        default="calibration",
        help="its queries that predict sizes",
    )
    add_request_options(parser)


def run_plan(options: Namespace) -> None:
    """Print the plan."""
    from rcir.api import load
    from rcir.risk import make_request, plan_calibration

    request = {option.name: getattr(options, option.name) for option in request_options()}
    if options.retriever is None:
        print(plan_calibration(make_request(**request)))
    else:
        retriever = load(options.retriever)
        print(retriever.plan(**request, numbers=options.queries, pilot=options.pilot))


def add_verify_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: the fields of `VerificationConfig`."""
    from calibration import VerificationConfig

    add_fields(parser, VerificationConfig)


def run_verify(options: Namespace) -> None:
    """Certify, and print and write the certificate."""
    from calibration import VerificationConfig, verify

    verify(read_fields(VerificationConfig, options))


def add_evaluate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: the fields of `EvaluationConfig`."""
    from calibration import EvaluationConfig

    add_fields(parser, EvaluationConfig)


def run_evaluate(options: Namespace) -> None:
    """Measure, write the report, and print its table."""
    from calibration import NOTHING_CERTIFIED, EvaluationConfig, evaluate_retriever
    from calibration.screen import print_evaluation

    outcome = evaluate_retriever(read_fields(EvaluationConfig, options))
    print_evaluation(outcome.evaluation)
    print(f"report: {as_text(outcome.report)}")
    if outcome.evaluation.refusal:
        sys.exit(NOTHING_CERTIFIED)


def add_recalibrate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever, and changes of its gallery."""
    parser.add_argument("retriever", type=Path, help="folder, which gets a new version")
    parser.add_argument("--add", type=Path, help="vectors to add to the gallery: see certify")
    parser.add_argument(
        "--remove", type=Path, help="file with the ids of items to remove, one on each line"
    )
    parser.add_argument(
        "--feedback",
        type=Path,
        help="file of a server (serve --feedback), whose labelled queries calibrate from now on",
    )
    parser.add_argument(
        "--since",
        type=_time,
        metavar="TIME",
        help="use only queries since this time, such as 2026-11-23T06:00 (local time) or "
        "2026-11-23T06:00Z",
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

    report = recalibrate(
        options.retriever,
        add=options.add,
        remove=options.remove,
        feedback=options.feedback,
        since=options.since,
    )
    print(report)
    print(f"retriever: {options.retriever}")
    print_next(f"serve {quote(str(options.retriever))}")


def add_index_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever and index."""
    parser.add_argument("retriever", type=Path, help="folder of the retriever")
    add_index(parser, None)
    parser.add_argument(
        "--output", type=Path, help="folder to write to; unless given, that of the retriever"
    )
    parser.add_argument(
        "--alpha",
        type=float,
        nargs="+",
        help="levels at which sizes are compared; unless given, those that it was calibrated at",
    )
    parser.add_argument(
        "--delta",
        type=float,
        help="delta at which they are compared; unless given, that of the calibration",
    )


def run_index(options: Namespace) -> None:
    """Build, compare, calibrate, print."""
    from calibration import reindex

    index = read_index(options)
    reindexed = reindex(options.retriever, index, options.output, options.alpha, options.delta)
    print(reindexed)
    print(f"retriever: {reindexed.folder}")
    print_next(f"serve {quote(str(reindexed.folder))}")
