"""Evidence on a guarantee from feedback, and alarms when it contradicts the guarantee."""

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
from rcir.risk import RiskMonitor
from rcir.serving.schemas import Feedback
from rcir.serving.served import Served
from rcir.serving.store import Asked, Loss, NoFeedback, Reported, Store, StoreUnavailable

MOST_WATCHED = 32  # guarantees; further ones would get shares that no alarm comes from
LEVEL = 0.01  # probability of a false alarm, ever, over all guarantees together


@dataclass(frozen=True)
class Watched:
    """Evidence on the answers of one guarantee.

    Attributes:
        terms: the guarantee, as it was asked for.
        n, misses: queries that count, and those whose set held no true match or whose truth did not
            become known in time.
        unreported: those among the misses whose truth did not become known in time.
        waiting: queries with feedback that wait for the truth about an earlier query.
        evidence: against the guarantee, the largest wealth of a bet on it: from 1.
        alarm: whether that is more than chance explains.
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
        feedback: on each query, by its digest, or by the number of the answer if queries recur.
        counted: the queries that were passed.
        last: the number of the answer to the last of them.
        newest: the number of the newest answer with feedback.
        gap: the query that is waited for.
        unreported: number of queries that counted as misses without feedback.
    """

    monitor: RiskMonitor
    feedback: dict[Any, Loss] = field(default_factory=dict)
    counted: set[Any] = field(default_factory=set)
    last: int = 0
    newest: int = 0
    gap: Asked | None = None
    unreported: int = 0


class GuaranteeWatch:
    """A `RiskMonitor` for each guarantee that answers were given with, of one version.

    Losses are taken in the order in which queries were asked. An order by the time of the feedback
    would depend on the outcomes, where misses become known sooner or later than hits, and raise
    false alarms. A query without feedback is waited for, and counts as a miss if none comes in
    time. The first query that counts is one with feedback, and so is the last.

    The k-th guarantee gets a share 6 / (pi k)^2 of the level, so that all of them together ever
    give a false alarm with probability at most `LEVEL`. A query counts once for each guarantee,
    however often it is asked, unless queries recur.

    Args:
        read: further feedback of the version: from the number of the last that was read, those
            behind it, in the order in which they came.
        asked: the queries of a guarantee, see `Store.asked`.
        wait: seconds after which a query without feedback counts as a miss.
        recurring: whether queries recurred in calibration, so that the guarantee counts them each
            time.
    """

    def __init__(
        self,
        read: Callable[[int], Sequence[Loss]],
        asked: Callable[[str, int, int], Sequence[Asked]],
        wait: float,
        recurring: bool = False,
    ) -> None:
        self._read, self._watched_queries, self._wait, self._recurring = (
            read,
            asked,
            wait,
            recurring,
        )
        self._last = 0
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._counted: set[int] = set()
        self.refresh()

    def refresh(self) -> None:
        """Take further feedback, of this process or another."""
        with self._lock:
            for loss in self._read(self._last):
                self._last = loss.number
                if self._watches(loss.terms):
                    stream = self._streams[loss.terms]
                    stream.feedback.setdefault(self._query(loss.answer, loss.digest), loss)
                    stream.newest = max(stream.newest, loss.answer)
            for terms, stream in self._streams.items():
                stream.monitor.update(self._losses(terms, stream))

    def _watches(self, terms: str) -> bool:
        if terms not in self._streams and len(self._streams) < MOST_WATCHED:
            share = LEVEL * 6 / (math.pi * (len(self._streams) + 1)) ** 2
            self._streams[terms] = _Stream(RiskMonitor(json.loads(terms)["alpha"], share))
        return terms in self._streams

    def _query(self, answer: int, digest: bytes) -> Any:
        return answer if self._recurring else digest

    def _losses(self, terms: str, stream: _Stream) -> list[bool]:
        """Return the losses of the next queries, up to the first that is waited for."""
        losses: list[bool] = []
        gap = stream.gap
        if stream.last >= stream.newest or (gap and self._waits(gap, self._in_time(stream, gap))):
            return losses
        for asked in self._watched_queries(terms, stream.last, stream.newest):
            query = self._query(asked.number, asked.digest)
            if query not in stream.counted:
                loss = self._in_time(stream, asked)
                if self._waits(asked, loss):
                    stream.gap = asked
                    return losses
                if loss is not None:
                    losses.append(loss.miss)
                    self._counted.add(loss.number)
                elif losses or stream.monitor.n:
                    losses.append(True)
                    stream.unreported += 1
                stream.counted.add(query)
            stream.last = asked.number
        return losses

    def _in_time(self, stream: _Stream, query: Asked) -> Loss | None:
        loss = stream.feedback.get(self._query(query.number, query.digest))
        return loss if loss is not None and loss.time <= query.time + self._wait else None

    def _waits(self, query: Asked, loss: Loss | None) -> bool:
        return loss is None and time.time() <= query.time + self._wait

    def counts(self, number: int) -> bool:
        """Return whether the feedback with a number was used as evidence."""
        with self._lock:
            return number in self._counted

    @property
    def rows(self) -> list[Watched]:
        """Evidence by guarantee, by alpha."""
        with self._lock:
            states = [
                Watched(
                    json.loads(terms),
                    n=each.monitor.n,
                    misses=round(each.monitor.total),
                    unreported=each.unreported,
                    waiting=len(each.feedback.keys() - each.counted),
                    evidence=each.monitor.evidence,
                    alarm=each.monitor.alarm,
                )
                for terms, each in self._streams.items()
            ]
        return sorted(states, key=lambda row: row.terms["alpha"])

    @property
    def alarm(self) -> bool:
        """True if any guarantee is contradicted."""
        with self._lock:
            return any(each.monitor.alarm for each in self._streams.values())


