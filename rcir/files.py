"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_array(path: Path) -> NDArray[Any]:
    """The array of a .npy file, and of nothing else: no archive, no pickle.

    Raises:
        ValueError, OSError, EOFError, SyntaxError, MemoryError, and other exceptions: it is none.
    """
    with path.open("rb") as file:
        values: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return values


def write_file(path: Path, content: bytes) -> None:
    """Write a file aside, then rename it into place."""
    aside = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Write JSON, all of it or nothing."""
    write_file(path, json.dumps(values, indent=1).encode())


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder aside, then rename it into place: it is never there by half.

    An existing folder is replaced; what it held is kept until the new one is complete.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    aside.mkdir()
    try:
        fill(aside)
        for path in (*aside.rglob("*"), aside):  # on disk before anything is replaced
            _sync(path)
        old = aside.with_name(aside.name + "-old")
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have the system write to disk what it holds of a file or a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
