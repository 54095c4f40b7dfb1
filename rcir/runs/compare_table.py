"""The tables of `rcir compare` on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rcir.levels import DELTA
from rcir.risk.bootstrap import Estimate
from rcir.runs.choose import Choice
from rcir.runs.compare import Comparison

WIDTH = 160  # at least, where there is no terminal to fit into


def print_comparison(found: Comparison) -> None:
    """Print the runs, their options, and which differ by more than noise."""
    console = _console()
    console.print(
        f"Mean set sizes certified at delta = {found.delta:.4g}, measured on {found.split} queries "
        "(with 95% intervals):",
        soft_wrap=True,
    )
    console.print(_sizes(found))
    if found.differing:
        console.print("\nOptions that differ:")
        console.print(_options(found))
    if any(found.differences.values()) and found.first is not None:
        known = (each.low for levels in found.differences.values() for each in levels.values())
        rest = "of those without one nothing is known" if None in known else "all else within it"
        console.print(
            f"\nMean set size less that of {found.runs[found.first].name}, paired on the same "
            "queries\n(95% intervals that hold for all runs together; * is more than noise, "
            f"{rest}):",
            soft_wrap=True,
        )
        console.print(_differences(found))
    for note in found.notes:
        console.print(f"\n{note}", soft_wrap=True)
    console.print(
        "\nNoise is that of calibration and measured queries. Of another seed of the training it "
        "says nothing.",
        soft_wrap=True,
    )


def print_choice(choice: Choice) -> None:
    """Print what was compared, which is chosen, and what it says from now on."""
    print_comparison(choice.comparison)
    name, among = choice.comparison.runs[choice.number].name, choice.guarantee.chosen_among
    copy = "its copy in MLflow, too" if choice.tracked else "copies made before are not"
    _console().print(
        f"\n{name} has the smallest sets. {choice.guarantee}\n"
        f"Its mean size is {_short(choice.size)}; as the smallest of several it may be larger on "
        f"other queries.\n{choice.folder} is marked ({copy}): it certifies every request at "
        f"delta / {among} from now on.",
        soft_wrap=True,
    )


def _console() -> Console:
    console = Console(highlight=False, markup=False)  # names of files may look like markup
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    return console


def _sizes(found: Comparison) -> Table:
    heads = (f"at alpha {alpha:g}" for alpha in found.alphas)
    table = _table("run", "state", "recall\nat 1", "ECE", *heads)
    for number, run in enumerate(found.runs):
        numbers = (found.metric(number, name) for name in ("recall_at_1", "ece"))
        table.add_row(
            run.name,
            run.state,
            *("-" if value is None else f"{value:.3f}" for value in numbers),
            *(_size(found, number, alpha) for alpha in found.alphas),
        )
    return table


def _size(found: Comparison, number: int, alpha: float) -> str:
    """A size with its interval; of a trial that was stopped only what it reported."""
    size, one = found.sizes[alpha].get(number), found.found[number]
    if size is not None:
        return f"{_short(size.value)} {_ends(size)}"
    if one is not None and one.parts:
        return "not certified"
    reported = found.metric(number, f"certified_size_{alpha:g}") if found.delta == DELTA else None
    return "-" if reported is None else _short(reported)


def _options(found: Comparison) -> Table:
    table = _table("run", *(name.replace(".", ".\n") for name in found.differing))
    for run in found.runs:
        table.add_row(run.name, *(_text(run.options.get(name, "-")) for name in found.differing))
    return table


def _differences(found: Comparison) -> Table:
    levels = [alpha for alpha, differences in found.differences.items() if differences]
    table = _table("run", *(f"at alpha {alpha:g}" for alpha in levels))
    for number, run in enumerate(found.runs):
        cells = [found.differences[alpha].get(number) for alpha in levels]
        if any(cells):
            table.add_row(run.name, *(_difference(cell) for cell in cells))
    return table


def _difference(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    mark = " *" if estimate.beyond_noise else ""
    return f"{_short(estimate.value, '+')} {_ends(estimate, '+')}{mark}"


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column.header == "run"
    return table


def _ends(estimate: Estimate, sign: str = "") -> str:
    """The interval; where there is none, a note says why."""
    if estimate.low is None or estimate.high is None:
        return "(no interval)"
    return f"[{_short(estimate.low, sign)}, {_short(estimate.high, sign)}]"


def _short(size: float, sign: str = "") -> str:
    """With three digits or so."""
    return f"{size:{sign}.{2 if abs(size) < 10 else 1}f}"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
