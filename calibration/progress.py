"""Progress of long work: on a terminal only, and gone when it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from calibration.table import console
from rcir.data import ImageSet

if TYPE_CHECKING:
    from rcir.encoders.embedder import Embedder

LONG = 10.0  # seconds


@contextmanager
def step(name: str) -> Iterator[None]:
    """Name what is being done, with a spinner."""
    with console.status(name):
        yield


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
