"""Atomic writing of files and folders: whole or not at all, whenever the writer is killed.

Files are written under a hidden name that states the writer: host, process and when that
process began. A process that finds such names, and none of a living process, takes up where the
dead one stopped (`settle`): that is done before anything is written.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY_WROTE_LESS = re.compile(r"\d+ requested and \d+ written")  # its error has no number
OWNED = re.compile(r"-(?P<owner>[0-9a-f]{8}-\d+-\d+)-[0-9a-f]{8}(?P<end>-old|-gone|-journal)?")


def read_array(path: Path) -> NDArray[Any]:
    """The array of a .npy file, and of nothing else: no archive, no pickle.

    Raises:
        ValueError, OSError, EOFError, SyntaxError, MemoryError, and other exceptions: it is none.
    """
    with path.open("rb") as file:
        values: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return values


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield the place to write a file to, which is renamed to its path after the block."""
    settle(path)
    aside = _aside(path)
    try:
        with _naming(path):
            yield aside
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file aside, then rename it into place."""
    with written_aside(path) as aside:
        aside.write_bytes(content)


def write_json(path: Path, values: Any) -> None:
    """Write JSON, all of it or nothing."""
    write_file(path, json.dumps(values, indent=1).encode())


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder aside, then rename it into place: it is never there by half.

    An existing folder is replaced; what it held is kept until the new one is complete. Killed
    between the two renames that this takes, the next call, or `settle`, makes the second one.
    """
    settle(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(folder)
    aside.mkdir()
    try:
        with _naming(folder):
            fill(aside)
            for path in (*aside.rglob("*"), aside):  # on disk before anything is replaced
                sync(path)
            _replace(folder, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the path in errors of a full disk, whose errors name none."""
    try:
        yield
    except OSError as error:
        number = error.errno
        if number is None and NUMPY_WROTE_LESS.fullmatch(str(error)):
            number = errno.ENOSPC
        if error.filename is not None or number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def settle(path: Path) -> None:
    """Finish what a dead process began to write to a path, or remove it.

    A folder that is missing because a process was killed while it replaced it is there again, as
    the new one. What living processes write, and those of other hosts, is left alone.
    """
    begun: list[tuple[Path, str, bool]] = []
    try:
        names = [one.name for one in path.parent.iterdir()]
    except OSError:
        return  # there is nothing, or nothing to be seen
    for name in names:
        if name.startswith(f".{path.name}-"):
            match = OWNED.fullmatch(name.removeprefix(f".{path.name}"))
            if match:
                dead = is_dead(match["owner"])
                begun.append((path.with_name(name), match["end"] or "", dead))
    if not os.path.lexists(path) and all(dead for *_, dead in begun):
        for old in [one for one, end, _ in begun if end == "-old"]:
            for whole in (old.with_name(old.name.removesuffix("-old")), old):
                with suppress(OSError):  # another process may do the same
                    if not os.path.lexists(path):
                        whole.rename(path)
    for one, end, dead in begun:
        if dead:
            _remove(one, end)


def sync(path: Path) -> None:
    """Write cached changes of a file or folder to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def owner() -> str:
    """This process, as no other one on any host is called: host, number and start."""
    return f"{_host()}-{os.getpid()}-{_start(os.getpid())}"


def is_dead(other: str) -> bool:
    """Return whether a process, as `owner` calls it, is one of this host that has ended.

    Example:
        >>> is_dead(owner())
        False
    """
    host, _, process = other.partition("-")
    number, _, start = process.partition("-")
    if host != _host() or not (number.isdecimal() and start.isdecimal()):
        return False  # that cannot be known from here
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return _start(int(number)) not in (0, int(start))


def _replace(folder: Path, aside: Path) -> None:
    old = aside.with_name(f"{aside.name}-old")
    try:
        while True:
            if os.path.lexists(folder):
                folder.rename(old)
            try:
                aside.rename(folder)
                break
            except OSError:
                if not os.path.lexists(folder):
                    raise
                _remove(old, "-old")  # another process was faster: it is replaced in turn
    except BaseException:
        if not os.path.lexists(folder) and old.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    _remove(old, "-old")


def _remove(path: Path, end: str) -> None:
    """Remove a file or folder; what is called "-old" is whole, and no longer called so."""
    with suppress(OSError):
        if end == "-old":
            gone = path.with_name(f"{path.name.removesuffix('-old')}-gone")
            path = path.rename(gone)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}-{owner()}-{secrets.token_hex(4)}")


@cache
def _host() -> str:
    """The host, or the container on it, with process numbers of its own."""
    numbers = ""
    with suppress(OSError):
        numbers = str(Path("/proc/self/ns/pid").readlink())
    name = f"{socket.gethostname()} {numbers}"
    return blake2b(name.encode(), digest_size=4).hexdigest()


def _start(number: int) -> int:
    """When a process began, in ticks since the host did; -1 if it only waits to be forgotten, 0
    where nothing can be known.
    """
    try:
        stat = Path(f"/proc/{number}/stat").read_bytes()
    except OSError:
        return 0
    state, *numbers = stat.rpartition(b")")[2].split()
    return -1 if state in (b"Z", b"X") else int(numbers[18])
