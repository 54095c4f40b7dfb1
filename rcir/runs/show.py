"""Show a comparison of runs, or a choice among them, as tables on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rcir.options import DELTA
from rcir.risk.bootstrap import Estimate
from rcir.runs.choose import Choice
from rcir.runs.compare import METRICS, Comparison, Row
from rcir.tracking.runs import LOCAL_PAGE

MIN_WIDTH = 160  # of output that is not a terminal
RUNS_BESIDE = 5  # each other in the table of options


def print_comparison(comparison: Comparison) -> None:
    """Print the runs, their options, and which differ by more than noise."""
    console = _console()
    console.print(
        f"Mean set sizes certified at delta = {comparison.delta:.4g}, measured on "
        f"{comparison.split} queries (with 95% intervals):",
        soft_wrap=True,
    )
    console.print(_sizes_table(comparison))
    for start in range(0, len(comparison.rows) * bool(comparison.differing), RUNS_BESIDE):
        console.print("\nOptions that differ:" if not start else "")
        console.print(_options_table(comparison, slice(start, start + RUNS_BESIDE)))
    differences = [size for row in comparison.rows for size in row.differences.values()]
    if differences and comparison.first is not None:
        lows = [size.low for size in differences]
        rest = (
            "; without an interval, this is unknown" if None in lows else ", all else is within it"
        )
        console.print(
            f"\nMean set size less that of {comparison.first.name}, paired on the same queries\n"
            "(95% intervals that hold for all runs together; * is more than noise"
            f"{rest}):",
            soft_wrap=True,
        )
        console.print(_differences_table(comparison))
    for note in comparison.notes:
        console.print(f"\n{note}", soft_wrap=True)
    console.print(
        "\nNoise comes from calibration and measured queries; that of another training seed is not "
        "included.",
        soft_wrap=True,
    )
    if link := comparison.link():
        running = " (while `mlflow ui` runs)" * link.startswith(LOCAL_PAGE)
        console.print(f"\nIn MLflow{running}: {link}", soft_wrap=True)


def print_choice(choice: Choice) -> None:
    """Print the comparison, the choice, and its guarantee from now on."""
    print_comparison(choice.comparison)
    run, among = choice.run, choice.guarantee.chosen_among
    copy = "its copy in MLflow, too" if choice.tracked else "copies made before are not"
    _console().print(
        f"\n{run.name} has the smallest sets. {choice.guarantee}\n"
        f"Its mean size is {_short(choice.size)}; as the smallest of several it may be larger on "
        f"other queries.\n{run.retriever} is marked ({copy}): it certifies every request at "
        f"delta / {among} from now on.",
        soft_wrap=True,
    )


def _console() -> Console:
    console = Console(highlight=False, markup=False)  # file names may look like markup
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    return console


def _sizes_table(comparison: Comparison) -> Table:
    heads = (f"at alpha {alpha:g}" for alpha in comparison.alphas)
    table = _table("run", "state", "recall\nat 1", "ECE", *heads)
    for row in comparison.rows:
        numbers = (row.run.metric(comparison.split, name) for name in METRICS)
        table.add_row(
            row.run.name,
            row.run.state,
            *("-" if value is None else f"{value:.3f}" for value in numbers),
            *(_size(comparison, row, alpha) for alpha in comparison.alphas),
        )
    return table


def _size(comparison: Comparison, row: Row, alpha: float) -> str:
    """Format a size with its interval, or the one that an unfinished trial reported."""
    if alpha in row.sizes:
        return _estimate(row.sizes[alpha])
    results = row.run.results.get(comparison.split)
    if results is not None and results.parts:
        return "not certified"
    reported = row.run.metric(comparison.split, f"certified_size_{alpha:g}")
    return "-" if reported is None or comparison.delta != DELTA else _short(reported)


def _options_table(comparison: Comparison, part: slice) -> Table:
    """Return a table with a row for each option, and a column for each of some runs."""
    runs = [row.run for row in comparison.rows[part]]
    table = _table("option", *(run.name for run in runs))
    for name in comparison.differing:
        values = (run.options.get(name, "-") for run in runs)
        texts = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
        table.add_row(name, *texts)
    return table


def _differences_table(comparison: Comparison) -> Table:
    levels = [a for a in comparison.alphas if any(a in row.differences for row in comparison.rows)]
    table = _table("run", *(f"at alpha {alpha:g}" for alpha in levels))
    for row in comparison.rows:
        if row.differences:
            cells = (row.differences.get(alpha) for alpha in levels)
            texts = (
                _estimate(cell, "+") + " *" * cell.beyond_noise if cell else "-" for cell in cells
            )
            table.add_row(row.run.name, *texts)
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column.header in ("run", "option")
    return table


def _estimate(estimate: Estimate, sign: str = "") -> str:
    interval = "(no interval)"
    if estimate.low is not None and estimate.high is not None:
        interval = f"[{_short(estimate.low, sign)}, {_short(estimate.high, sign)}]"
    return f"{_short(estimate.value, sign)} {interval}"


def _short(size: float, sign: str = "") -> str:
    return f"{size:{sign}.{2 if abs(size) < 10 else 1}f}"
