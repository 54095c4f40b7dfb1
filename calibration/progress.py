"""Progress on the screen: the present step, and images that are embedded."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.status import Status

from rcir.data import ImageSet
from rcir.terminal import console, progress_bar

if TYPE_CHECKING:
    from rcir.encoders.embedder import Embedder

LONG = 10.0  # seconds


@contextmanager
def step(name: str) -> Iterator[None]:
    """Show the name of a step with a spinner, and beside it what an index logs.

    Without a terminal, one of these lines is printed now and then.
    """
    log = logging.getLogger("rcir.index")
    with console.status(name) as status:
        handler = _StatusHandler(name, status)
        level, propagated = log.level, log.propagate
        log.propagate = propagated and log.isEnabledFor(logging.INFO)  # if it is enabled anyway
        log.setLevel(logging.INFO)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagated


class _StatusHandler(logging.Handler):
    """Shows what is logged during a step."""

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
    """Yield an embedder that shows how many images are embedded.

    Without a terminal, one line is printed if that took long.
    """
    bar = progress_bar()
    task = bar.add_task(name, total=len(images))
    n_reused = 0

    def advance(count: int, reused: bool) -> None:
        nonlocal n_reused
        n_reused += count * reused
        bar.advance(task, count)

    started = time.monotonic()
    with bar:
        yield replace(embedder, progress=advance)
    seconds = time.monotonic() - started
    if seconds > LONG and not console.is_terminal:
        before = f" ({n_reused:,} of them before)" if n_reused else ""
        line = f"{name}: {len(images):,} images embedded{before}  {seconds:.1f} s"
        console.print(line, soft_wrap=True)
