"""Runs in buckets: the copy of a run's folder on this machine, and how it is kept equal.

A process works in its copy, in the cache (RCIR_CACHE). `fetch` makes the copy equal to the bucket,
and `push` uploads what has changed since: files before the checkpoint that they belong to is
complete, `run.json` last. What was not uploaded when a process died is made again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from filelock import FileLock, Timeout

from rcir import storage
from rcir.errors import DataUnavailable, InvalidConfig, SaveConflict
from rcir.files import is_dead, owner, write_json, written_aside
from rcir.store.folder import cache_folder
from rcir.terminal import working

RUN_FILE = "run.json"
RUNS, TRAININGS = "bucket-runs", "bucket-trainings"  # folders of the cache
CHECKPOINTS, STATE_FILE = "checkpoints", "state.json"  # which completes a checkpoint
CLAIM_LOCK, HOLDER_FILE = ".claim.lock", ".holder"
LEASE_S = 90  # for which a lock is not renewed if the machine of its process is lost
# In a copy: of each file that is in the bucket its ETag, and its size and time on this machine.
OBJECTS_FILE, OBJECTS_LOCK = ".objects.json", ".objects.lock"
# Of the processes on a machine; hidden files are, too.
OWN_FILES = {"lock", "progress.json", "stopped", "training.log"}


def local_folder(place: Path, training: bool = False) -> Path:
    """Return the absolute folder of a path, or the copy of a folder in a bucket.

    Training uses a separate copy, which includes checkpoints.

    Example:
        >>> copy = local_folder(Path("s3://bucket/runs/x"))
        >>> copy.name, place_of(copy) == Path("s3://bucket/runs/x")
        ('x', True)
    """
    if not storage.is_uri(place):
        return place.absolute()
    if ".." in place.parts:
        raise InvalidConfig(f"{storage.as_text(place)} has '..', which no object has")
    kind = TRAININGS if training else RUNS
    return cache_folder() / kind / storage.as_text(place).replace("://", "/", 1)


def place_of(folder: Path) -> Path:
    """Return the URI that a folder is the copy of; another folder itself."""
    kind, scheme, *names = [*_parts_in_cache(folder), "", ""]
    if kind not in (RUNS, TRAININGS):
        return folder
    return Path(f"{scheme}://{'/'.join(filter(None, names))}")


def fetch(place: Path, training: bool = False) -> Path:
    """Make the copy of a folder in a bucket equal to it; return it, or a local folder itself.

    The files of the folder are copied, for a training also its complete checkpoints, but no other
    folders in it. Raises `DataUnavailable` if the bucket cannot be read.
    """
    folder = local_folder(place, training)
    if not storage.is_uri(place):
        return folder
    objects = {info.name: info.etag for info in storage.list_objects(place)}
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / OBJECTS_LOCK):
        recorded = _read_objects(folder)
        wanted = _parts(objects, training)
        for name in _files(folder, training) - wanted:
            (folder / name).unlink()
        for name in wanted:
            file = folder / name
            if recorded.get(name) != [objects[name], *_state(file)]:
                file.parent.mkdir(parents=True, exist_ok=True)
                with written_aside(file) as aside:
                    storage.download(place / name, aside)
                recorded[name] = [objects[name], *_state(file)]
                write_json(folder / OBJECTS_FILE, recorded)
        # Those of a checkpoint that was not completed are for `push` to delete.
        recorded = {
            name: recorded[name]
            if recorded.get(name, [])[:1] == [objects[name]]
            else [objects[name]]
            for name in _parts(objects, True, False)
        }
        write_json(folder / OBJECTS_FILE, recorded)
        for checkpoint in (folder / CHECKPOINTS).glob("[!.]*"):
            with suppress(OSError):  # unless it has files
                checkpoint.rmdir()
    return folder


def push(folder: Path) -> None:
    """Upload what has changed in a copy since `fetch`, and delete what is gone from it.

    A local folder is left alone. After `DataUnavailable`, the next call uploads what is missing.
    Raises `InvalidConfig` if another process has replaced the lock that `claimed` wrote.
    """
    place = place_of(folder)
    if not storage.is_uri(place):
        return
    training = _parts_in_cache(folder)[0] == TRAININGS
    if (file := folder / HOLDER_FILE).is_file():
        _require_lock(place, file.read_text())
    with FileLock(folder / OBJECTS_LOCK):
        recorded = _read_objects(folder)
        names = _parts(_files(folder, training), training)
        try:
            for name in sorted(names, key=_order):
                state = _state(folder / name)
                if recorded.get(name, [])[1:] != state:
                    written = storage.write_object(place / name, folder / name)
                    recorded[name] = [storage.etag_of(written), *state]
            gone = _parts(recorded, training, False) - names
            # A checkpoint without its state is not one.
            for part in (filter(_completes, gone), gone):
                storage.delete_objects([place / name for name in part])
            recorded = {name: value for name, value in recorded.items() if name not in gone}
        finally:
            write_json(folder / OBJECTS_FILE, recorded)


@contextmanager
def claimed(place: Path) -> Iterator[None]:
    """Keep others from training a run in a bucket inside the block; local ones have `lock_run`.

    The object `lock` is renewed inside the block. One that is not, of a machine that was lost, is
    replaced after `LEASE_S`; one of a process of this machine that was killed, at once. Raises
    `InvalidConfig` if another process trains.
    """
    if not storage.is_uri(place):
        yield
        return
    (folder := local_folder(place, training=True)).mkdir(parents=True, exist_ok=True)
    lock, ended = place / "lock", Event()

    def renew(state: str) -> None:
        while not ended.wait(LEASE_S / 6):
            try:
                state = storage.write_object(lock, _claim(), state)
            except DataUnavailable:  # for now
                continue
            except SaveConflict:
                # Perhaps by this process, if it did not get the answer of the store.
                with suppress(DataUnavailable, FileNotFoundError):
                    content, state = storage.read_object(lock)
                    if _holder(content) == owner():
                        continue
                    return

    with ExitStack() as local:
        try:
            local.enter_context(FileLock(folder / CLAIM_LOCK, timeout=0))
            state = storage.write_object(lock, _claim(), _await_end(lock))
        except (Timeout, SaveConflict) as error:
            raise _taken(place) from error
        hold(place, owner())
        renewing = Thread(target=renew, args=[state], daemon=True)
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()
            (folder / HOLDER_FILE).unlink(missing_ok=True)
            with suppress(DataUnavailable, InvalidConfig):
                _require_lock(place, owner())
                storage.delete_objects([lock])


def hold(place: Path, holder: str) -> None:
    """Let `push` upload from this machine only while a process holds the lock of a run."""
    if storage.is_uri(place):
        (folder := local_folder(place, training=True)).mkdir(parents=True, exist_ok=True)
        (folder / HOLDER_FILE).write_text(holder)


def _require_lock(place: Path, holder: str) -> None:
    """Raise `InvalidConfig` if a process does not hold the lock of a run."""
    with suppress(FileNotFoundError):
        if _holder(storage.read_object(place / "lock")[0]) == holder:
            return
    raise _taken(place)


def _taken(place: Path) -> InvalidConfig:
    return InvalidConfig(
        f"{storage.as_text(place)} is being trained by another process, or was while this one did "
        "not reach it: stop one of them, or choose another name"
    )


def _claim() -> bytes:
    return f"{owner()} {time.time()}".encode()  # another ETag each time


def _holder(claim: bytes) -> str:
    return claim.decode().partition(" ")[0]


def _await_end(lock: Path) -> str:
    """Return the state of a lock that is not renewed; `SaveConflict` if it is."""
    until = time.monotonic() + LEASE_S
    with suppress(FileNotFoundError):
        content, state = storage.read_object(lock)
        with working("waiting for the process that trains", logged=True):
            while not is_dead(_holder(content)) and time.monotonic() < until:
                time.sleep(1)
                if storage.read_object(lock)[1] != state:
                    raise SaveConflict(f"{storage.as_text(lock)} was renewed")
        return state
    return storage.NEW


def _parts_in_cache(folder: Path) -> tuple[str, ...]:
    inside = folder.is_relative_to(cache := cache_folder())
    return folder.relative_to(cache).parts if inside else ()


def _completes(name: str) -> bool:
    return name.endswith(f"/{STATE_FILE}")


def _order(name: str) -> tuple[bool, bool, str]:
    return name == RUN_FILE, _completes(name), name


def _parts(names: Iterable[str], checkpoints: bool, complete: bool = True) -> set[str]:
    """Return the names of files that belong to a run, see `fetch`."""
    pattern = r"[^/.][^/]*" + rf"|{CHECKPOINTS}/[^/.][^/]*/[^/.][^/]*" * checkpoints
    parts = {name for name in names if re.fullmatch(pattern, name)} - OWN_FILES
    if not complete:
        return parts
    kept = {name.rpartition("/")[0] for name in parts if _completes(name)} | {""}
    return {name for name in parts if name.rpartition("/")[0] in kept}


def _files(folder: Path, checkpoints: bool) -> set[str]:
    """Return the names of the files in a copy, see `fetch`."""
    files = [*folder.glob("*"), *(folder / CHECKPOINTS).glob("*/*")]
    names = (file.relative_to(folder).as_posix() for file in files if file.is_file())
    return _parts(names, checkpoints, False)


def _state(file: Path) -> list[int]:
    """Return size and time of a file, which writing changes; nothing if there is no file."""
    with suppress(FileNotFoundError):
        status = file.stat()
        return [status.st_size, status.st_mtime_ns]
    return []


def _read_objects(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        recorded: dict[str, Any] = json.loads((folder / OBJECTS_FILE).read_text())
        return recorded
    return {}
