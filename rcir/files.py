"""Atomic writing of files and folders: whole or not at all, whenever the writer is killed.

Files are written under a hidden name that states the writer: host, process and start of that
process. What dead processes left under such names is removed before anything is written.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir import storage

NUMPY_WROTE_LESS = re.compile(r"\d+ requested and \d+ written")  # its error has no number
UNFINISHED_NAME = re.compile(r"-(?P<owner>[0-9a-f]{8}-\d+-\d+)-[0-9a-f]{8}(?P<end>-old|-journal)?")


def read_array(path: Path) -> NDArray[Any]:
    """Return the array of a .npy file; archives and pickles raise an exception of any kind."""
    with path.open("rb") as file:
        values: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return values


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a place to write a file to, which is renamed or uploaded to `path` after the block."""
    if storage.is_uri(path):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / path.name
            storage.write_object(path, Path(folder) / path.name)
        return
    remove_unfinished(path)
    aside = _aside(path)
    try:
        with _naming(path):
            yield aside
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, or an object in a bucket, atomically."""
    with written_aside(path) as aside:
        aside.write_bytes(content)


def write_json(path: Path, values: Any) -> None:
    """Write JSON atomically."""
    write_file(path, json.dumps(values, indent=1).encode())


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder aside, then rename it into place; an existing one is renamed to "...-old".

    If this process is killed between the two renames, `remove_unfinished` makes the second one.
    """
    remove_unfinished(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(folder)
    old = aside.with_name(f"{aside.name}-old")
    aside.mkdir()
    try:
        with _naming(folder):
            fill(aside)
            for path in (*aside.rglob("*"), aside):  # on disk before it has its name
                sync(path)
            _replace(folder, aside, old)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        with suppress(OSError):  # unless it was replaced
            old.rename(folder)
        for path in (aside, old):
            shutil.rmtree(path, ignore_errors=True)


def _replace(folder: Path, aside: Path, old: Path) -> None:
    while True:
        with suppress(FileNotFoundError):
            folder.rename(old)
        try:
            aside.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(old, ignore_errors=True)  # another process was faster: repeat


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to errors of a full disk."""
    try:
        yield
    except OSError as error:
        number = error.errno
        if number is None and NUMPY_WROTE_LESS.fullmatch(str(error)):
            number = errno.ENOSPC
        if error.filename is not None or number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def remove_unfinished(path: Path) -> None:
    """Remove what dead processes of this host began to write to a path.

    A complete folder that a process was about to rename to the path is renamed instead.
    """
    try:
        files = sorted(path.parent.iterdir(), reverse=True)  # "-old" before the new folder
    except OSError:
        return  # the parent does not exist or cannot be read
    for file in files:
        hidden = file.name.startswith(f".{path.name}-")
        match = UNFINISHED_NAME.fullmatch(file.name, len(path.name) + 1) if hidden else None
        if match and is_dead(match["owner"]):
            if match["end"] == "-old":
                with suppress(OSError):  # unless there is a folder at the path
                    file.with_name(file.name.removesuffix("-old")).rename(path)
            with suppress(OSError):  # another process may remove it, too
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def sync(path: Path) -> None:
    """Write cached changes of a file or folder to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def owner() -> str:
    """Return a name of this process, unique among all hosts: host, number and start."""
    return f"{_host()}-{os.getpid()}-{_start(os.getpid())}"


def is_dead(other: str) -> bool:
    """Return True if `other`, a name by `owner`, is a process of this host that has ended."""
    host, _, process = other.partition("-")
    number, _, start = process.partition("-")
    if host != _host() or not (number.isdecimal() and start.isdecimal()):
        return False  # it is unknown
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return _start(int(number)) not in (0, int(start))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{owner()}-{secrets.token_hex(4)}")


@cache
def _host() -> str:
    """Return a name of the host, or of the container with its own process numbers."""
    numbers = ""
    with suppress(OSError):
        numbers = str(Path("/proc/self/ns/pid").readlink())
    name = f"{socket.gethostname()} {numbers}"
    return blake2b(name.encode(), digest_size=4).hexdigest()


def _start(number: int) -> int:
    """Return the start of a process in ticks since that of the host; -1: a zombie, 0: unknown."""
    try:
        stat = Path(f"/proc/{number}/stat").read_bytes()
    except OSError:
        return 0
    state, *numbers = stat.rpartition(b")")[2].split()
    return -1 if state in (b"Z", b"X") else int(numbers[18])
