"""The terminal: what commands print, and the progress of work that takes long.

What may take seconds runs inside `working`: on a terminal or in a notebook a line is redrawn, in
logs commands print one now and then. RCIR_PROGRESS=0 turns that off.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread

from rich.console import Console

console = Console(highlight=False, markup=False)  # names of files may look like markup
_screens = [c for c in (console, Console(stderr=True)) if c.is_interactive or c.is_jupyter]
DELAY_S, COMMAND_DELAY_S = 2.0, 0.2  # of work before it is shown, by calls and by commands
# Seconds between lines where none can be redrawn, at least; and as a share of those spent so far.
LOG_INTERVAL_S, LOG_SHARE = 5.0, 0.01
FORWARD_INTERVAL_S = 0.5

forwarded: list[Path] = []  # a file to which this process writes its work, see `Work.follow`
_stack: list[Work] = []  # what the main thread works on; the last is shown
_displays: list[Thread] = []  # the thread that shows it, if any


def print_next(*commands: str) -> None:
    """Print the commands, without "rcir", that one would run next."""
    lines = [f"next: rcir {commands[0]}", *(f"      rcir {command}" for command in commands[1:])]
    console.print("\n".join(lines), soft_wrap=True)


@dataclass(eq=False)
class Work:
    """Work that is shown: how many parts of it are done, some of them before, and begun."""

    name: str
    total: int | None = None
    done: int = 0
    reused: int = 0
    begun: int = 0
    started: float = field(default_factory=time.monotonic)
    has_rate: bool = False  # shows parts per second
    _written: float = 0.0

    def advance(self, count: int = 1, reused: bool = False) -> None:
        """Count parts that are done."""
        self.done, self.begun, self.reused = self.done + count, 0, self.reused + count * reused
        self._forward()

    def become(self, name: str, total: int | None = None, done: int = 0) -> None:
        """Go on to the next work in its place."""
        if name != self.name:
            self.started = time.monotonic()
        self.name, self.total, self.done = name, total, done
        self._forward()

    def follow(self, path: Path) -> None:
        """Show the work of the process that has this path in `forwarded`."""
        with suppress(OSError, ValueError):  # none yet, or half written
            self.become(*json.loads(path.read_text()))

    def _forward(self) -> None:
        now = time.monotonic()
        if forwarded and now - self._written > FORWARD_INTERVAL_S:
            self._written = now
            with suppress(OSError):
                forwarded[-1].write_text(json.dumps([self.name, self.total, self.done]))

    @property
    def state(self) -> str:
        """How far it is."""
        seconds, done = time.monotonic() - self.started, self.done + self.begun
        if self.total is None:
            return f"{seconds:.0f} s"
        if (new := done - self.reused) <= 0:
            return f"{done:,} of {self.total:,}"
        left = seconds * (self.total - done) / new
        unit = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        rate = f"{new / seconds:,.0f}/s, " if self.has_rate else ""
        return f"{done:,} of {self.total:,}, {rate}{unit} left"


@contextmanager
def working(
    name: str, total: int | None = None, logged: bool = False, has_rate: bool = False
) -> Iterator[Work]:
    """Show what the block, or the function that this decorates, works on.

    Of nested blocks the innermost is shown, and of threads the main one: servers and workers show
    nothing. `logged` is for commands.
    """
    work = Work(name, total, has_rate=has_rate)
    work._forward()
    if current_thread() is not main_thread():
        yield work
        return
    ended = Event()
    visible = (logged or _screens) and os.environ.get("RCIR_PROGRESS") != "0"
    shown = visible and not _displays
    _stack.append(work)
    if shown:
        _displays.append(Thread(target=_show, args=(ended, logged), daemon=True))
        _displays[-1].start()
    try:
        yield work
    finally:
        _stack.remove(work)
        if shown:
            ended.set()
            _displays.pop().join()


def begin(count: int) -> None:
    """Count parts of what the main thread works on, which `Work.advance` will count as done."""
    if _stack and current_thread() is main_thread():
        _stack[-1].begun += count


def _show(ended: Event, logged: bool) -> None:
    """Show the work until the event."""
    if ended.wait(delay := COMMAND_DELAY_S if logged else DELAY_S):
        return
    if _screens and not (console.is_jupyter and find_spec("ipywidgets") is None):
        return _redraw(_screens[0], ended)
    delay = 0 if console.is_jupyter else LOG_INTERVAL_S - delay
    while (logged or console.is_jupyter) and not ended.wait(delay):
        for work in _stack[-1:]:
            console.print(f"{work.name}: {work.state}", soft_wrap=True)
            delay = max(LOG_INTERVAL_S, LOG_SHARE * (time.monotonic() - work.started))


def _redraw(screen: Console, ended: Event) -> None:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn  # slow to import

    with Progress(
        SpinnerColumn(),
        BarColumn(20),
        TextColumn("{task.description}", markup=False),
        console=screen,
        transient=True,
        redirect_stdout=screen is console,  # it is a file otherwise
        redirect_stderr=screen.is_jupyter or sys.stderr.isatty(),
    ) as progress:
        while not ended.wait(0.1):
            for work in _stack[-1:]:
                if progress.tasks:
                    progress.remove_task(progress.task_ids[0])
                text, done = f"{work.name}: {work.state}", work.done + work.begun
                progress.add_task(text, total=work.total, completed=done)
