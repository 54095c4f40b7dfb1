"""Evidence on guarantees from feedback, and alarms when it contradicts them."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rcir.errors import InvalidData, RcirError
from rcir.options import ALPHA
from rcir.retrieval.calibration import known_digests
from rcir.risk import RiskMonitor
from rcir.serving.schemas import Feedback
from rcir.serving.served import Served
from rcir.serving.store import (
    Loss,
    MonitoredQuery,
    NoFeedback,
    Reported,
    Store,
    StoreUnavailable,
    is_new,
)

MAX_GUARANTEES = 32  # no alarm would come from the smaller shares of further ones
LEVEL = 0.01  # probability of a false alarm, ever, over all guarantees together
MIN_COMPARED, MAX_COMPARED = 30, 1000  # queries that are compared with the calibration queries
Row = TypeVar("Row", MonitoredQuery, Loss)
_log = logging.getLogger("rcir.serving")


@dataclass(frozen=True)
class Watched:
    """Evidence on the answers of one guarantee.

    Attributes:
        terms: the guarantee, as it was requested.
        n: number of queries that count.
        misses: those whose set contained no true match, or that had no feedback in time.
        unreported: those that had no feedback in time.
        waiting: number of queries with feedback that wait for feedback on an earlier query.
        evidence: the largest wealth of a bet against the guarantee, at least 1.
        alarm: True if chance does not explain the evidence.
    """

    terms: dict[str, Any]
    n: int
    misses: int
    unreported: int
    waiting: int
    evidence: float
    alarm: bool


@dataclass
class _Stream:
    """The queries of one guarantee in the order in which they were asked.

    Attributes:
        monitor: of the losses so far.
        feedback: on each query, by its key: the digest, or the answer's number if queries recur.
        counted: keys of the queries that were passed.
        last: number of the answer to the last of them.
        newest: number of the newest answer with feedback.
        gap: the query that is waited for.
        unreported: number of queries that counted as misses without feedback.
    """

    monitor: RiskMonitor
    feedback: dict[Any, Loss] = field(default_factory=dict)
    counted: set[Any] = field(default_factory=set)
    last: int = 0
    newest: int = 0
    gap: MonitoredQuery | None = None
    unreported: int = 0


class GuaranteeWatch:
    """A `RiskMonitor` for each guarantee that answers were given with, of one version.

    Losses are taken in the order in which queries were asked. An order by the time of the feedback
    depends on the outcomes if misses become known sooner or later than hits, and raises false
    alarms. A query without feedback is waited for, and counts as a miss if none comes in time. The
    first query that counts has feedback, and so has the last.

    The k-th guarantee gets a share 6 / (pi k)^2 of the level, so that all of them together ever
    raise a false alarm with probability at most `LEVEL`. A query counts once for each guarantee,
    however often it is asked, unless queries recur.

    Args:
        losses: function that returns the feedback after one with a number, see `Store.losses`.
        queries: function that returns the queries of a guarantee, see `Store.monitored`.
        wait: seconds after which a query without feedback counts as a miss.
        recurring: True if queries recurred in calibration, so that each occurrence counts.
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
        self._last = 0
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._counted: set[int] = set()
        self.refresh()

    def refresh(self) -> None:
        """Count further feedback, of this process or another."""
        with self._lock:
            for loss in self._read_losses(self._last):
                self._last = loss.number
                if self._watches(loss.terms):
                    stream = self._streams[loss.terms]
                    stream.feedback.setdefault(self._key(loss.answer, loss.digest), loss)
                    stream.newest = max(stream.newest, loss.answer)
            for terms, stream in self._streams.items():
                stream.monitor.update(self._losses(terms, stream))

    def _watches(self, terms: str) -> bool:
        """Start to watch a guarantee if there are not too many, and return True if it is."""
        if terms not in self._streams and len(self._streams) < MAX_GUARANTEES:
            share = LEVEL * 6 / (math.pi * (len(self._streams) + 1)) ** 2
            self._streams[terms] = _Stream(RiskMonitor(json.loads(terms)["alpha"], share))
        return terms in self._streams

    def _key(self, answer: int, digest: bytes) -> Any:
        return answer if self._recurring else digest

    def _losses(self, terms: str, stream: _Stream) -> list[bool]:
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
            if key not in stream.counted:
                if not is_due(query):
                    stream.gap = query
                    return losses
                if (loss := in_time(query)) is not None:
                    losses.append(loss.miss)
                    self._counted.add(loss.number)
                elif losses or stream.monitor.n:
                    losses.append(True)
                    stream.unreported += 1
                stream.counted.add(key)
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
                    waiting=len(stream.feedback.keys() - stream.counted),
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


