"""Answers and feedback on them, in an SQLite file that several processes may share."""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.embedding import Embedding
from rcir.errors import InvalidData
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.queries import Queries
from rcir.risk import Population
from rcir.serving.errors import StoreUnavailable, UnknownAnswer

if TYPE_CHECKING:  # reading the file does not require the packages of a server
    from rcir.serving.schemas import Feedback, Terms

STORE_FORMAT = 2
MAX_ANSWERS = 100_000  # without feedback; older ones are deleted
DELETION_INTERVAL = 1000  # answers between two deletions of old ones
LOCK_SECONDS = 10.0  # for which feedback waits while another process locks the file
ANSWER_LOCK_SECONDS = 0.5  # for which answers wait
ANSWER_PAUSE_SECONDS = 10.0  # for which answers do not wait again
SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    time REAL NOT NULL,
    version TEXT NOT NULL,
    terms TEXT NOT NULL,
    watched INTEGER NOT NULL,
    items TEXT NOT NULL,
    digest BLOB NOT NULL,
    query BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS feedback (
    number INTEGER PRIMARY KEY,
    answer TEXT NOT NULL UNIQUE REFERENCES answers (id),
    time REAL NOT NULL,
    match INTEGER NOT NULL,
    label TEXT
);
"""


@dataclass(frozen=True)
class MonitoredQuery:
    """A query whose answer is monitored, with or without feedback."""

    number: int  # of the answer, in order of arrival
    time: float  # of arrival, in seconds since 1970
    digest: bytes  # of the query


@dataclass(frozen=True)
class Loss:
    """Feedback on a monitored answer."""

    number: int  # of the feedback, in order of arrival
    terms: str  # the `Terms.guarantee`
    miss: bool  # True if the set contained no true match
    answer: int  # number of the answer
    time: float  # of the feedback, in seconds since 1970
    digest: bytes  # of the query


@dataclass(frozen=True)
class Reported:
    """Queries with feedback."""

    queries: Queries
    matches: list[bool]  # for each, True if the answer contained a true match
    labels: list[Any]  # of each; None if the feedback names none

    def new(self, earlier: NDArray[np.bytes_], recurring: bool) -> Reported:
        """Return the queries that are not among `earlier` digests, see `is_new`.

        Each comes once, with a label if any occurrence has one; with `recurring`, all come.
        """
        rows = np.arange(len(self.labels))
        if not recurring:
            labelled_first = np.argsort([label is None for label in self.labels], kind="stable")
            _, first = np.unique(self.queries.digests[labelled_first], return_index=True)
            rows = np.sort(labelled_first[first])
        rows = rows[is_new(self.queries.digests[rows], earlier)]
        matches = [self.matches[row] for row in rows]
        return Reported(self.queries[rows], matches, [self.labels[row] for row in rows])

    @property
    def n_unlabelled_hits(self) -> int:
        """Number of queries without a label whose answers contained a match."""
        return sum(m and label is None for m, label in zip(self.matches, self.labels, strict=True))

    @property
    def n_unlabelled_misses(self) -> int:
        """Number of queries without a label whose answers contained no match."""
        return self.labels.count(None) - self.n_unlabelled_hits

    def require_labels_of_hits(self) -> None:
        """Raise `InvalidData` unless all queries whose answers contained a match have a label.

        A miss without a label counts as a query that matches nothing, which is at least as hard. A
        hit without one can be neither used nor left out: in smaller sets it may be a miss.
        """
        if self.n_unlabelled_hits:
            hits = sum(self.matches)
            raise InvalidData(
                f"{self.n_unlabelled_hits} of {hits} queries with feedback match: true have no "
                f"label ({self.n_unlabelled_misses} of {len(self.matches) - hits} with match: "
                "false have none, and count as misses). The ranks of their matches are unknown, "
                "and the other queries alone are not representative: send that feedback again "
                "with the labels"
            )


def is_new(digests: NDArray[np.bytes_], earlier: NDArray[np.bytes_]) -> NDArray[np.bool_]:
    """Return (n,) True for the digests that are not among (m,) ascending `earlier` ones."""
    if not len(earlier):
        return np.ones(len(digests), np.bool_)
    places = np.searchsorted(earlier, digests).clip(max=len(earlier) - 1)
    return np.asarray(earlier[places] != digests, np.bool_)


def _encode(queries: Queries) -> list[bytes]:
    """Return each query, all that it is searched by, in safetensors' format."""
    arrays: dict[str, NDArray[Any]] = {
        "vectors": queries.vectors,
        "digests": queries.digests.view(np.uint8).reshape(len(queries), -1),
    }
    if queries.uncertainty is not None:
        arrays["uncertainty"] = queries.uncertainty
    if queries.pictures is not None:
        arrays["pictures"] = queries.pictures
    if queries.keys is not None:
        arrays["keys"] = np.char.encode(queries.keys, "utf-8").view(np.uint8)
        arrays["keys"] = arrays["keys"].reshape(len(queries), -1)
    if queries.embedding is not None:
        parts = queries.embedding.arrays()
        arrays |= {f"embedding.{name}": values for name, values in parts.items()}
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    return [
        save_arrays({name: values[row : row + 1] for name, values in arrays.items()})
        for row in range(len(queries))
    ]


