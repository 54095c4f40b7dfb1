"""Plans: how many queries to label, and how large the sets are that they certify.

The number that a perfect system needs follows from alpha and delta alone. Sizes are predicted from
a pilot: labelled queries that were searched and scored, and that do not calibrate afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, as_option
from rcir.notebook import Report
from rcir.risk.bounds import Bound
from rcir.risk.exact import counting_rule
from rcir.risk.losses import RISKS
from rcir.risk.request import Request
from rcir.risk.results import ScoredResults, widen

Pilot = Literal["calibration", "tuning"]  # the split of a calibration that is the pilot
NUMBERS = (50, 100, 200, 500, 1000)  # of queries to label that are compared
LEVEL = 0.9  # of intervals
DRAWS = 1000
MAX_PILOT = 2000  # queries; more would make an interval hardly shorter
LIKELY = 0.95  # share of draws that are certified with the number of queries that is advised


@dataclass(frozen=True)
class PlannedSize:
    """The mean size of the sets that a number of new calibration queries certifies.

    Attributes:
        n: number of queries.
        size: median of the draws; infinite if the pilot does not show it.
        low, high: ends of the interval, see `plan_calibration`; infinite alike.
        unattainable: share of draws that certify nothing.
        beyond: share of further draws in which every match of the pilot has a smaller score than
            the threshold, so that the pilot does not show the size, nor whether it is attainable.
    """

    n: int
    size: float
    low: float
    high: float
    unattainable: float
    beyond: float


@dataclass(frozen=True, repr=False)
class Plan(Report):
    """How many queries to label for a request; `str` gives a table and advice.

    Attributes:
        request: what is to be certified.
        required: number of calibration queries that certify it if every query is served by some
            set; fewer cannot.
        n_pilot: number of queries of the pilot; 0 without one.
        n_unmatched: number of these without a match among their candidates.
        rows: one for each number of queries that was compared.
    """

    request: Request
    required: int
    n_pilot: int = 0
    n_unmatched: int = 0
    rows: tuple[PlannedSize, ...] = ()

    def _parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        (alpha,), delta = self.request.levels.values(), self.request.delta
        counted = "with a match " if self.request.counted == "matchable" else ""
        level = "on average" if delta is None else f"at delta = {delta:g}"
        sentences = [
            f"alpha = {alpha:g} {level} needs at least {self.required} labelled queries {counted}"
            "to calibrate."
        ]
        if not self.rows:
            return sentences, [], []
        sentences.append(
            f"Mean sizes with {LEVEL:.0%} intervals, from a pilot of {self.n_pilot} queries, "
            f"{self.n_unmatched} of them without a match among their candidates:",
        )
        table = [["queries", "   size", "        interval", "unattainable", "beyond pilot"]]
        for row in self.rows:
            ends = f"{row.low:.2f} to {row.high:.2f}"
            shares = [f"{row.unattainable:.1%}", f"{row.beyond:.1%}"]
            cells = [str(row.n), f"{row.size:.2f}", ends, *shares]
            table.append([cell.replace("inf", "  -") for cell in cells])
        advice = (
            f"{row.n} labelled queries: {row.size:.2f} items per query ({row.low:.2f} to "
            f"{row.high:.2f}); unattainable in {row.unattainable:.0%} of draws."
            for row in self.rows
            if row.unattainable + row.beyond <= 1 - LIKELY
        )
        nothing = (
            f"None of these numbers is certified within the pilot's scores in {LIKELY:.0%} of "
            "draws: label more, label a larger pilot, or request a larger alpha."
        )
        further = ["Calibrate on new queries: those of the pilot may tune, and must not certify."]
        if self.n_unmatched and self.request.counted == "all":
            option = as_option("counted", "matchable")
            further.append(f"{option} plans for queries with a match, which need fewer items.")
        return sentences, table, [next(advice, nothing), *further]


def plan_calibration(
    request: Request,
    pilot: ScoredResults | None = None,
    numbers: Sequence[int] = NUMBERS,
    bound: Bound = "binomial",
    *,
    seed: int = 0,
) -> Plan:
    """Predict the mean size of the sets that n new, independent calibration queries certify.

    The threshold is the (M + 1)-th largest score of the n queries, see `order_statistic`. Its place
    among m pilot queries has a beta-binomial distribution whatever that of the scores, because the
    pilot cuts the population into m + 1 parts with Dirichlet(1, ..., 1) shares, and the share of
    the population below the threshold is Beta(n - M, M + 1). Both are drawn together, and the mean
    size with the same shares as weights of the pilot queries (the Bayesian bootstrap, Rubin, Ann.
    Statist. 1981). An end of the interval is the size at the next pilot score outwards.

    The interval covers the draw of the calibration queries and that of the pilot, for the mean size
    over the population with one new calibration. It does not cover what a new fit of the score
    function changes, or another gallery, or pilot queries that are unlike the new ones.

    Args:
        request: of the miss risk, for independent queries: all, those of one group, or those with a
            match (n then counts these).
        pilot: scored queries that did not fit the score function; None for the required number
            alone. Of more than 2,000, as many are chosen at random.
        numbers: of calibration queries, each at least 1.
        bound: see `rcir.risk.p_value`.
        seed: of the draws.

    Raises:
        InvalidConfig: the request has no order statistic to predict, or a number is not positive.

    Example:
        >>> from rcir.risk import make_request
        >>> plan_calibration(make_request(0.1, 0.1)).required
        22
        >>> scores = np.tile(np.arange(10, dtype=np.float32), (200, 1))
        >>> relevant = np.arange(10) == np.arange(200)[:, None] % 10
        >>> pilot = ScoredResults.from_scores(scores, relevant)
        >>> rows = plan_calibration(make_request(0.35, 0.1), pilot, [50, 500]).rows
        >>> [round(row.size, 2) for row in rows]
        [8.0, 7.0]
    """
    _check(request, pilot, numbers)
    (alpha,) = request.levels.values()
    required = counting_rule(1, request.delta, bound, request.holds).required(alpha)
    if required is None:
        raise InvalidConfig(f"alpha = {alpha:g} needs more than half a billion calibration queries")
    if pilot is None:
        return Plan(request, required)
    pilot = pilot.of_group(request.group)
    if request.counted == "matchable":
        pilot = pilot[pilot.matchable]
    if request.max_size is not None:
        pilot = pilot.cut(request.max_size)
    rng = np.random.default_rng(seed)
    if len(pilot) > MAX_PILOT:
        pilot = pilot[rng.permutation(len(pilot))[:MAX_PILOT]]
    unmatched = int(np.isinf(pilot.match_score).sum())
    return Plan(
        request, required, len(pilot), unmatched, _rows(request, pilot, numbers, bound, rng)
    )


def _check(request: Request, pilot: ScoredResults | None, numbers: Sequence[int]) -> None:
    exact = request.risk is not None and request.risk.exact and not request.abstain
    mixed = request.groups != "all" and request.group is None
    further = request.beta is not None or request.balance is not None
    if not exact or mixed or further or request.labels != "calibrated":
        names = " or ".join(name for name, risk in RISKS.items() if risk.exact)
        raise InvalidConfig(
            f"a plan is for the {names} risk of all queries, of one group or of those with a match:"
            " other requests have several thresholds, or none that is a single query's score. Leave"
            " out abstain, mix, query_labels, beta and balance"
        )
    if request.key is not None or request.together:
        raise InvalidConfig("key and together describe queries: leave them out of a plan")
    if pilot is not None and pilot.population.clusters is not None:
        word = pilot.population.cluster_word
        raise InvalidConfig(
            f"the pilot queries come in clusters ({word}), whose threshold is not that of a single "
            "query: calibrate with one query of each, which are independent, and plan their number"
        )
    if not isinstance(numbers, Sequence | np.ndarray) or isinstance(numbers, str):
        raise InvalidConfig(f"numbers is {numbers!r}; pass a list of integers from 1")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
            raise InvalidConfig(
                f"the number of queries is {number!r}; it must be an integer from 1"
            )


def _rows(
    request: Request,
    pilot: ScoredResults,
    numbers: Sequence[int],
    bound: Bound,
    rng: np.random.Generator,
) -> tuple[PlannedSize, ...]:
    """Draw thresholds and mean sizes for each number of queries."""
    (alpha,) = request.levels.values()
    queries = pilot[np.argsort(pilot.match_score, kind="stable")]
    m, n_matched = len(queries), int(np.isfinite(queries.match_score).sum())
    thresholds, place = np.unique(queries.match_score[:n_matched], return_inverse=True)
    steps = np.concatenate([np.zeros(1), widen(thresholds)])  # 0: the smallest sets
    sizes = queries.n_within(steps, np.isfinite(queries.require("scores"))).T.astype(np.float64)
    sizes = np.concatenate([sizes, np.full((1, m), np.inf)])  # beyond the last match
    # Rows of `sizes`: at each score and at the one before it.
    at = np.full(m + 1, len(steps))
    at[:n_matched] = place + 1
    below = np.concatenate([[0], at[:-1]])
    mass = rng.exponential(size=(DRAWS, m + 1))
    levels = np.cumsum(mass[:, :-1], axis=1) / mass.sum(axis=1, keepdims=True)
    weights = mass[:, :-1] / mass[:, :-1].sum(axis=1, keepdims=True)

    def mean_sizes(step: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(np.einsum("dq,dq->d", weights, sizes[step]))

    rows = []
    for n in map(int, numbers):
        allowed = counting_rule(n, request.delta, bound, request.holds).allowed(alpha)
        if allowed < 0:
            rows.append(PlannedSize(n, np.inf, np.inf, np.inf, 1.0, 0.0))
            continue
        share = rng.beta(n - allowed, allowed + 1, size=(DRAWS, 1))
        number = np.count_nonzero(levels < share, axis=1)
        tails = [0.5, (1 - LEVEL) / 2, (1 + LEVEL) / 2]
        size, _, high = np.quantile(mean_sizes(at[number]), tails, method="inverted_cdf")
        _, low, _ = np.quantile(mean_sizes(below[number]), tails, method="inverted_cdf")
        shares = np.mean(number > n_matched), np.mean(number == n_matched)
        rows.append(PlannedSize(n, *map(float, (size, low, high, *shares))))
    return tuple(rows)
