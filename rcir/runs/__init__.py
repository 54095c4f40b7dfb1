"""Runs in their folders: what they hold, where they are found, how they compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.imports import lazily

if TYPE_CHECKING:
    from rcir.runs.folder import RunFolder, find_run

_HOMES = {"rcir.runs.folder": ("RunFolder", "find_run")}

__all__ = ["RunFolder", "find_run"]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
