"""The screen: what was measured, as a table and in sentences."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from rich.table import Table

from calibration.evaluation import Evaluation
from calibration.sentences import cost, limit, promise, remarks, size_source
from rcir.storage import as_text
from rcir.terminal import console, print_next

if TYPE_CHECKING:
    from calibration.pipeline import Outcome

NOTHING_CERTIFIED = 3  # exit status: everything was written, but no requested alpha is certified


def print_outcome(outcome: Outcome) -> int:
    """Print a calibration, where it is, and what to do next; return the status of the command."""
    print_evaluation(outcome.evaluation)
    place = as_text(outcome.folder)
    print(f"retriever: {place}\nreport: {as_text(outcome.report)}")
    folder, row = quote(place), outcome.evaluation.headline
    if row is None:
        print_next(f"plan --retriever {folder} --alpha {outcome.evaluation.rows[-1].alpha:g}")
        return NOTHING_CERTIFIED
    query = "QUERIES.parquet" if outcome.retriever.encoder is None else "PHOTO.jpg"
    searcher = outcome.retriever.searcher
    if searcher.gallery.parts:
        query += f" --key {searcher.options.key.upper()}"
    if outcome.retriever.require_calibration().calibration_queries.pictures is not None:
        query += " --together"
    print_next(
        f"retrieve {query} --retriever {folder} --alpha {row.alpha:g} "
        f"--delta {outcome.evaluation.delta:g}",
        f"serve {folder}",
        f"compare {quote(as_text(outcome.folder.parent))} ANOTHER_CALIBRATION",
    )
    return 0


def print_evaluation(evaluation: Evaluation) -> None:
    """Print what was measured, then the promise, its cost and its limit."""
    print_table(evaluation)
    for sentence in (promise(evaluation), cost(evaluation), limit(evaluation)):
        if sentence is not None:
            console.print(sentence)


def print_table(evaluation: Evaluation) -> None:
    """Print the measured risk and size at each level, and what sizes the sets."""
    table = Table("alpha", *(name.replace(" ", "\n") for name in evaluation.rows[0].cells()))
    for column in table.columns:
        column.justify = "right"
    for row in evaluation.rows:
        table.add_row(f"{row.alpha:g}", *(cell or "-" for cell in row.cells().values()))
    console.print(table)
    console.print(
        "Mean size: images per query. One size: what every query would need if all sets were "
        "equally large, of the same images in the same order. " + evaluation.logistic
    )
    for sentence in (*remarks(evaluation), size_source(evaluation)):
        console.print(sentence)
