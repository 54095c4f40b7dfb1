"""Whether what became known of answers contradicts their guarantee."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rcir.risk import RiskMonitor

MOST_WATCHED = 32  # alphas; further ones would get shares that no alarm comes from
LEVEL = 0.01  # probability of a false alarm, ever, over all alphas together


@dataclass(frozen=True)
class Watched:
    """What is known of the guarantee at one alpha.

    Attributes:
        alpha: the level.
        n, misses: answers of which it is known whether they held a true match, and which did not.
        evidence: against the guarantee, the largest wealth of a bet on it: from 1.
        alarm: whether that is more than chance explains.
    """

    alpha: float
    n: int
    misses: int
    evidence: float
    alarm: bool


class GuaranteeWatch:
    """A `RiskMonitor` for each alpha that answers were given at, of one version.

    The k-th alpha gets a share 6 / (pi k)^2 of the level, so that all of them together ever give a
    false alarm with probability at most `LEVEL`.

    Args:
        read: further feedback, `Store.losses` of the version: given the number of the last that is
            known, (number, alpha, miss) of those behind it.
    """

    def __init__(self, read: Callable[[int], list[tuple[int, float, int]]]) -> None:
        self._read, self._last = read, 0
        self._lock = threading.Lock()
        self._monitors: dict[float, RiskMonitor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take what became known since, by this process or another, in its order."""
        with self._lock:
            losses = self._read(self._last)
            misses: dict[float, list[int]] = {}
            for self._last, alpha, miss in losses:
                misses.setdefault(alpha, []).append(miss)
            for alpha, those in misses.items():
                if alpha not in self._monitors:
                    if len(self._monitors) == MOST_WATCHED:
                        continue
                    number = len(self._monitors) + 1
                    share = LEVEL * 6 / (math.pi * number) ** 2
                    self._monitors[alpha] = RiskMonitor(alpha, share)
                self._monitors[alpha].update(those)

    @property
    def rows(self) -> list[Watched]:
        """What is known, by alpha."""
        with self._lock:
            return [
                Watched(alpha, each.n, round(each.total), each.evidence, each.alarm)
                for alpha, each in sorted(self._monitors.items())
            ]

    @property
    def alarm(self) -> bool:
        """Whether any guarantee is contradicted."""
        return any(row.alarm for row in self.rows)
