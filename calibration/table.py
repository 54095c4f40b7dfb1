"""The outcome of a calibration on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from calibration import summary
from calibration.evaluation import Evaluation
from calibration.risk_results import RiskResult

# Names may look like markup.
console = Console(highlight=False, markup=False)

NOTHING_CERTIFIED = 3  # exit status: everything was written, but no requested alpha is certified


def print_evaluation(evaluation: Evaluation) -> None:
    """Print what was measured, then the promise, its cost and its limit."""
    print_table(evaluation)
    for sentence in summary.sentences(evaluation):
        console.print(sentence)


def print_table(evaluation: Evaluation) -> None:
    """Print the measured risk and size at each level, and what sizes the sets."""
    table = Table("alpha", "certified", "measured risk", "95% interval", "mean size", "one size")
    for column in table.columns:
        column.justify = "right"
    for row in evaluation.rows:
        table.add_row(f"{row.alpha:g}", *_cells(row))
    console.print(table)
    console.print(
        "Mean size: images per query. One size: what every query would need if all sets were "
        "equally large, of the same images in the same order."
    )
    for sentence in (*summary.remarks(evaluation), summary.size_source(evaluation)):
        console.print(sentence)


def _cells(row: RiskResult) -> tuple[str, ...]:
    constant = "-" if row.constant_size is None else f"{row.constant_size:.4g}"
    if not row.certified or row.test_risk is None:
        return ("yes" if row.certified else "no", "-", "-", "-", constant)
    interval = f"{row.risk_low:.4f} to {row.risk_high:.4f}"
    return ("yes", f"{row.test_risk:.4f}", interval, f"{row.mean_size:.2f}", constant)
