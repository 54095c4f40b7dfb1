"""Watching a guarantee in use: an alarm when what is seen contradicts it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaincc, betaln

from rcir.errors import InvalidData
from rcir.risk.bounds import check_level


@dataclass
class RiskMonitor:
    """A test martingale against "the risk is at most alpha", valid at every moment.

    What is owned by who bets on larger risks: the likelihood ratio of the losses seen, against
    alpha, averaged over all risks from alpha to 1 alike. While the risk is at most alpha, whatever
    the past, this is a non-negative supermartingale that starts at 1, so that it ever reaches
    1 / level with probability at most level (Ville): queries may be watched one by one for ever.
    Losses in between 0 and 1 are taken as well (by convexity), for instance 1 - recall.

    An alarm says that the risk is above alpha: the queries have changed, or the calibration was
    among the share delta. With `delta=None` many valid calibrations are: watch a larger alpha then.

    Attributes:
        alpha: the risk that is guaranteed.
        level: probability of a false alarm over the whole, unlimited stream.
        n: number of losses so far.
        total: their sum.
        peak: the largest log of what was owned.

    The attributes are all there is to store: `RiskMonitor(**dataclasses.asdict(monitor))` goes on.

    Example:
        >>> monitor = RiskMonitor(alpha=0.1, level=0.01)
        >>> monitor.update([0, 0, 1, 0, 0, 0, 0, 1, 0, 0])
        False
        >>> monitor.update([1, 1, 0, 1, 1, 0, 1, 1])
        True
    """

    alpha: float
    level: float = 0.01
    n: int = 0
    total: float = 0.0
    peak: float = 0.0

    def __post_init__(self) -> None:
        check_level("alpha", self.alpha)
        check_level("level", self.level)

    @property
    def alarm(self) -> bool:
        """Whether the losses so far contradict the guarantee; once raised it stays."""
        return self.peak >= math.log(1 / self.level)

    @property
    def evidence(self) -> float:
        """What was owned at most, from 1; an alarm from 1 / level."""
        return math.exp(min(self.peak, 700.0))

    def update(self, losses: ArrayLike) -> bool:
        """Take the losses of further queries, in their order; return `alarm`.

        Args:
            losses: one, or (m,), each in [0, 1]; a miss is 1 or True.

        Raises:
            InvalidData: one is outside [0, 1] or NaN; then none is taken.
        """
        try:
            values = np.atleast_1d(np.asarray(losses, np.float64))
        except (TypeError, ValueError) as error:
            raise InvalidData(f"losses are no numbers ({error}): give numbers in [0, 1]") from error
        if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
            raise InvalidData("losses must be one number or (m,) numbers in [0, 1], without NaN")
        if len(values):
            n = self.n + np.arange(1, len(values) + 1)
            totals = self.total + np.cumsum(values)
            rest = n - totals
            # log of the mean over q in (alpha, 1) of (q / alpha)^total ((1 - q) / (1 - alpha))^rest
            with np.errstate(divide="ignore"):  # next to nothing is nothing
                above = np.log(betaincc(totals + 1, rest + 1, self.alpha))
            owned = (
                betaln(totals + 1, rest + 1)
                + above
                - totals * math.log(self.alpha)
                - rest * math.log1p(-self.alpha)
                - math.log1p(-self.alpha)
            )
            self.n, self.total = int(n[-1]), float(totals[-1])
            self.peak = max(self.peak, float(owned.max()))
        return self.alarm
