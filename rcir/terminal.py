"""The terminal: what commands print, and transient progress bars."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(highlight=False, markup=False)  # names of files may look like markup


def progress_bar(visible: bool = True) -> Progress:
    """Return a progress bar that shows only on a terminal, and not if `visible` is False."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (visible and console.is_terminal),
    )
