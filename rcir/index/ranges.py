"""Ranges of options."""

from __future__ import annotations

from typing import Any

from rcir.errors import InvalidConfig


def require_range(options: Any, **ranges: tuple[float, float]) -> None:
    """Raise `InvalidConfig` unless options lie in their ranges, ends included.

    Example:
        >>> from types import SimpleNamespace
        >>> require_range(SimpleNamespace(nprobe=0), nprobe=(1, 100))
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: nprobe is 0; from 1 to 100
    """
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if not least <= value <= most:
            raise InvalidConfig(f"{name} is {value!r}; from {least} to {most}")
