"""Answers and what became known of them, kept in an SQLite file across restarts."""

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
from rcir.errors import InvalidData, RcirError
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.queries import Queries

if TYPE_CHECKING:  # whoever only reads needs no server
    from rcir.serving.schemas import Feedback, Terms


def rows_of(queries: Queries) -> list[bytes]:
    """Each query, as bytes in safetensors' format: all that it is searched by."""
    arrays: dict[str, NDArray[Any]] = {"vectors": queries.vectors}
    if queries.uncertainty is not None:
        arrays["uncertainty"] = queries.uncertainty
    if queries.digests is not None:
        arrays["digests"] = queries.digests.view(np.uint8).reshape(len(queries), -1)
    if queries.embedding is not None:
        held = queries.embedding.arrays()
        arrays |= {f"embedding.{name}": values for name, values in held.items()}
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    return [
        save_arrays({name: values[row : row + 1] for name, values in arrays.items()})
        for row in range(len(queries))
    ]


def query_of(row: bytes) -> Queries:
    """The query of such a row."""
    arrays = load_arrays(row)
    digests = arrays.pop("digests", None)
    vectors, uncertainty = arrays.pop("vectors"), arrays.pop("uncertainty", None)
    embedding_arrays = {name.removeprefix("embedding."): values for name, values in arrays.items()}
    return Queries(
        vectors,
        uncertainty,
        digests=None if digests is None else digests.view(f"S{digests.shape[1]}")[:, 0],
        embedding=Embedding.from_arrays(embedding_arrays) if embedding_arrays else None,
    )


STORE_FORMAT = 2
MOST_ANSWERS = 100_000  # without feedback; older ones are forgotten
FORGETTING = 1000  # answers between two times that old ones are looked for
LOCK_SECONDS = 10.0  # that feedback waits while another process locks the file
ANSWER_LOCK_SECONDS = 0.5  # that answers wait, which are given all the same
ANSWER_PAUSE_SECONDS = 10.0  # after such a wait in vain, in which answers do not wait again
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


class StoreUnavailable(RcirError):
    """The file of answers and feedback cannot be written to or read."""


class NoFeedback(RcirError):
    """No feedback is kept."""


class UnknownAnswer(RcirError):
    """No such answer is kept."""


@dataclass(frozen=True)
class KeptAnswer:
    """The parts of an answer that feedback needs.

    Attributes:
        version: that of the retriever that answered.
        items: the ids of its set.
    """

    version: str
    items: list[str]


@dataclass(frozen=True)
class Loss:
    """Feedback on an answer whose misses are watched.

    Attributes:
        number: rises from one feedback to the next.
        terms: the guarantee that was asked for, `Terms.key`.
        miss: whether the set held no true match.
        answer: the number of the answer.
        time: when the feedback came, in seconds since 1970.
        digest: of the query.
    """

    number: int
    terms: str
    miss: bool
    answer: int
    time: float
    digest: bytes


@dataclass(frozen=True)
class Asked:
    """A query whose misses are watched, with or without feedback.

    Attributes:
        number: of the answer; rises in the order in which queries were asked.
        time: when it was asked, in seconds since 1970.
        digest: of the query.
    """

    number: int
    time: float
    digest: bytes


@dataclass(frozen=True)
class Reported:
    """Queries with feedback.

    Attributes:
        queries: those that were asked.
        matches: whether each answer held a true match.
        labels: the label of each query; None where the feedback names none.
    """

    queries: Queries
    matches: list[bool]
    labels: list[Any]

    def __getitem__(self, rows: NDArray[np.int64]) -> Reported:
        """Return some of the queries."""
        matches, labels = ([of[row] for row in rows] for of in (self.matches, self.labels))
        return Reported(self.queries[rows], matches, labels)

    @property
    def distinct(self) -> NDArray[np.int64]:
        """The rows of one occurrence of each query, with a label if any occurrence has one."""
        labelled_first = np.argsort([label is None for label in self.labels], kind="stable")
        _, first = np.unique(self.queries.identities[labelled_first], return_index=True)
        return np.sort(labelled_first[first])

    @property
    def n_unlabelled_hits(self) -> int:
        """Number of queries whose answers held a match of which the label is not known."""
        return sum(m and label is None for m, label in zip(self.matches, self.labels, strict=True))

    @property
    def n_unlabelled_misses(self) -> int:
        """Number of queries without a label whose answers held no match."""
        return self.labels.count(None) - self.n_unlabelled_hits

    def require_labels_of_hits(self) -> None:
        """Raise `InvalidData` unless all queries whose answers held a match have a label.

        A miss without a label counts as a query that matches nothing, which is at least as hard. A
        hit without a label can be neither used nor left out: its rank is unknown, and in the
        smaller sets of another alpha it may be a miss.
        """
        if not self.n_unlabelled_hits:
            return
        hits = sum(self.matches)
        raise InvalidData(
            f"{self.n_unlabelled_hits} of {hits} queries with feedback match: true have no label "
            f"({self.n_unlabelled_misses} of {len(self.matches) - hits} with match: false have "
            "none, and count as misses). The ranks of their matches are unknown, and without them "
            "the other queries are not representative: send that feedback again with the labels"
        )


