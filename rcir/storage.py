"""Objects in buckets: s3://BUCKET/NAME, gs://BUCKET/NAME and az://CONTAINER/NAME.

Endpoints and credentials come from the environment: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and the
other variables of the stores, or the identity of the machine. They are never stored or printed.
A place may be a `Path`, which joins as usual and has one of the slashes: `Path("s3://b/x") / "y"`.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from rcir.errors import DataUnavailable, InvalidConfig, SaveConflict
from rcir.imports import naming_extras

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Place: TypeAlias = "str | os.PathLike[str]"
URI = re.compile(r"(s3|gs|az):/{1,2}(?P<bucket>[^/]*)/?(?P<name>.*)", re.DOTALL)
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT")
RETRY_S = 120  # for which requests are repeated while a store does not answer
IN_MEMORY = 1 << 26  # bytes of an object that is opened; more are put into a temporary file
BUFFER = 1 << 16  # bytes that are requested together of an object that is opened lazily
NEW = ""  # the state of an object that does not exist yet


@dataclass(frozen=True)
class ObjectInfo:
    """An object; its ETag changes whenever it is written."""

    name: str  # below the prefix that was listed
    size: int  # bytes
    etag: str


class _Ranges(io.RawIOBase):
    """An object of which each range is requested when it is read."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._name, self._place, self._meta = store, name, 0, store.head(name)
        self._size = self._meta["size"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = (0, self._place, self._size)[whence] + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        n = max(0, min(len(buffer), self._size - self._place))
        if n:
            wanted: Any = {"range": (self._place, self._place + n), "if_match": _etag(self._meta)}
            buffer[:n] = self._store.get(self._name, options=wanted).bytes()
            self._place += n
        return n


def is_uri(place: object) -> bool:
    """Return True for the URI of an object or a prefix, also as a `Path`.

    Example:
        >>> is_uri("s3://bucket/photos"), is_uri(Path("s3://bucket") / "1.jpg"), is_uri("photos")
        (True, True, False)
    """
    return isinstance(place, str | os.PathLike) and URI.match(os.fspath(place)) is not None


def as_text(place: Place) -> str:
    """Return a path, or a URI with both of its slashes."""
    return re.sub(r"^(s3|gs|az):/+", r"\1://", os.fspath(place))


def stat_object(place: Place) -> ObjectInfo:
    """Return the facts of an object; `FileNotFoundError` if there is none."""
    with _using(place) as (store, name):
        return _info(store.head(name), name)


def read_object(place: Place) -> tuple[bytes, str]:
    """Return the content of an object and its state; `FileNotFoundError` if there is none."""
    with _using(place) as (store, name):
        result = store.get(name)
        return bytes(result.bytes()), _state(result.meta)


@contextmanager
def open_file(place: Place, lazily: bool = False) -> Iterator[IO[bytes]]:
    """Open a file, or an object, which is read completely; `FileNotFoundError` if there is none.

    With `lazily`, only the parts of an object that are used are requested, when they are used.
    """
    if not is_uri(place):
        with Path(place).open("rb") as file:
            yield file
    elif lazily:
        with _using(place) as (store, name):
            yield io.BufferedReader(_Ranges(store, name), BUFFER)
    else:
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as copy:
            _copy(place, copy)
            copy.seek(0)
            yield copy


def download(place: Place, path: Path) -> None:
    """Write an object to a file and make its folders; `FileNotFoundError` if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        _copy(place, file)


def _copy(place: Place, file: Any) -> None:
    with _using(place) as (store, name):
        for chunk in store.get(name):
            file.write(chunk)


def write_object(place: Place, content: bytes | Path, replaced: str | None = None) -> str:
    """Write an object, bytes or a file, whole or not at all, and return its state.

    `replaced` is the state of the only version that may be replaced, see `read_object`; `NEW` if
    there must be none; None replaces any. Otherwise, `SaveConflict` is raised.
    """
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    with _using(place) as (store, name):
        mode: Any = "overwrite"
        if replaced is not None:
            mode = "create" if replaced == NEW else json.loads(replaced)
        try:
            return _state(store.put(name, content, mode=mode))
        except FileNotFoundError:
            raise DataUnavailable(_explain(as_text(place), "<Code>NoSuchBucket</Code>")) from None
        except (AlreadyExistsError, PreconditionError):
            raise SaveConflict(f"{as_text(place)} was written by another process") from None


def list_objects(place: Place, deep: bool = True) -> list[ObjectInfo]:
    """Return the objects below a prefix by name; without `deep`, those directly below it."""
    with _using(place) as (store, name):
        prefix = _prefix(name)
        if deep:
            listed = [meta for chunk in store.list(prefix, chunk_size=1000) for meta in chunk]
        else:
            listed = list(store.list_with_delimiter(prefix)["objects"])
    infos = [_info(meta, meta["path"].removeprefix(prefix)) for meta in listed]
    return sorted((info for info in infos if info.name), key=lambda info: info.name)


def is_file(place: Path) -> bool:
    """Return True if there is a file or an object."""
    try:
        return bool(stat_object(place)) if is_uri(place) else place.is_file()
    except FileNotFoundError:
        return False


def is_folder(place: Path) -> bool:
    """Return True if there is a folder, or an object below a prefix."""
    if not is_uri(place):
        return place.is_dir()
    with _using(place) as (store, name):
        return any(store.list(_prefix(name), chunk_size=1))


def list_files(folder: Path) -> list[str]:
    """Return the names of the files directly in a folder; none if it does not exist."""
    if is_uri(folder):
        return [info.name for info in list_objects(folder, deep=False)]
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_file()]


def join(folder: Path, place: Place) -> Path:
    """Return a path relative to a folder, or a URI, which is not."""
    return Path(place) if is_uri(place) else folder / place


def delete_objects(places: Sequence[Place]) -> None:
    """Delete objects of one bucket; some may be missing."""
    if places:
        with _using(places[0]) as (store, _):
            store.delete([_split(place)[1] for place in places])


def _prefix(name: str) -> str:
    return f"{name}/" if name else ""


def _info(meta: Any, name: str) -> ObjectInfo:
    return ObjectInfo(name, meta["size"], _etag(meta))


def _state(meta: Any) -> str:
    """Return what a conditional write compares: the ETag, or on Google Cloud the generation."""
    generation = {"version": meta["version"]} if meta["version"] else {}
    return json.dumps({"e_tag": _etag(meta)} | generation)


def etag_of(state: str) -> str:
    """Return the ETag in the state of an object, which `ObjectInfo` has."""
    etag: str = json.loads(state)["e_tag"]
    return etag


def _etag(meta: Any) -> str:
    etag: str | None = meta["e_tag"]
    if not etag:
        raise InvalidConfig("the store has no ETags, by which changes are noticed: use another one")
    return etag


def _split(place: Place) -> tuple[str, str]:
    """Return the URI of the bucket, and the name in it."""
    match = URI.fullmatch(os.fspath(place))
    if match is None or not match["bucket"]:
        raise InvalidConfig(f"{as_text(place)} names no bucket: use s3://BUCKET/NAME")
    name = match["name"].rstrip("/")
    if name and not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise InvalidConfig(f"{as_text(place)} has '..' or empty parts, which no object has")
    return f"{match[1]}://{match['bucket']}", name


@contextmanager
def _using(place: Place) -> Iterator[tuple[ObjectStore, str]]:
    """Yield the store of a place and the name in it; its errors become those of rcir.

    `FileNotFoundError` and errors of local files stay. Messages leave out what the store answered,
    but for its code: it may contain keys.
    """
    with naming_extras():
        from obstore.exceptions import BaseError

    bucket, name = _split(place)
    try:
        yield _store(bucket, tuple(map(os.environ.get, ENDPOINTS)), RETRY_S), name
    except FileNotFoundError as error:
        if error.filename is not None:  # of a local file
            raise
        raise FileNotFoundError(f"there is no object {as_text(place)}") from None
    except BaseError as error:
        raise DataUnavailable(_explain(as_text(place), str(error))) from None


def _explain(place: str, reason: str) -> str:
    code = re.search(r"<Code>(\w+)</Code>", reason)
    status = re.search(r"status code: (\d{3}[\w ]*)", reason)
    cause = code[1] if code else status[1].strip() if status else "no answer"
    remedy = "check the network and AWS_ENDPOINT_URL, and repeat the command"
    if cause == "PreconditionFailed":
        remedy = "it was replaced while it was read: repeat the command"
    elif code or status:
        remedy = "check the name of the bucket, and what the credentials in the environment allow"
    return f"{place} cannot be used ({cause}): {remedy}"


@lru_cache
def _store(bucket: str, endpoints: Iterable[str | None], retry_s: float) -> ObjectStore:
    """Return the store of a bucket, which threads share."""
    from obstore.store import from_url

    plain = any(str(endpoint).startswith("http:") for endpoint in endpoints)
    second = timedelta(seconds=1)
    return from_url(
        bucket,
        client_options={"allow_http": True} if plain else {},
        retry_config={
            "max_retries": 1000,
            "retry_timeout": retry_s * second,
            "backoff": {"init_backoff": 0.2 * second, "max_backoff": 5 * second, "base": 2},
        },
    )