FEW, RECENT = 30, 1000  # queries with feedback that are compared with those that calibrated
Row = TypeVar("Row", Asked, Loss)
_log = logging.getLogger("rcir.serving")


class Evidence:
    """Feedback on answers of one retriever, watched, and compared with its calibration queries.

    Queries that tuned or calibrated it, or that are items of its gallery, are not evidence.
    Nor is anything where calibration queries came in clusters: the guarantee is then for clusters,
    and which of them a query belongs to is not known.

    Args:
        served: the retriever.
        store: of answers and feedback; or None.
        wait: seconds after which a query without feedback counts as a miss.

    Attributes:
        watch: on its guarantees.
    """

    def __init__(self, served: Served, store: Store | None, wait: float) -> None:
        self._served, self._store = served, store
        self._compared: tuple[Any, dict[str, Any]] | None = None  # the last outcome, and of which
        retriever = served.retriever
        calibration = retriever.require_calibration()
        self._clustered = calibration.main.calibration.cluster is not None
        self._recurring = calibration.options.recurring
        self.watch = GuaranteeWatch(self._losses, self._watched_queries, wait, self._recurring)

    def feed(self, feedback: Feedback) -> int | None:
        """Keep and watch feedback on an answer, also of an earlier version; see `Store.feed`.

        If the set held a match and only one label, that is the label of the query.

        Raises:
            NoFeedback: none is kept.
            InvalidData: it contradicts itself, or what was said before; or it names a label for an
                answer of another version, which cannot be checked.
            UnknownAnswer, StoreUnavailable: see `Store.feed`.
        """
        if self._store is None:
            raise NoFeedback("this server keeps no feedback: start it with --feedback FILE")
        answer = self._store.answer(feedback.answer)
        if not answer.items and feedback.match:
            raise InvalidData("match is true, and the answer held no item: say false")
        if feedback.label is not None:
            if answer.version != self._served.manifest:
                raise InvalidData(
                    f"answer {feedback.answer!r} is of another version than the one that is "
                    "served: say whether it held a match, without a label"
                )
            match = self._served.holds_match(answer.items, feedback.label)
            if match != feedback.match:
                raise InvalidData(
                    f"match is {str(feedback.match).lower()}, and with the label "
                    f"{feedback.label!r} the set {'held a' if match else 'held no'} true match: "
                    "check both"
                )
        elif feedback.match and answer.version == self._served.manifest:
            label = self._served.only_label(answer.items)
            feedback = feedback.model_copy(update={"label": label})
        number = self._store.feed(feedback)
        if number is not None:
            try:
                self.watch.refresh()
            except StoreUnavailable as error:  # it is kept, and counts at the next look
                _log.error("feedback is kept, but not watched yet: %s", error)
        return number

    def comparison(self) -> Callable[[], dict[str, Any]] | None:
        """The work of a comparison of the latest queries with feedback with those that calibrated,
        as plain values, for the thread of the model; None where there are too few.

        Raises:
            StoreUnavailable: they cannot be read.
        """
        recent = self._recent()
        return (
            None if recent is None or len(recent.labels) < FEW else partial(self._compare, recent)
        )

    def _compare(self, recent: Reported) -> dict[str, Any]:
        alpha = min((row.terms["alpha"] for row in self.watch.rows), default=ALPHA)
        key = (recent.queries.identities.tobytes(), recent.n_unlabelled_hits, alpha)
        if self._compared is None or self._compared[0] != key:  # searched once
            self._compared = key, self._checked(recent, alpha)
        return self._compared[1]

    def _checked(self, recent: Reported, alpha: float) -> dict[str, Any]:
        try:
            recent.require_labels_of_hits()
            labelled = self._served.labelled(recent.queries, recent.labels)
            check = self._served.retriever.check(labelled, alpha)
        except RcirError as error:
            return {"p_value": None, "n_recent": len(recent.labels), "sentence": str(error)}
        return {"p_value": check.p_value, "n_recent": check.n_recent, "sentence": str(check)}

    def _recent(self) -> Reported | None:
        """The latest queries with feedback that are new to the retriever, each once."""
        if self._store is None or self._clustered:
            return None
        reports = self._store.reported(self._served.manifest, most=RECENT)
        if reports is None:
            return None
        rows = np.arange(len(reports.labels)) if self._recurring else reports.distinct
        return reports[rows[self._served.new_queries(reports.queries.identities[rows])]]

    def _losses(self, after: int) -> list[Loss]:
        if self._store is None or self._clustered:
            return []
        return self._new(self._store.losses(self._served.manifest, after))

    def _watched_queries(self, terms: str, after: int, until: int) -> list[Asked]:
        assert self._store is not None  # there was feedback
        return self._new(self._store.watched_queries(self._served.manifest, terms, after, until))

    def _new(self, rows: list[Row]) -> list[Row]:
        """Return the rows of queries that are new to the retriever."""
        new = self._served.new_queries(np.array([row.digest for row in rows], "S32"))
        return [row for row, counts in zip(rows, new, strict=True) if counts]