class Evidence:
    """Feedback on answers of one retriever: watched, and compared with its calibration queries.

    Gallery items, and queries that tuned or calibrated the retriever, are not evidence. Nothing is
    if the calibration queries came in clusters: the cluster of a query is unknown.

    Args:
        served: the retriever.
        store: of answers and feedback; or None.
        wait: seconds after which a query without feedback counts as a miss.

    Attributes:
        watch: on its guarantees.
    """

    def __init__(self, served: Served, store: Store | None, wait: float) -> None:
        self._served, self._store = served, store
        calibration = served.retriever.require_calibration()
        self._earlier = known_digests(served.retriever.searcher, calibration)
        self._clustered = calibration.main.calibration.cluster is not None
        self._recurring = calibration.options.recurring
        self._compared: tuple[Any, dict[str, Any]] | None = None  # the last comparison, with a key
        self.watch = GuaranteeWatch(self._losses, self._queries, wait, self._recurring)

    def feed(self, feedback: Feedback) -> int | None:
        """Store and watch feedback on an answer, also of an earlier version; see `Store.feed`.

        If the set contained a match and only one label, that is the label of the query.

        Raises:
            NoFeedback: the server stores none.
            InvalidData: it contradicts itself or earlier feedback, or names a label for an answer
                of another version, which cannot be checked.
            UnknownAnswer, StoreUnavailable: see `Store.feed`.
        """
        if self._store is None:
            raise NoFeedback("this server stores no feedback: start it with --feedback FILE")
        version, items = self._store.answer(feedback.answer)
        is_served = version == self._served.manifest
        if feedback.match and not items:
            raise InvalidData("match is true, and the answer contained no item: send false")
        if feedback.label is not None:
            if not is_served:
                raise InvalidData(
                    f"answer {feedback.answer!r} is of another version than the served one: say "
                    "whether it contained a match, without a label"
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
                _log.error("feedback is stored, but not watched yet: %s", error)
        return number

    def comparison(self) -> Callable[[], dict[str, Any]] | None:
        """Return work for the thread of the model; None if there are too few queries.

        The work compares the latest queries with feedback with the calibration queries, and returns
        plain values.
        """
        if self._store is None or self._clustered:
            return None
        reports = self._store.reported(self._served.manifest, most=MAX_COMPARED)
        recent = reports and reports.new(self._earlier, self._recurring)
        if recent is None or len(recent.labels) < MIN_COMPARED:
            return None
        return partial(self._compare, recent)

    def _compare(self, recent: Reported) -> dict[str, Any]:
        """Compare queries, unless they are those of the last comparison."""
        alpha = min((row.terms["alpha"] for row in self.watch.rows), default=ALPHA)
        key = (recent.queries.identities.tobytes(), recent.n_unlabelled_hits, alpha)
        if self._compared is None or self._compared[0] != key:
            outcome: dict[str, Any] = {"p_value": None, "n_recent": len(recent.labels)}
            try:
                recent.require_labels_of_hits()
                labelled = self._served.labelled(recent.queries, recent.labels)
                check = self._served.retriever.check(labelled, alpha)
                outcome |= {"p_value": check.p_value, "sentence": str(check)}
            except RcirError as error:
                outcome["sentence"] = str(error)
            self._compared = key, outcome
        return self._compared[1]

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