def _decode(row: bytes) -> Queries:
    """Return the query that `_encode` wrote."""
    arrays = load_arrays(row)
    vectors, digests = arrays.pop("vectors"), arrays.pop("digests")
    uncertainty, pictures = arrays.pop("uncertainty", None), arrays.pop("pictures", None)
    keys = arrays.pop("keys", None)
    parts = {name.removeprefix("embedding."): values for name, values in arrays.items()}
    return Queries(
        vectors,
        uncertainty,
        embedding=Embedding.from_arrays(parts) if parts else None,
        population=Population(len(vectors), digests.view(f"S{digests.shape[1]}")[:, 0]),
        keys=None
        if keys is None
        else np.char.decode(keys.view(f"S{keys.shape[1]}")[:, 0], "utf-8"),
        pictures=pictures,
    )


class Store:
    """Answers and feedback on them, in a file that is created if it does not exist.

    What is acknowledged is on disk: answers survive the end of the process, and feedback that of
    the machine. All methods raise `StoreUnavailable` if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock = threading.RLock()
        self._n_added = 0  # since old answers were last deleted
        self._locked_at = -math.inf  # when a wait of answers last ended without success
        self._failure: str | None = None  # of the last attempt to write
        with self._naming_file():
            self._connection = sqlite3.connect(
                path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            ((version,),) = self._read("PRAGMA user_version")
            if version not in (0, STORE_FORMAT):
                raise StoreUnavailable(
                    f"{path} has format {version}, expected {STORE_FORMAT}: name another file"
                )
            if version == 0 and self._read("SELECT 1 FROM sqlite_master"):
                raise StoreUnavailable(f"{path} belongs to another program: name another file")
            self._connection.executescript(SCHEMA)
            self._connection.execute(f"PRAGMA user_version = {STORE_FORMAT}")
            self._connection.execute("PRAGMA wal_checkpoint")
        self._files, self._size = self._files_now()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @property
    def trouble(self) -> str | None:
        """Why answers and feedback are not stored, by the last attempt; None if they are."""
        try:
            self._require_files()
        except StoreUnavailable as error:
            return str(error)
        return self._failure

    def add(self, answered: Iterable[tuple[str, Terms, Queries, Sequence[Retrieval]]]) -> list[str]:
        """Store all answers of some requests or none, and return an id for each.

        A request has the version that answered, terms, queries and answers. After another process
        kept the file locked, no answers are stored for `ANSWER_PAUSE_SECONDS`.
        """
        if time.monotonic() < self._locked_at + ANSWER_PAUSE_SECONDS:
            raise StoreUnavailable(f"{self.path} was locked by another process a moment ago")
        now, rows = time.time(), []
        for version, terms, queries, answers in answered:
            queries = queries.with_population()
            parts = zip(answers, queries.digests, _encode(queries), strict=True)
            for answer, digest, query in parts:
                watched = terms.watched and not answer.abstained
                name, items = secrets.token_urlsafe(12), json.dumps(answer.ids)
                rows.append(
                    (name, now, version, terms.guarantee, watched, items, bytes(digest), query)
                )
        began = time.monotonic()
        try:
            with self._writing("NORMAL", ANSWER_LOCK_SECONDS):
                self._connection.executemany(
                    "INSERT INTO answers (id, time, version, terms, watched, items, digest, query) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    rows,
                )
                self._n_added += len(rows)
                if self._n_added >= DELETION_INTERVAL:
                    self._n_added = 0
                    self._delete_old_answers()
        except StoreUnavailable:
            if time.monotonic() - began > ANSWER_LOCK_SECONDS / 2:
                self._locked_at = time.monotonic()
            raise
        return [row[0] for row in rows]

    def answer(self, name: str) -> tuple[str, list[str]]:
        """Return the version of the retriever that gave an answer, and the ids of its set."""
        for version, items in self._read("SELECT version, items FROM answers WHERE id = ?", [name]):
            return version, json.loads(items)
        raise UnknownAnswer(
            f"there is no answer {name!r}: pass the id that came with it; the last "
            f"{MAX_ANSWERS:,} answers are kept"
        )

    def feed(self, feedback: Feedback) -> int | None:
        """Store feedback on an answer; return its number, or None if it repeats or adds a label."""
        name = feedback.answer
        label = None if feedback.label is None else json.dumps(feedback.label)
        with self._writing("FULL", LOCK_SECONDS):
            self.answer(name)
            for match, earlier in self._read(
                "SELECT match, label FROM feedback WHERE answer = ?", [name]
            ):
                if match != feedback.match or (None not in (earlier, label) and earlier != label):
                    raise InvalidData(
                        f"feedback on {name!r} contradicts earlier feedback, which is kept"
                    )
                self._connection.execute(
                    "UPDATE feedback SET label = coalesce(label, ?) WHERE answer = ?", (label, name)
                )
                return None
            return self._connection.execute(
                "INSERT INTO feedback (answer, time, match, label) VALUES (?, ?, ?, ?)",
                (name, time.time(), feedback.match, label),
            ).lastrowid

    def losses(self, version: str, after: int = 0) -> list[Loss]:
        """Return the feedback on monitored answers of a version, in order of arrival."""
        rows = self._read(
            "SELECT feedback.number, terms, NOT match, answers.number, feedback.time, digest "
            "FROM feedback JOIN answers ON answers.id = answer "
            "WHERE version = ? AND watched AND feedback.number > ? ORDER BY feedback.number",
            (version, after),
        )
        return [Loss(number, terms, bool(miss), *rest) for number, terms, miss, *rest in rows]

    def monitored(self, version: str, terms: str, after: int, until: int) -> list[MonitoredQuery]:
        """Return the queries of a guarantee (`Terms.guarantee`) in order of arrival.

        The numbers of their answers are above `after` and at most `until`.
        """
        rows = self._read(
            "SELECT number, time, digest FROM answers WHERE version = ? AND terms = ? "
            "AND watched AND number > ? AND number <= ? ORDER BY number",
            (version, terms, after, until),
        )
        return [MonitoredQuery(*row) for row in rows]

    def reported(self, version: str, since: float = 0.0) -> Reported | None:
        """Return the queries of a version that have feedback, the latest first; None without any.

        They arrived since a time, in seconds since 1970.
        """
        rows = self._read(
            "SELECT query, match, label FROM feedback JOIN answers ON answers.id = answer "
            "WHERE version = ? AND answers.time >= ? ORDER BY answers.number DESC",
            (version, since),
        )
        if not rows:
            return None
        return Reported(
            Queries.joined([_decode(query) for query, _, _ in rows]),
            [bool(match) for _, match, _ in rows],
            [None if label is None else json.loads(label) for _, _, label in rows],
        )

    def n_unreported(self, version: str, since: float = 0.0) -> int:
        """Return the number of answers of a version without feedback."""
        ((count,),) = self._read(
            "SELECT count(*) FROM answers WHERE version = ? AND time >= ? "
            "AND id NOT IN (SELECT answer FROM feedback)",
            (version, since),
        )
        return int(count)

    def _delete_old_answers(self) -> None:
        """Delete old answers without feedback, unless they may count as misses."""
        self._connection.execute(
            "DELETE FROM answers WHERE number <= (SELECT max(number) FROM answers) - ? "
            "AND id NOT IN (SELECT answer FROM feedback) "
            "AND NOT (watched AND number < (SELECT coalesce(max(reported.number), 0) "
            "FROM answers AS reported JOIN feedback ON reported.id = answer))",
            (MAX_ANSWERS,),
        )

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of a query."""
        with self._lock, self._naming_file():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _writing(self, synchronous: str, seconds: float) -> Iterator[None]:
        """Write in a transaction, after at most `seconds` of waiting for other writers."""
        try:
            if not self._lock.acquire(timeout=seconds):
                raise StoreUnavailable(f"{self.path} is in use: try again in a moment")
            try:
                with self._naming_file():
                    self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")
                    self._connection.execute(f"PRAGMA synchronous = {synchronous}")
                    self._size = self._require_files()
                    with self._connection:
                        self._connection.execute("BEGIN IMMEDIATE")
                        yield
                    self._size = self._require_files()
            finally:
                self._lock.release()
        except StoreUnavailable as error:
            self._failure = str(error)
            raise
        self._failure = None

    def _require_files(self) -> int:
        """Return the size of the file; refuse one that was removed, replaced or truncated.

        It changes nothing, because threads without the lock call it too.
        """
        least = self._size  # before a writer in another thread lets the file grow
        files, size = self._files_now()
        if files != self._files or size < least:
            raise StoreUnavailable(
                f"{self.path} was removed, replaced or truncated while the server used it: restore "
                "it and start the server again"
            )
        return size

    def _files_now(self) -> tuple[list[tuple[int, int]], int]:
        """Return (device, inode) of the file and its log, 0 without one, and the file's size."""
        states = []
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            try:
                state = path.stat()
                states.append((state.st_dev, state.st_ino, state.st_size))
            except OSError:
                states.append((0, 0, 0))
        return [state[:2] for state in states], states[0][2]

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreUnavailable(
                f"{self.path} cannot be used for answers and feedback ({error}): free space, check "
                "its permissions, or name another file"
            ) from error
