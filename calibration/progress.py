"""Progress of long work: on a terminal only, and gone when it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status

from calibration.table import console
from rcir.data import ImageSet
from rcir.index import Index

if TYPE_CHECKING:
    from rcir.encoders.embedder import Embedder

LONG = 10.0  # seconds


@contextmanager
def step(name: str) -> Iterator[None]:
    """Name what is being done, with a spinner; what is logged of an index is shown beside it.

    Where there is no terminal, a line of that is left now and then.
    """
    log = logging.getLogger("rcir.index")
    with console.status(name) as status:
        shown = _Shown(name, status)
        level, propagated = log.level, log.propagate
        log.propagate = propagated and log.isEnabledFor(logging.INFO)  # to those who asked for it
        log.setLevel(logging.INFO)
        log.addHandler(shown)
        try:
            yield
        finally:
            log.removeHandler(shown)
            log.setLevel(level)
            log.propagate = propagated


def print_reason(index: Index) -> None:
    """Print why `auto` chose an index, if it did."""
    if why := getattr(index, "why", None):
        console.print(f"index: {why}", soft_wrap=True)


class _Shown(logging.Handler):
    """Shows what is logged while something is done."""

    def __init__(self, name: str, status: Status) -> None:
        super().__init__()
        self.status, self.task = status, name
        self.last = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.task}: {record.getMessage()}"
        self.status.update(line)
        if not console.is_terminal and time.monotonic() - self.last > LONG:
            console.print(line, soft_wrap=True)
            self.last = time.monotonic()


@contextmanager
def embedding(name: str, images: ImageSet, embedder: Embedder) -> Iterator[Embedder]:
    """An embedder that shows how many of some images are embedded.

    Where there is no terminal, it leaves one line if that took long.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(name, total=len(images))
    kept = 0

    def advance(count: int, found: bool) -> None:
        nonlocal kept
        kept += count * found
        bar.advance(task, count)

    started = time.monotonic()
    with bar:
        yield replace(embedder, progress=advance)
    seconds = time.monotonic() - started
    if seconds > LONG and not console.is_terminal:
        before = f" ({kept:,} of them before)" if kept else ""
        line = f"{name}: {len(images):,} images embedded{before}  {seconds:.1f} s"
        console.print(line, soft_wrap=True)
