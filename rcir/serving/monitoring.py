"""Evidence on guarantees from feedback, changes of queries, and alarms for both."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rcir.errors import InvalidConfig, InvalidData
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.calibration import known_digests
from rcir.retrieval.drift import QueryMonitor
from rcir.retrieval.queries import Queries
from rcir.risk import RiskMonitor
from rcir.serving.errors import NoFeedback, StoreUnavailable
from rcir.serving.schemas import Feedback
from rcir.serving.served import Served
from rcir.serving.store import Loss, MonitoredQuery, Store, is_new

MAX_GUARANTEES = 32  # no alarm would come from the smaller shares of further ones
LEVEL = 0.01  # probability of a false alarm, ever, over all guarantees together
MAX_DRIFT_QUERIES = 1_000_000  # in memory; later ones are not compared
Row = TypeVar("Row", MonitoredQuery, Loss)
_log = logging.getLogger("rcir.serving")


@dataclass(frozen=True)
class Watched:
    """Evidence on the answers of one guarantee."""

    terms: dict[str, Any]  # the guarantee, as it was requested
    n: int  # queries that count
    misses: int  # of them without a true match in their set, or without feedback in time
    unreported: int  # of them without feedback in time
    waiting: int  # queries with feedback that wait for feedback on an earlier query
    evidence: float  # largest wealth of a bet against the guarantee, at least 1
    alarm: bool  # True if chance does not explain the evidence


@dataclass
class _Stream:
    """The queries of one guarantee in order of arrival.

    A key is the digest of a query, or the number of its answer if queries recur.
    """

    monitor: RiskMonitor
    feedback: dict[Any, Loss] = field(default_factory=dict)  # by key
    passed: set[Any] = field(default_factory=set)  # keys of queries that counted or were left out
    last: int = 0  # number of the answer to the last of them
    newest: int = 0  # number of the newest answer with feedback
    gap: MonitoredQuery | None = None  # the query whose feedback is waited for
    unreported: int = 0  # queries that counted as misses without feedback


class GuaranteeWatch:
    """A `RiskMonitor` for each guarantee that answers were given with, of one version.

    Losses count in the order in which queries arrived: the order of the feedback depends on the
    outcomes if misses become known sooner or later than hits, and would raise false alarms. A query
    without feedback is waited for, and counts as a miss after `wait` seconds. The first and the
    last query that count have feedback. A repeated query counts once for each guarantee, unless
    queries recurred in calibration (`recurring`).

    The k-th guarantee gets a share 6 / (pi k)^2 of the level, so that all of them together ever
    raise a false alarm with probability at most `LEVEL`. `losses(after)` and `queries(terms, after,
    until)` read feedback and queries, see `Store.losses` and `Store.monitored`.
    """

    def __init__(
        self,
        losses: Callable[[int], Sequence[Loss]],
        queries: Callable[[str, int, int], Sequence[MonitoredQuery]],
        wait: float,
        recurring: bool = False,
    ) -> None:
        self._read_losses, self._read_queries = losses, queries
        self._wait, self._recurring = wait, recurring
        self._last = 0  # number of the last feedback that was read
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}  # by `Terms.guarantee`
        self._counted: set[int] = set()  # numbers of feedback
        self.refresh()

    def refresh(self) -> None:
        """Count further feedback, of this process or another."""
        with self._lock:
            for loss in self._read_losses(self._last):
                self._last = loss.number
                if stream := self._stream(loss.terms):
                    stream.feedback.setdefault(self._key(loss.answer, loss.digest), loss)
                    stream.newest = max(stream.newest, loss.answer)
            for terms, stream in self._streams.items():
                stream.monitor.update(self._next_losses(terms, stream))

    def _stream(self, terms: str) -> _Stream | None:
        """Return the stream of a guarantee, a new one if there are not too many."""
        if terms not in self._streams and len(self._streams) < MAX_GUARANTEES:
            share = LEVEL * 6 / (math.pi * (len(self._streams) + 1)) ** 2
            self._streams[terms] = _Stream(RiskMonitor(json.loads(terms)["alpha"], share))
        return self._streams.get(terms)

    def _key(self, answer: int, digest: bytes) -> Any:
        return answer if self._recurring else digest

    def _next_losses(self, terms: str, stream: _Stream) -> list[bool]:
        """Return the losses of the next queries, up to the first that is waited for."""
        losses: list[bool] = []
        gap, now = stream.gap, time.time()

        def in_time(query: MonitoredQuery) -> Loss | None:
            loss = stream.feedback.get(self._key(query.number, query.digest))
            return loss if loss is not None and loss.time <= query.time + self._wait else None

        def is_due(query: MonitoredQuery) -> bool:
            return in_time(query) is not None or now > query.time + self._wait

        if stream.last >= stream.newest or (gap is not None and not is_due(gap)):
            return losses
        for query in self._read_queries(terms, stream.last, stream.newest):
            key = self._key(query.number, query.digest)
            if key not in stream.passed:
                if not is_due(query):
                    stream.gap = query
                    return losses
                if (loss := in_time(query)) is not None:
                    losses.append(loss.miss)
                    self._counted.add(loss.number)
                elif losses or stream.monitor.n:
                    losses.append(True)
                    stream.unreported += 1
                stream.passed.add(key)
            stream.last = query.number
        return losses

    def counts(self, number: int) -> bool:
        """Return True if the feedback with a number was counted."""
        with self._lock:
            return number in self._counted

    @property
    def rows(self) -> list[Watched]:
        """The evidence on each guarantee, by alpha."""
        with self._lock:
            rows = [
                Watched(
                    json.loads(terms),
                    n=stream.monitor.n,
                    misses=round(stream.monitor.total),
                    unreported=stream.unreported,
                    waiting=len(stream.feedback.keys() - stream.passed),
                    evidence=stream.monitor.evidence,
                    alarm=stream.monitor.alarm,
                )
                for terms, stream in self._streams.items()
            ]
        return sorted(rows, key=lambda row: row.terms["alpha"])

    @property
    def alarm(self) -> bool:
        """True if any guarantee is contradicted."""
        with self._lock:
            return any(stream.monitor.alarm for stream in self._streams.values())


class Drift:
    """A `QueryMonitor` of all queries that one process has answered with one version.

    A query counts once, and not if it tuned or calibrated the retriever or is a gallery item,
    unless queries recurred in calibration. No feedback is needed.
    """

    def __init__(self, served: Served) -> None:
        retriever = served.retriever
        self._earlier = known_digests(retriever.searcher, served.calibration)
        self._recurring = served.calibration.options.recurring
        self._seen: set[bytes] = set()
        self._queries: QueryMonitor | None = None
        self._reason = ""  # why queries are not compared
        try:
            self._queries = retriever.query_monitor(LEVEL)
        except InvalidConfig as error:
            self._reason = str(error)

    def add(self, queries: Queries, answers: Sequence[Retrieval]) -> None:
        """Add answered queries, in the thread of the model."""
        if self._queries is None or self._queries.monitor.n >= MAX_DRIFT_QUERIES:
            return
        digests = queries.with_population().digests
        new, rows = is_new(digests, self._earlier), []
        for row, digest in enumerate(digests.tolist()):
            if new[row] and (self._recurring or digest not in self._seen):
                rows.append(row)
                self._seen.add(digest)
        self._queries.update([answers[row] for row in rows])

    @property
    def row(self) -> dict[str, Any]:
        """The evidence as plain values, with a sentence; the alarm is raised at 1 / `LEVEL`."""
        if self._queries is None:
            return {"n": 0, "evidence": 1.0, "alarm": False, "sentence": self._reason}
        monitor = self._queries.monitor
        n, alarm = monitor.n, monitor.alarm
        sentence = f"{n} queries have not been found to differ from the calibration queries"
        if alarm:
            sentence = (
                f"queries have changed: these {n} differ from the calibration queries in their "
                "uncertainty or in how near the gallery is. This does not show that the risk has "
                "risen: check that with labelled queries"
            )
        return {"n": n, "evidence": monitor.peak, "alarm": alarm, "sentence": sentence}


class Evidence:
    """Feedback on answers of one retriever, which is watched.

    Gallery items, and queries that tuned or calibrated the retriever, are not evidence. If the
    calibration queries came in clusters, no query is: its cluster is unknown.
    """

    def __init__(self, served: Served, store: Store | None, wait: float) -> None:
        self._served, self._store = served, store
        calibration = served.calibration
        self._earlier = known_digests(served.retriever.searcher, calibration)
        self._clustered = calibration.miss_rule.evidence.population.clusters is not None
        self._recurring = calibration.options.recurring
        self.watch = GuaranteeWatch(self._losses, self._queries, wait, self._recurring)

    def feed(self, feedback: Feedback) -> int | None:
        """Store and count feedback on an answer, also of an earlier version; see `Store.feed`.

        If the set contained a match and only one label, that is the label of the query.
        """
        if self._store is None:
            raise NoFeedback("this server stores no feedback: start it with --feedback FILE")
        version, items = self._store.answer(feedback.answer)
        is_served = version == self._served.manifest
        if feedback.match and not items:
            raise InvalidData("match is true, but the set is empty: send false")
        if feedback.label is not None:
            if not is_served:
                raise InvalidData(
                    f"answer {feedback.answer!r} was given by another version of the retriever, so "
                    "that its label cannot be checked: send only match"
                )
            if self._served.holds_match(items, feedback.label) != feedback.match:
                raise InvalidData(
                    f"match is {str(feedback.match).lower()}, which contradicts the label "
                    f"{feedback.label!r} and the set: check both"
                )
        elif feedback.match and is_served:
            label = self._served.only_label(items)
            feedback = feedback.model_copy(update={"label": label})
        number = self._store.feed(feedback)
        if number is not None:
            try:
                self.watch.refresh()
            except StoreUnavailable as error:
                _log.error("feedback is stored, but not counted yet: %s", error)
        return number

    def _losses(self, after: int) -> list[Loss]:
        if self._store is None or self._clustered:
            return []
        return self._new(self._store.losses(self._served.manifest, after))

    def _queries(self, terms: str, after: int, until: int) -> list[MonitoredQuery]:
        assert self._store is not None  # there was feedback
        return self._new(self._store.monitored(self._served.manifest, terms, after, until))

    def _new(self, rows: list[Row]) -> list[Row]:
        """Return the rows of queries that are new to the retriever."""
        new = is_new(np.array([row.digest for row in rows], "S32"), self._earlier)
        return [row for row, counts in zip(rows, new, strict=True) if counts]
