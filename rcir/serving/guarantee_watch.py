"""Whether what became known of answers contradicts their guarantee."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

from rcir.risk import RiskMonitor

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
        losses: (alpha, miss) of feedback that is known already, in its order.
    """

    def __init__(self, losses: list[tuple[float, float]] | None = None) -> None:
        self._lock = threading.Lock()
        self._monitors: dict[float, RiskMonitor] = {}
        for alpha in dict.fromkeys(alpha for alpha, _ in losses or []):
            self.add(alpha, [miss for own, miss in losses or [] if own == alpha])

    def add(self, alpha: float, misses: Any) -> None:
        """Take further losses at an alpha, in their order."""
        with self._lock:
            if alpha not in self._monitors:
                number = len(self._monitors) + 1
                share = LEVEL * 6 / (math.pi * number) ** 2
                self._monitors[alpha] = RiskMonitor(alpha, share)
            self._monitors[alpha].update(misses)

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
