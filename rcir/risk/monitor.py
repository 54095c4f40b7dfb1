"""Monitoring of a guarantee: tests by betting on the losses, and a test of exchangeability.

`RiskMonitor` bets on the next loss at odds that are fair if the risk is alpha.
A bet multiplies the wealth by the factor 1 + lambda (loss - alpha). The fraction lambda >= 0 may
depend on all previous losses, and is bounded so that no factor is negative. For losses 0 or 1, the
factor is the likelihood ratio of a risk q against alpha, with
lambda = (q - alpha) / (alpha (1 - alpha)). The factor is linear in the loss, so that any losses in
[0, 1] are valid, for example 1 - recall. While the risk given the past is at most alpha, no bet
has a positive expected gain (Waudby-Smith and Ramdas, JRSS-B 2024).

A bet that is made from the first query on has lost most of its wealth if the risk rises late.
Therefore a new bet starts at each query. The total wealth of all bets follows a linear recursion,
see `_log_recursion`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrc, logsumexp

from rcir.errors import InvalidData
from rcir.risk.bounds import check_level
from rcir.risk.results import ScoredResults, widen

N_ALTERNATIVES = 12  # alternative risks: those to which the risk may have risen
RESERVE_SHARE = 0.25  # share of the wealth for bets that start after the first query
INITIAL_ODDS = 0.3  # prior odds that the risk is an alternative from the first query on
CHANGE_INTERVAL = 5000  # the prior odds of a change before query n + 1 are 1 / (this + n)
BASELINE_WINDOW = 100  # the baseline risk is averaged over about this / alpha queries
BLOCK_SIZE = 2**16  # losses that are processed at a time, to limit memory use


@dataclass
class RiskMonitor:
    """A test martingale for the hypothesis that the risk is at most alpha, valid at every query.

    The initial wealth is 1. A share w_t of it is bet from query t on:
    ``M_n = sum_{t <= n} w_t f_t ... f_n + sum_{t > n} w_t``, where the w_t sum to 1 and f_t is the
    factor of query t, as defined in `rcir.risk.monitor`. While the risk given the past is at most
    alpha, the wealth M_n is a non-negative supermartingale. The probability that it ever reaches
    1 / level is then at most level (Ville's inequality), so that the stream can be tested after
    every query, without end.

    The bets depend on a forecast of the next loss; nothing is bet while the forecast is at most
    alpha. The forecast averages over two possibilities: the risk is still the baseline risk, which
    is estimated from recent losses, or it has risen, at any earlier query, to one of 12 alternative
    risks from alpha upwards. The losses determine the posterior probability of each (Shiryaev's
    statistic). Little wealth is therefore lost while the risk is low, and a rise is detected
    relative to the baseline risk instead of alpha. The quality of the forecast affects how soon an
    alarm is raised, never the probability of a false alarm. A risk that exceeds alpha by less than
    a few percent of alpha may never be detected.

    The order of the losses must not depend on them: pass them in the order in which the queries
    arrived, without gaps. If misses become known sooner than hits, an order by the time at which
    they do raises false alarms. Wait for a loss that is unknown yet, up to a
    limit that is fixed beforehand, and then pass 1; an alarm can then also mean that too many
    losses stay unknown.

    An alarm means that the risk is above alpha: the queries have changed, or the certificate was
    wrong from the start, which has probability at most delta. With `delta=None`, the risk is above
    alpha after many calibrations, although it is not on average: monitor a larger alpha then.

    Attributes:
        alpha: the guaranteed risk.
        level: probability of a false alarm over the whole, unlimited stream.
        n: number of losses so far.
        total: sum of the losses so far.
        peak: log of the largest wealth so far.
        staked: log of the wealth at stake on the next loss.
        usual: log of the discounted sum of past losses, from which the baseline risk is estimated.
        odds: (12,) log posterior odds of each alternative risk against the baseline risk, before
            division by the number of alternatives.

    These attributes are the complete state: `RiskMonitor(**dataclasses.asdict(monitor))` continues
    where `monitor` stopped.

    Raises:
        InvalidRiskLevel: alpha or level is out of range.

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
    staked: float = math.log(1 - RESERVE_SHARE)
    usual: float = math.log(0.5)
    odds: list[float] = field(default_factory=lambda: [math.log(INITIAL_ODDS)] * N_ALTERNATIVES)

    def __post_init__(self) -> None:
        check_level("alpha", self.alpha)
        check_level("level", self.level)

    @property
    def alarm(self) -> bool:
        """True once the losses have contradicted the guarantee; it is never cleared."""
        return self.peak >= math.log(1 / self.level)

    @property
    def evidence(self) -> float:
        """The largest wealth so far, at least 1; the alarm is raised at 1 / level."""
        return math.exp(min(self.peak, 700.0))

    def update(self, losses: ArrayLike) -> bool:
        """Add the losses of further queries and return `alarm`.

        Args:
            losses: a number or (m,) numbers in [0, 1], in the order in which the queries
                arrived, without gaps; a miss is 1 or True.

        Raises:
            InvalidData: a loss is not a number in [0, 1]; the state is then unchanged.
        """
        for block in _loss_blocks(losses):
            self._add_block(block)
        return self.alarm

    def _add_block(self, losses: NDArray[np.float64]) -> None:
        n = self.n + np.arange(1, len(losses) + 1)
        log_factors = self._log_factors(losses, n)
        # A reserve of RESERVE_SHARE / (1 + log n) is left after n queries: w_t ~ 1 / (t log^2 t).
        reserve = RESERVE_SHARE / (1 + np.log(n))
        weights = reserve * np.log1p(1 / n) / (1 + np.log(n + 1))
        log_stakes = _log_recursion(np.float64(self.staked), log_factors, np.log(weights))
        log_wealth = np.logaddexp(log_stakes[:-1] + log_factors, np.log(reserve))
        self.n, self.total = int(n[-1]), self.total + float(losses.sum())
        self.peak, self.staked = max(self.peak, float(log_wealth.max())), float(log_stakes[-1])

    def _log_factors(
        self, losses: NDArray[np.float64], n: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the (m,) log factors of (m,) losses, the n-th ones, and update the forecast."""
        # The prior counts as half a miss among 1 / alpha queries, and is not discounted.
        discount_rate = self.alpha / BASELINE_WINDOW
        log_discounts = np.full(len(losses), math.log1p(-discount_rate))
        log_misses = _log_recursion(
            np.float64(self.usual), log_discounts, np.log(losses + discount_rate / 2)
        )
        # The discounted number of queries, times alpha.
        n_queries = 1 - BASELINE_WINDOW * np.expm1((n - 1) * log_discounts)
        baseline = np.minimum(self.alpha * np.exp(log_misses[:-1]) / n_queries, self.alpha)[:, None]

        # Risks in [alpha, 1), denser near alpha, and their complements, accurate near 0.
        logs = math.log(self.alpha) * (1 - (np.arange(N_ALTERNATIVES) / N_ALTERNATIVES) ** 2)
        risks, complements = np.exp(logs), -np.expm1(logs)
        ratios = _log_linear(losses[:, None], risks / baseline, complements / (1 - baseline))
        odds = _log_recursion(np.array(self.odds), ratios, -np.log(CHANGE_INTERVAL + n)[:, None])
        self.usual, self.odds = float(log_misses[-1]), odds[-1].tolist()

        odds = odds[:-1] - math.log(N_ALTERNATIVES)
        odds -= np.logaddexp(0, logsumexp(odds, axis=1, keepdims=True))
        p_alternative = np.exp(odds)
        p_baseline = np.maximum(1 - p_alternative.sum(axis=1), 0)
        forecast = p_baseline * baseline[:, 0] + p_alternative @ risks
        complement = p_baseline * (1 - baseline[:, 0]) + p_alternative @ complements
        factor_at_one = np.maximum(forecast / self.alpha, 1)
        factor_at_zero = np.minimum(complement / (1 - self.alpha), 1)
        return _log_linear(losses, factor_at_one, factor_at_zero)


def _log_recursion(
    log_start: NDArray[np.float64] | np.float64,
    log_factors: NDArray[np.float64],
    log_increments: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return (m + 1, ...) logs of U_0, ..., U_m, where ``U_n = f_n U_{n-1} + w_n``.

    U_n is, say, the wealth at stake after n losses if a new bet of w_n follows each. `log_factors`
    has shape (m, ...), and `log_increments` is broadcast to it.
    """
    log_products = np.concatenate([np.zeros_like(log_factors[:1]), np.cumsum(log_factors, axis=0)])
    terms = np.concatenate([np.asarray(log_start)[None], log_increments - log_products[1:]])
    return log_products + np.logaddexp.accumulate(terms, axis=0)


def _log_linear(
    losses: NDArray[np.float64], at_one: NDArray[np.float64], at_zero: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return logs of factors that are linear in the loss, given their values at losses 1 and 0."""
    return np.log(losses * at_one + (1 - losses) * at_zero)


def _loss_blocks(losses: ArrayLike) -> Iterator[NDArray[np.float64]]:
    """Validate losses and return them in blocks of at most `BLOCK_SIZE`; no block if empty."""
    try:
        values = np.atleast_1d(np.asarray(losses, np.float64))
    except (TypeError, ValueError) as error:
        raise InvalidData(
            f"the losses are not numeric ({error}); pass numbers in [0, 1]"
        ) from error
    if values.ndim != 1:
        raise InvalidData(f"losses have shape {values.shape}; pass a number or (m,) numbers")
    invalid = ~((values >= 0) & (values <= 1))
    if invalid.any():
        raise InvalidData(
            f"{int(invalid.sum())} of {len(values)} losses are NaN or outside [0, 1], the first is "
            f"{values[invalid][0]}; pass 0 for a hit, 1 for a miss, or a number between them"
        )
    return (values[start : start + BLOCK_SIZE] for start in range(0, len(values), BLOCK_SIZE))


@dataclass(frozen=True)
class Exchangeability:
    """Result of testing whether recent and calibration queries have the same distribution.

    With a certified threshold, the hypothesis is also that the risk at this threshold is at most
    alpha.

    Attributes:
        p_values: by name, p-values of two-sample Kolmogorov-Smirnov tests of "uncertainty" and of
            "score", the match score; with a certified threshold also of the one-sided binomial test
            of "risk", the share of misses among the recent queries.
        n_calibration, n_recent: numbers of queries.
        misses: number of recent queries that are missed at the certified threshold, if any.
        alpha: the certified risk; None without a certified threshold.
    """

    p_values: Mapping[str, float]
    n_calibration: int
    n_recent: int
    misses: int | None = None
    alpha: float | None = None

    @property
    def p_value(self) -> float:
        """Joint p-value (Bonferroni): under the hypothesis, P(p_value <= x) <= x for every x."""
        return min(1.0, len(self.p_values) * min(self.p_values.values()))

    def contradicted(self, level: float = 0.01) -> bool:
        """Return True if the hypothesis is rejected at a level in (0, 1)."""
        return self.p_value <= check_level("level", level)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.p_values.items())
        hypothesis = "equal distributions"
        missed = ""
        if self.alpha is not None:
            hypothesis += f" and a risk of at most {self.alpha:g}"
            missed = f"; {self.misses} recent queries were missed"
        return (
            f"{self.n_recent} recent against {self.n_calibration} calibration queries: p-value "
            f"{self.p_value:.3g} for {hypothesis} ({parts}){missed}."
        )


def check_exchangeability(
    calibration: ScoredResults,
    recent: ScoredResults,
    certified: tuple[float, float] | None = None,
) -> Exchangeability:
    """Test whether recent labelled queries have the same distribution as the calibration queries.

    A small p-value is evidence that they do not; a large one is not evidence that they do. Queries
    without a match among their candidates have an infinite match score. With `certified`, the risk
    of the recent queries is tested as well, which detects an increased risk with fewer queries than
    the comparison of distributions. The risk can be above alpha without any change, if the
    certificate was wrong from the start, which has probability at most delta.

    Args:
        calibration: the scored calibration queries.
        recent: recent queries, scored by the same score function; at least 2.
        certified: (threshold, alpha): a threshold and the miss rate that it certifies.

    Raises:
        InvalidData: there are fewer than 2 recent queries, or some queries have no uncertainty.
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
        raise InvalidData(f"got {len(recent)} recent queries; pass at least 2")
    pairs = {
        "uncertainty": (calibration.require("uncertainty"), recent.require("uncertainty")),
        "score": (calibration.match_score, recent.match_score),
    }
    from scipy.stats import ks_2samp  # slow to import

    with warnings.catch_warnings():
        # SciPy warns if it has to replace the exact p-value by the asymptotic one.
        warnings.filterwarnings("ignore", "ks_2samp: Exact calculation", RuntimeWarning)
        p_values = {name: float(ks_2samp(*pair).pvalue) for name, pair in pairs.items()}
    if certified is None:
        return Exchangeability(p_values, len(calibration), len(recent))
    threshold, alpha = certified[0], check_level("alpha", certified[1])
    misses = int(np.count_nonzero(recent.match_score > widen(threshold).astype(np.float32)))
    # The p-value P(Binomial(n, alpha) >= misses).
    p_values["risk"] = float(bdtrc(misses - 1, len(recent), alpha)) if misses else 1.0
    return Exchangeability(p_values, len(calibration), len(recent), misses, alpha)
