"""`rcir evaluate --retriever RETRIEVER`"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from rcir.levels import ALPHAS, DELTA


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever and levels."""
    parser.add_argument("--retriever", required=True, help="folder or MLflow URI")
    parser.add_argument("--ood", help="data set whose test images are asked as well")
    parser.add_argument("--output", help="folder to write to (default: evaluation, beside it)")
    parser.add_argument("--alpha", type=float, nargs="+", default=list(ALPHAS))
    parser.add_argument("--delta", type=float, default=DELTA)


def run(options: Namespace) -> None:
    """Measure, write the report, and print its table."""
    from calibration import (
        NOTHING_CERTIFIED,
        EvaluationConfig,
        evaluate_retriever,
        print_evaluation,
    )

    outcome = evaluate_retriever(
        EvaluationConfig(
            options.retriever, options.output, tuple(options.alpha), options.delta, options.ood
        )
    )
    print_evaluation(outcome.evaluation)
    print(f"report: {outcome.report}")
    if outcome.evaluation.refusal:
        sys.exit(NOTHING_CERTIFIED)
