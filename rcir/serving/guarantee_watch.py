"""A watch on guarantees: whether feedback on answers contradicts them."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rcir.risk import RiskMonitor
from rcir.serving.store import Loss

MOST_WATCHED = 32  # guarantees; further ones would get shares that no alarm comes from
LEVEL = 0.01  # probability of a false alarm, ever, over all guarantees together


@dataclass(frozen=True)
class Watched:
    """Evidence on the answers of one guarantee.

    Attributes:
        terms: the guarantee, as it was asked for.
        n, misses: queries of which it is known whether their set held a true match, and those
            whose set did not.
        evidence: against the guarantee, the largest wealth of a bet on it: from 1.
        alarm: whether that is more than chance explains.
    """

    terms: dict[str, Any]
    n: int
    misses: int
    evidence: float
    alarm: bool


class GuaranteeWatch:
    """A `RiskMonitor` for each guarantee that answers were given with, of one version.

    The k-th guarantee gets a share 6 / (pi k)^2 of the level, so that all of them together ever
    give a false alarm with probability at most `LEVEL`. A query counts once for each guarantee,
    however often it is asked, unless queries recur.

    Args:
        recurring: whether queries recurred in calibration, so that the guarantee counts them each
            time.
        read: further feedback of the version: given the number of the last that is known, those
            behind it, in order.
    """

    def __init__(self, read: Callable[[int], Sequence[Loss]], recurring: bool = False) -> None:
        self._read, self._recurring, self._last = read, recurring, 0
        self._lock = threading.Lock()
        self._monitors: dict[str, RiskMonitor] = {}
        self._asked: set[tuple[str, bytes]] = set()
        self._counted: set[int] = set()
        self.refresh()

    def refresh(self) -> None:
        """Take further feedback, of this process or another, in its order."""
        with self._lock:
            misses: dict[str, list[bool]] = {}
            for loss in self._read(self._last):
                self._last = loss.number
                asked = (loss.terms, loss.digest)
                new = self._recurring or asked not in self._asked
                if new and self._watches(loss.terms):
                    misses.setdefault(loss.terms, []).append(loss.miss)
                    self._counted.add(loss.number)
                    self._asked.add(asked)
            for terms, those in misses.items():
                self._monitors[terms].update(those)

    def _watches(self, terms: str) -> bool:
        if terms not in self._monitors and len(self._monitors) < MOST_WATCHED:
            share = LEVEL * 6 / (math.pi * (len(self._monitors) + 1)) ** 2
            self._monitors[terms] = RiskMonitor(json.loads(terms)["alpha"], share)
        return terms in self._monitors

    def counts(self, number: int) -> bool:
        """Whether the feedback of a number was taken as evidence."""
        with self._lock:
            return number in self._counted

    @property
    def rows(self) -> list[Watched]:
        """Evidence by guarantee, by alpha."""
        with self._lock:
            found = [
                Watched(json.loads(terms), each.n, round(each.total), each.evidence, each.alarm)
                for terms, each in self._monitors.items()
            ]
        return sorted(found, key=lambda row: row.terms["alpha"])

    @property
    def alarm(self) -> bool:
        """Whether any guarantee is contradicted."""
        with self._lock:
            return any(each.alarm for each in self._monitors.values())