class Store:
    """Answers and feedback on them: on disk before it is acknowledged.

    Answers are written batch by batch and survive the end of the process; feedback survives that of
    the machine.

    Args:
        path: the SQLite file, made if there is none.

    Raises:
        StoreUnavailable: it is something else, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock = threading.Lock()
        self._since = 0
        self._locked_at = -math.inf  # when answers last waited in vain
        self._failure: str | None = None  # of the last attempt to write
        with self._using():
            self._connection = sqlite3.connect(
                path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, STORE_FORMAT):
                raise StoreUnavailable(
                    f"{path} is of format {version}, this version reads {STORE_FORMAT}: name "
                    "another file"
                )
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and not version:
                raise StoreUnavailable(f"{path} is another program's: name another file")
            self._connection.executescript(SCHEMA)
            self._connection.execute(f"PRAGMA user_version = {STORE_FORMAT}")
            self._connection.execute("PRAGMA wal_checkpoint")
        self._files, self._size = self._found()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @property
    def trouble(self) -> str | None:
        """Why answers and feedback are not kept; None if the last ones were and the file is there.

        A full disk or a lock shows when something is written, and is over when something is kept.
        """
        try:
            self._require_files()
        except StoreUnavailable as error:
            return str(error)
        return self._failure

    def add(self, answered: Iterable[tuple[str, Terms, Queries, Sequence[Retrieval]]]) -> list[str]:
        """Keep answers; return an id for each, that feedback names.

        Args:
            answered: of each request the version that answered, what was asked, the queries and
                their answers.

        Raises:
            StoreUnavailable: they could not be written, as on a full disk, or because another
                process locks the file, or did so less than `ANSWER_PAUSE_SECONDS` ago; none are
                kept.
        """
        if time.monotonic() < self._locked_at + ANSWER_PAUSE_SECONDS:
            raise StoreUnavailable(f"{self.path} was locked by another process a moment ago")
        now, rows = time.time(), []
        for version, terms, queries, answers in answered:
            identified = queries.identified()
            for answer, digest, blob in zip(
                answers, identified.identities, rows_of(identified), strict=True
            ):
                counts = terms.watched and not answer.abstained
                items = json.dumps(answer.ids)
                own = secrets.token_urlsafe(12)
                rows.append((own, now, version, terms.key, counts, items, bytes(digest), blob))
        began = time.monotonic()
        try:
            with self._writing("NORMAL", ANSWER_LOCK_SECONDS), self._transaction():
                self._connection.executemany(
                    "INSERT INTO answers (id, time, version, terms, watched, items, digest, query) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    rows,
                )
                self._since += len(rows)
                if self._since >= FORGETTING:
                    self._since = 0
                    self._forget()
        except StoreUnavailable:
            if time.monotonic() - began > ANSWER_LOCK_SECONDS / 2:
                self._locked_at = time.monotonic()
            raise
        return [row[0] for row in rows]

    def answer(self, name: str) -> KeptAnswer:
        """The answer of an id.

        Raises:
            UnknownAnswer: no such answer is kept.
            StoreUnavailable: the file cannot be read.
        """
        with self._lock, self._using():
            version, items = self._version_and_items(name)
        return KeptAnswer(version, json.loads(items))

    def feed(self, feedback: Feedback) -> int | None:
        """Keep feedback on an answer; said again, it changes nothing, but may add a label.

        Returns:
            Its number, or None where it was said before.

        Raises:
            UnknownAnswer: no such answer is kept.
            InvalidData: something else was said of this answer before.
            StoreUnavailable: it could not be written; it is not kept.
        """
        label = None if feedback.label is None else json.dumps(feedback.label)
        with self._writing("FULL", LOCK_SECONDS), self._transaction():
            self._version_and_items(feedback.answer)
            before = self._connection.execute(
                "SELECT match, label FROM feedback WHERE answer = ?", (feedback.answer,)
            ).fetchone()
            match, known = before or (feedback.match, None)
            if match != feedback.match or (None not in (known, label) and known != label):
                raise InvalidData(
                    f"feedback on answer {feedback.answer!r} was given before, and said "
                    "otherwise: the first is kept"
                )
            if before is not None:
                self._connection.execute(
                    "UPDATE feedback SET label = coalesce(label, ?) WHERE answer = ?",
                    (label, feedback.answer),
                )
                return None
            return self._connection.execute(
                "INSERT INTO feedback (answer, time, match, label) VALUES (?, ?, ?, ?)",
                (feedback.answer, time.time(), feedback.match, label),
            ).lastrowid

    def losses(self, version: str, after: int = 0) -> list[Loss]:
        """Feedback on answers of a version whose misses are watched, in the order it came.

        Args:
            after: the number of the last that is known already.

        Raises:
            StoreUnavailable: the file cannot be read.
        """
        with self._lock, self._using():
            rows = self._connection.execute(
                "SELECT feedback.number, terms, NOT match, answers.number, feedback.time, digest "
                "FROM feedback JOIN answers ON answers.id = answer "
                "WHERE version = ? AND watched AND feedback.number > ? ORDER BY feedback.number",
                (version, after),
            ).fetchall()
        return [Loss(number, terms, bool(miss), *rest) for number, terms, miss, *rest in rows]

    def watched_queries(self, version: str, terms: str, after: int, until: int) -> list[Asked]:
        """Return the queries of a watched guarantee in the order in which they were asked.

        Args:
            version: of the retriever that answered.
            terms: the guarantee, `Terms.key`.
            after, until: numbers of answers; those above `after`, and up to `until`, are returned.

        Raises:
            StoreUnavailable: the file cannot be read.
        """
        with self._lock, self._using():
            rows = self._connection.execute(
                "SELECT number, time, digest FROM answers WHERE version = ? AND terms = ? "
                "AND watched AND number > ? AND number <= ? ORDER BY number",
                (version, terms, after, until),
            ).fetchall()
        return [Asked(*row) for row in rows]

    def reported(
        self, version: str, since: float = 0.0, most: int | None = None
    ) -> Reported | None:
        """Return the queries of a version that have feedback, those asked last first.

        Args:
            version: of the retriever that answered.
            since: when they were asked at the earliest, in seconds since 1970.
            most: their number at most; all unless given.

        Returns:
            The queries; None if there are none.

        Raises:
            StoreUnavailable: the file cannot be read.
        """
        with self._lock, self._using():
            rows = self._connection.execute(
                "SELECT query, match, label FROM feedback JOIN answers ON answers.id = answer "
                "WHERE version = ? AND answers.time >= ? ORDER BY answers.number DESC LIMIT ?",
                (version, since, -1 if most is None else most),
            ).fetchall()
        if not rows:
            return None
        return Reported(
            Queries.joined([query_of(blob) for blob, _, _ in rows]),
            [bool(match) for _, match, _ in rows],
            [None if label is None else json.loads(label) for _, _, label in rows],
        )

    def n_unreported(self, version: str, since: float = 0.0) -> int:
        """Return the number of answers of a version that are kept and have no feedback.

        Raises:
            StoreUnavailable: the file cannot be read.
        """
        with self._lock, self._using():
            (count,) = self._connection.execute(
                "SELECT count(*) FROM answers WHERE version = ? AND time >= ? "
                "AND id NOT IN (SELECT answer FROM feedback)",
                (version, since),
            ).fetchone()
        return int(count)

    def _version_and_items(self, name: str) -> tuple[str, str]:
        row: tuple[str, str] | None = self._connection.execute(
            "SELECT version, items FROM answers WHERE id = ?", (name,)
        ).fetchone()
        if row is None:
            raise UnknownAnswer(
                f"no answer {name!r} is kept: give the id that came with it; the last "
                f"{MOST_ANSWERS:,} answers are kept"
            )
        return row

    def _forget(self) -> None:
        """Delete old answers without feedback, unless they may count as misses."""
        self._connection.execute(
            "DELETE FROM answers WHERE number <= (SELECT max(number) FROM answers) - ? "
            "AND id NOT IN (SELECT answer FROM feedback) "
            "AND NOT (watched AND number < (SELECT coalesce(max(reported.number), 0) "
            "FROM answers AS reported JOIN feedback ON reported.id = answer))",
            (MOST_ANSWERS,),
        )

    @contextmanager
    def _writing(self, synchronous: str, seconds: float) -> Iterator[None]:
        """Write inside the block, after other threads and processes, for which it waits so long.

        Raises:
            StoreUnavailable: they take longer, or the file is not the one that was opened.
        """
        try:
            if not self._lock.acquire(timeout=seconds):
                raise StoreUnavailable(f"{self.path} is in use: try again in a moment")
            try:
                with self._using():
                    self._connection.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")
                    self._connection.execute(f"PRAGMA synchronous = {synchronous}")
                    self._size = self._require_files()
                    yield
                    self._size = self._require_files()
            finally:
                self._lock.release()
        except StoreUnavailable as error:
            self._failure = str(error)
            raise
        self._failure = None

    def _require_files(self) -> int:
        """The size of the file; keeps nothing, for threads without the lock ask too.

        Raises:
            StoreUnavailable: SQLite would go on with a file that nobody finds again.
        """
        least = self._size  # before a writer in another thread lets the file grow
        files, size = self._found()
        if files != self._files or size < least:
            raise StoreUnavailable(
                f"{self.path} was removed, replaced or truncated while the server used it: put it "
                "back and start the server again"
            )
        return size

    def _found(self) -> tuple[list[tuple[int, int] | None], int]:
        """Device and inode of the file and its log, None for a missing one; size of the file."""
        identities: list[tuple[int, int] | None] = []
        sizes = []
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            try:
                state = path.stat()
            except OSError:
                identities.append(None)
                sizes.append(0)
            else:
                identities.append((state.st_dev, state.st_ino))
                sizes.append(state.st_size)
        return identities, sizes[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreUnavailable(
                f"{self.path} cannot be used for answers and feedback ({error}): free space, check "
                "its permissions, or name another file"
            ) from error
