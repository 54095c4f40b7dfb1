"""Watching a guarantee in use: alarms when what is seen contradicts it.

Both alarms bet on the next loss, at odds that are fair where the risk is alpha: the wealth is
multiplied by 1 + lambda (loss - alpha), where lambda >= 0 may depend on all losses before, and is
bounded so that nothing becomes negative. For losses 0 or 1 that is the likelihood ratio of a risk
q against alpha, lambda = (q - alpha) / (alpha (1 - alpha)); in between it is linear, so that losses
in [0, 1] are taken as well, for instance 1 - recall. While the risk is at most alpha, whatever the
past, no such bet gains on average (Waudby-Smith and Ramdas, JRSS-B 2024).

What was bet from the first query on is lost when the risk rises late. So a new bet is added at each
query; the sum of all of them follows one recursion, `_staked`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrc, logsumexp

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk.bounds import check_level
from rcir.risk.results import ScoredResults, widened

ALTERNATIVES = 12  # that the risk may have risen to
LATER = 0.25  # share of the wealth that is not bet from the first query on
FROM_START = 0.3  # odds of a risk above alpha from the first query on, against the usual risk
CHANGES = 5000  # queries between changes that the forecast expects; more the longer there is none
MISSES = 100  # that the usual risk is estimated from, about
LOSSES_TOGETHER = 2**16  # queries at a time, to bound the memory


@dataclass
class RiskMonitor:
    """A test martingale against "the risk is at most alpha", valid at every moment.

    Its wealth is that of one bet from each query t on, with a share w_t of the first wealth, 1:
    ``M_n = sum_{t <= n} w_t f_t ... f_n + sum_{t > n} w_t``, where the w_t sum to 1 and the factors
    f_t are as above. While the risk is at most alpha, whatever the past, this is a non-negative
    supermartingale that starts at 1, so that it ever reaches 1 / level with probability at most
    level (Ville): queries may be watched one by one for ever.

    The bets follow a forecast of the loss, and are none while that is at most alpha. The forecast
    is the usual risk of late, unless the risk has risen, at any query, to one of 12 risks from
    alpha on, each as probable as the losses make it (Shiryaev's statistic). So little is lost in
    good times, and a change shows against the usual risk, not against alpha. How good the forecast
    is decides how soon an alarm comes, never how often it is false. A risk above alpha by less than
    a few hundredths of it may never be told.

    An alarm says that the risk is above alpha: the queries have changed, or the calibration was
    among the share delta. With `delta=None` many valid calibrations are: watch a larger alpha then.

    Attributes:
        alpha: the risk that is guaranteed.
        level: probability of a false alarm over the whole, unlimited stream.
        n: number of losses so far.
        total: their sum.
        peak: the largest log of the wealth.
        staked: log of what the next loss is bet with.
        usual: log of the sum of the late losses, older ones counting less.
        odds: (12,) log odds that the risk is each of the larger ones, against the usual risk.

    The attributes are all there is to store: `RiskMonitor(**dataclasses.asdict(monitor))` goes on.

    Example:
        >>> monitor = RiskMonitor(alpha=0.1, level=0.01)
        >>> monitor.update([0, 0, 1, 0, 0, 0, 0, 1, 0, 0])
        False
        >>> monitor.update([1, 1, 0, 1, 1, 0, 1, 1, 1])
        True
    """

    alpha: float
    level: float = 0.01
    n: int = 0
    total: float = 0.0
    peak: float = 0.0
    staked: float = math.log(1 - LATER)
    usual: float = math.log(0.5)
    odds: list[float] = field(default_factory=lambda: [math.log(FROM_START)] * ALTERNATIVES)

    def __post_init__(self) -> None:
        check_level("alpha", self.alpha)
        check_level("level", self.level)

    @property
    def alarm(self) -> bool:
        """Whether the losses so far contradict the guarantee; once raised it stays."""
        return self.peak >= math.log(1 / self.level)

    @property
    def evidence(self) -> float:
        """The largest wealth so far, from 1; an alarm from 1 / level."""
        return math.exp(min(self.peak, 700.0))

    def update(self, losses: ArrayLike) -> bool:
        """Take the losses of further queries, in their order; return `alarm`.

        Args:
            losses: one, or (m,), each in [0, 1]; a miss is 1 or True.

        Raises:
            InvalidData: one is outside [0, 1] or NaN; then none is taken.
        """
        for block in _blocks(losses):
            self._take(block)
        return self.alarm

    def _take(self, losses: NDArray[np.float64]) -> None:
        n = self.n + np.arange(1, len(losses) + 1)
        gains = self._factors(losses, n)
        # Kept for bets from later queries on: LATER / (1 + log n), so that w_t ~ 1 / (t log^2 t).
        kept = LATER / (1 + np.log(n))
        fresh = kept * np.log1p(1 / n) / (1 + np.log(n + 1))
        staked = _staked(np.float64(self.staked), gains, np.log(fresh))
        wealth = np.logaddexp(staked[:-1] + gains, np.log(kept))
        self.n, self.total = int(n[-1]), self.total + float(losses.sum())
        self.peak, self.staked = max(self.peak, float(wealth.max())), float(staked[-1])

    def _factors(self, losses: NDArray[np.float64], n: NDArray[np.int64]) -> NDArray[np.float64]:
        """(m,) log of the factor of each loss, where n of them are known with it."""
        # Half a miss among 1 / alpha queries is taken as seen before, and goes on to be.
        forgotten = self.alpha / MISSES
        fading = np.full(len(losses), math.log1p(-forgotten))
        late = _staked(np.float64(self.usual), fading, np.log(losses + forgotten / 2))
        queries = 1 - MISSES * np.expm1((n - 1) * fading)  # times alpha
        usual = np.minimum(self.alpha * np.exp(late[:-1]) / queries, self.alpha)[:, None]

        risks, rest = _risks(self.alpha)
        ratios = _log_factor(losses[:, None], risks / usual, rest / (1 - usual))
        odds = _staked(np.array(self.odds), ratios, -np.log(CHANGES + n)[:, None])
        self.usual, self.odds = float(late[-1]), odds[-1].tolist()

        odds = odds[:-1] - math.log(ALTERNATIVES)
        odds -= np.logaddexp(0, logsumexp(odds, axis=1, keepdims=True))
        risen = np.exp(odds)
        same = np.maximum(1 - risen.sum(axis=1), 0)
        forecast = same * usual[:, 0] + risen @ risks
        above = np.maximum(forecast / self.alpha, 1)
        below = np.minimum((same * (1 - usual[:, 0]) + risen @ rest) / (1 - self.alpha), 1)
        return _log_factor(losses, above, below)


@dataclass
class ChangeDetector:
    """An alarm when the risk rises above alpha, with a chosen mean time between false ones.

    For streams in which alarms are answered and the watch goes on (`reset`). Where `RiskMonitor`
    spreads one wealth over all queries, here every query starts a bet of 1, on each of some larger
    risks alike; the alarm comes when the wealth of all together, per risk, reaches `mean_time`.
    While the risk is at most alpha, whatever the past, it gains at most 1 per query on average, so
    that the mean number of queries until a false alarm is at least `mean_time` (the e-detector of
    Shiryaev and Roberts' kind; Shin, Ramdas and Rinaldo, NEJSDS 2024). A false alarm comes some
    day.

    Attributes:
        alpha: the risk that is guaranteed.
        mean_time: number of queries between false alarms, on average at least; above 1.
        n: number of losses since the last `reset`.
        total: their sum.
        peak: the largest log of the wealth.
        staked: (11,) log of what the next loss is bet with, for each of the larger risks.

    The attributes are all there is to store: `ChangeDetector(**dataclasses.asdict(detector))` goes
    on.

    Raises:
        InvalidRiskLevel: alpha is out of range.
        InvalidConfig: mean_time is.

    Example:
        >>> detector = ChangeDetector(alpha=0.1, mean_time=10_000)
        >>> detector.update([0, 0, 0, 0, 1, 0, 0, 0, 0, 0] * 50)
        False
        >>> detector.update([0, 1, 1] * 10)
        True
        >>> detector.reset()
        >>> detector.alarm
        False
    """

    alpha: float
    mean_time: float
    n: int = 0
    total: float = 0.0
    peak: float = 0.0
    staked: list[float] = field(default_factory=lambda: [0.0] * (ALTERNATIVES - 1))

    def __post_init__(self) -> None:
        check_level("alpha", self.alpha)
        if not isinstance(self.mean_time, Real) or not 1 < self.mean_time < math.inf:
            raise InvalidConfig(
                f"mean_time is {self.mean_time!r}; it must be a number of queries above 1, for "
                "instance 10000"
            )

    @property
    def alarm(self) -> bool:
        """Whether the wealth has reached `mean_time` since the last `reset`."""
        return self.peak >= math.log(self.mean_time)

    def reset(self) -> None:
        """Begin again, after an alarm was answered."""
        self.n, self.total, self.peak = 0, 0.0, 0.0
        self.staked = [0.0] * (ALTERNATIVES - 1)

    def update(self, losses: ArrayLike) -> bool:
        """Take the losses of further queries, in their order; return `alarm`.

        Args:
            losses: one, or (m,), each in [0, 1]; a miss is 1 or True.

        Raises:
            InvalidData: one is outside [0, 1] or NaN; then none is taken.
        """
        # Without alpha itself: a bet on it is none, and would only count the queries.
        above, below = (part[1:] for part in _risks(self.alpha))
        for block in _blocks(losses):
            gains = _log_factor(block[:, None], above / self.alpha, below / (1 - self.alpha))
            staked = _staked(np.array(self.staked), gains, np.zeros((1, 1)))
            wealth = logsumexp(staked[:-1] + gains, axis=1) - math.log(ALTERNATIVES - 1)
            self.n, self.total = self.n + len(block), self.total + float(block.sum())
            self.peak, self.staked = max(self.peak, float(wealth.max())), staked[-1].tolist()
        return self.alarm


def _staked(
    first: Any, log_factors: NDArray[np.float64], log_starts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(m + 1, ...) log of U_0, ..., U_m: ``U_n = f_n U_{n-1} + w_n``, U_0 = exp(first).

    What is bet with before each loss, if each is followed by a new bet of w_n; f_n are exp of
    `log_factors` (m, ...), w_n of `log_starts`. In logs, where nothing overflows.
    """
    grown = np.concatenate([np.zeros_like(log_factors[:1]), np.cumsum(log_factors, axis=0)])
    starts = np.concatenate([np.asarray(first)[None], log_starts - grown[1:]])
    return grown + np.logaddexp.accumulate(starts, axis=0)


def _log_factor(
    losses: NDArray[np.float64], at_one: NDArray[np.float64], at_zero: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Log of the factors that are linear in the loss."""
    return np.log(losses * at_one + (1 - losses) * at_zero)


def _risks(alpha: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Risks from alpha on, below 1, denser next to alpha; and 1 - risk, exact next to 1."""
    logs = math.log(alpha) * (1 - (np.arange(ALTERNATIVES) / ALTERNATIVES) ** 2)
    return np.exp(logs), -np.expm1(logs)


def _blocks(losses: ArrayLike) -> Iterator[NDArray[np.float64]]:
    """Losses of a caller, checked, as arrays of a bounded length; none if there are none."""
    try:
        values = np.atleast_1d(np.asarray(losses, np.float64))
    except (TypeError, ValueError) as error:
        raise InvalidData(f"losses are no numbers ({error}): give numbers in [0, 1]") from error
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise InvalidData("losses must be one number or (m,) numbers in [0, 1], without NaN")
    return (
        values[start : start + LOSSES_TOGETHER] for start in range(0, len(values), LOSSES_TOGETHER)
    )


@dataclass(frozen=True)
class Exchangeability:
    """A test of "recent and calibration queries have one distribution, at a risk <= alpha".

    Attributes:
        p_values: of the two-sample Kolmogorov-Smirnov test of each quantity: "uncertainty" of the
            queries, and "score", the smallest threshold that serves them; and, where a risk was
            certified, of the one-sided binomial test of "risk", the share of recent queries that
            the certified threshold misses.
        p_value: of all together (Bonferroni); where the hypothesis is true, it is at most x with
            probability at most x.
        n_calibration, n_recent: numbers of queries.
        misses: number of recent queries that the certified threshold misses; None without one.
        alpha: the certified risk; None without one.
    """

    p_values: Mapping[str, float]
    n_calibration: int
    n_recent: int
    misses: int | None = None
    alpha: float | None = None

    @property
    def p_value(self) -> float:
        return min(1.0, len(self.p_values) * min(self.p_values.values()))

    def contradicted(self, level: float = 0.01) -> bool:
        """Return True if the test rejects at a level in (0, 1): then the guarantee is void."""
        return self.p_value <= check_level("level", level)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.p_values.items())
        hypothesis = "that they come from one source"
        missed = ""
        if self.alpha is not None:
            hypothesis += f" and at most {self.alpha:g} are missed"
            missed = f"; {self.misses} of the recent ones were missed"
        return (
            f"{self.n_recent} recent against {self.n_calibration} calibration queries: p-value "
            f"{self.p_value:.3g} {hypothesis} ({parts}){missed}."
        )


def check_exchangeability(
    calibration: ScoredResults,
    recent: ScoredResults,
    certified: tuple[float, float] | None = None,
) -> Exchangeability:
    """Test whether recent labelled queries look like the calibration queries.

    A small p-value shows that they do not; a large one proves nothing. Queries without a match
    among their candidates have the largest score. With `certified`, the risk of the recent queries
    is tested too, which detects a higher risk sooner than the comparison does. The risk may also be
    higher without any change, if the calibration was among the share delta.

    Args:
        calibration, recent: queries that were scored by the same score function.
        certified: (threshold, alpha): a threshold and the miss rate that it was certified for.

    Raises:
        InvalidData: fewer than 2 recent queries.
        InvalidRiskLevel: alpha is out of range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> def scored(n, risk, shift=0.0):  # sets of one candidate
        ...     scores = np.where(rng.uniform(size=n) >= risk, 0, np.inf).astype(np.float32)
        ...     return ScoredResults(scores, depth=1, uncertainty=rng.normal(shift, size=n))
        >>> calibration, same = scored(400, 0.08), scored(200, 0.08)
        >>> shifted, worse = scored(200, 0.08, shift=1), scored(200, 0.16)
        >>> recent = (same, shifted, worse)
        >>> [check_exchangeability(calibration, each).contradicted() for each in recent]
        [False, True, False]
        >>> check_exchangeability(calibration, worse, certified=(0.0, 0.1)).contradicted()
        True
    """
    if len(recent) < 2:
        raise InvalidData(f"{len(recent)} recent queries; at least 2 are needed to compare")
    pairs = {
        "uncertainty": (calibration.require("uncertainty"), recent.require("uncertainty")),
        "score": (calibration.match_score, recent.match_score),
    }
    from scipy.stats import ks_2samp  # slow to import

    with warnings.catch_warnings():
        # SciPy says so where the exact p-value is out of reach, and takes the asymptotic one.
        warnings.filterwarnings("ignore", "ks_2samp: Exact calculation", RuntimeWarning)
        p_values = {name: float(ks_2samp(*pair).pvalue) for name, pair in pairs.items()}
    if certified is None:
        return Exchangeability(p_values, len(calibration), len(recent))
    threshold, alpha = certified[0], check_level("alpha", certified[1])
    misses = int(np.count_nonzero(recent.match_score > widened(threshold).astype(np.float32)))
    # P(Binomial(n, alpha) >= misses)
    p_values["risk"] = float(bdtrc(misses - 1, len(recent), alpha)) if misses else 1.0
    return Exchangeability(p_values, len(calibration), len(recent), misses, alpha)
