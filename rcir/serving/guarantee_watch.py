"""A watch on guarantees: whether feedback on answers contradicts them."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rcir.risk import RiskMonitor
from rcir.serving.store import Asked, Loss

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
        self._read, self._asked, self._wait, self._recurring = read, asked, wait, recurring
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
        for asked in self._asked(terms, stream.last, stream.newest):
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

    def _in_time(self, stream: _Stream, asked: Asked) -> Loss | None:
        loss = stream.feedback.get(self._query(asked.number, asked.digest))
        return loss if loss is not None and loss.time <= asked.time + self._wait else None

    def _waits(self, asked: Asked, loss: Loss | None) -> bool:
        return loss is None and time.time() <= asked.time + self._wait

    def counts(self, number: int) -> bool:
        """Whether the feedback of a number was taken as evidence."""
        with self._lock:
            return number in self._counted

    @property
    def rows(self) -> list[Watched]:
        """Evidence by guarantee, by alpha."""
        with self._lock:
            found = [
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
        return sorted(found, key=lambda row: row.terms["alpha"])

    @property
    def alarm(self) -> bool:
        """Whether any guarantee is contradicted."""
        with self._lock:
            return any(each.monitor.alarm for each in self._streams.values())
