"""What long work shows while it runs: on a terminal only, and gone when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from calibration.table import console


@contextmanager
def step(name: str) -> Iterator[None]:
    """Name what is being done, with a spinner."""
    with console.status(name):
        yield
