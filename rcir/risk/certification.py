"""Certification: from a request and scored calibration queries to a certificate.

`certify` chooses the procedure; each procedure is one function. None of them sees a retriever, and
none changes anything.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable, as_option
from rcir.risk import bounds
from rcir.risk.bounds import (
    Bound,
    Certificate,
    allowed_misses,
    check_bound,
    check_level,
    mean_bound,
    miss_rate_bound,
    p_value,
)
from rcir.risk.losses import MISS, Risk
from rcir.risk.request import Group, Mix, Request, conflict
from rcir.risk.results import ScoredResults
from rcir.risk.sequential import (
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
    band_required_calibration,
    local_level,
)
from rcir.risk.testing import learn_then_test, selective

COMPARED = 0.005  # the two bounds of means over labels are compared at multiples of it


def certify(
    request: Request,
    calibration: ScoredResults,
    tuning: ScoredResults | None = None,
    bound: Bound = "binomial",
) -> Certificate:
    """Certify a request.

    Args:
        request: the guarantee.
        calibration: the scored calibration queries.
        tuning: other queries, of the tuning split, scored by the same score function. The exact
            certificate of the miss risk does not need them.
        bound: of the miss risk; mean losses take "hoeffding-bentkus" in place of "binomial", and
            "betting" for queries in clusters.

    Raises:
        InvalidConfig: the calibration queries do not support such a request.
        InvalidData: tuning and calibration queries do not fit together.
        RiskUnattainable: no threshold is certified; the error states the smallest alpha that is,
            and the number of calibration queries that would do.

    Example:
        >>> from rcir.risk import make_request
        >>> scores = np.tile(np.arange(2, dtype=np.float32), (1000, 1))
        >>> relevant = np.array([[True, False]] * 900 + [[False, True]] * 100)
        >>> calibration = ScoredResults.of(scores, relevant)
        >>> requests = [make_request(alpha, 0.1) for alpha in (0.05, 0.15)]
        >>> [certify(request, calibration).threshold for request in requests]
        [1.0, 0.0]
    """
    check_bound(bound)
    if tuning is not None and tuning.depth != calibration.depth:
        raise InvalidData(
            f"the tuning split was searched to depth {tuning.depth}, the calibration queries to "
            f"{calibration.depth}: search both alike"
        )
    if reason := conflict(request, calibration.population.cluster_word):
        raise InvalidConfig(reason)
    size = request.max_size
    if size is not None and size < calibration.depth:
        # Candidates beyond have an infinite score before anything is certified. If sets were cut
        # afterwards, calibration queries whose match is beyond would count as served.
        with _refused(f"sets of at most {size} items"):
            cut = None if tuning is None else tuning.cut(size)
            return certify(replace(request, max_size=None), calibration.cut(size), cut, bound)
    if request.labels != "calibrated":
        return for_labels(request, calibration, tuning, bound)
    if request.groups == "any mix":
        return any_mix(request, calibration, tuning, bound)
    if request.group is not None:
        with _refused(f"group {request.group!r}"):
            queries = calibration.of_group(request.group)
            return certify(replace(request, groups="all"), queries, tuning, bound)
    alpha, delta, risk = request.alpha, request.delta, request.risk
    bound_of_means = _bound_of_means(bound, calibration)
    if risk is None or isinstance(alpha, Mapping) or not risk.monotone:
        assert delta is not None  # requests without delta have one monotone risk
        if risk is not None and risk.abstains:
            return selective(request.levels[risk.name], delta, calibration, _required(tuning))
        return learn_then_test(
            request.levels, delta, calibration, _required(tuning), bound_of_means
        )
    mix = request.groups if isinstance(request.groups, Mix) else None
    if risk.exact and calibration.population.clusters is None and mix is None:
        if risk is not MISS:
            risk.check_losses(calibration)
        at = {
            "simultaneous": request.holds == "for all alphas",
            "anytime": request.holds == "at every moment",
        }
        return order_statistic(alpha, delta, calibration, bound, **at)
    weights = None if mix is None else group_weights(calibration, mix.shares)
    whole = risk.binary and calibration.population.clusters is None and weights is None
    chosen = bound if whole else bound_of_means
    return mean_loss(risk, alpha, delta, calibration, tuning, chosen, weights)


def _required(tuning: ScoredResults | None) -> ScoredResults:
    if tuning is None:
        raise InvalidData("this request needs the tuning split: pass it, scored")
    return tuning


def _bound_of_means(bound: Bound, calibration: ScoredResults) -> Bound:
    """Return the bound of losses anywhere in [0, 1]."""
    if bound != "binomial":
        return bound
    return "hoeffding-bentkus" if calibration.population.clusters is None else "betting"


@contextmanager
def _refused(subject: str) -> Iterator[None]:
    """Begin the message of `RiskUnattainable` with what cannot be certified."""
    try:
        yield
    except RiskUnattainable as error:
        raise RiskUnattainable(
            f"{subject}: {error}",
            minimum_alpha=error.minimum_alpha,
            required_calibration=error.required_calibration,
        ) from None


# The miss risk of independent queries


class _CountingRule(NamedTuple):
    """A rule by which numbers of misses among the calibration queries certify a risk."""

    allowed: Callable[[float], int]  # the most misses that certify an alpha
    smallest: Callable[[int], float]  # the smallest alpha that misses certify
    required: Callable[[float], int | None]  # calibration queries with which alpha is certified


def order_statistic(
    alpha: float,
    delta: float | None,
    calibration: ScoredResults,
    bound: Bound = "binomial",
    *,
    simultaneous: bool = False,
    anytime: bool = False,
) -> Certificate:
    """Certify the miss risk of independent queries: exact with the binomial bound.

    With s_i the match score of calibration query i, the smallest threshold that certifies
    (alpha, delta) is the (M + 1)-th largest s_i, M = `allowed_misses`. If its risk were above
    alpha, at most M of the n scores would lie at or above a t* that each reaches with probability
    alpha or more, which happens with probability at most delta. The certified level is the smallest
    that allows the same number of misses; it depends on n, alpha and delta only, so that it may be
    stated. With `anytime` it is alpha, because one level is fixed for all n.

    Args:
        alpha: share of queries, in (0, 1), whose set may hold no true match.
        delta: probability, in (0, 1), that the calibration queries mislead; None for a risk of at
            most alpha on average over calibrations (conformal risk control, Angelopoulos et al.,
            ICLR 2024, theorem 1).
        calibration: the scored calibration queries; `match_score` is all that counts.
        bound: see `rcir.risk.p_value`.
        simultaneous: True to hold for all alphas at once, for an alpha that is chosen after
            looking; by a band of equal local levels, whatever the bound.
        anytime: True to hold at every number of calibration queries, which arrive one by one; by a
            test supermartingale, whatever the bound, for one alpha fixed beforehand.

    Raises:
        InvalidRiskLevel: alpha or delta is out of range.
        RiskUnattainable: no threshold is certified.
    """
    rule = _counting_rule(delta, calibration, bound, simultaneous, anytime)
    scores = calibration.ascending_match_scores
    n, unmatched = len(scores), _unmatched(calibration)
    allowed = rule.allowed(alpha)
    if allowed < unmatched:
        raise _unattainable(
            alpha,
            delta,
            calibration,
            minimum_alpha=_smallest_alpha(rule, unmatched),
            required_calibration=rule.required(alpha),
        )
    name: str = "conformal" if delta is None else bound
    name = "band" if simultaneous else "anytime" if anytime else name
    certified = float(alpha) if anytime else min(alpha, rule.smallest(allowed))
    return Certificate(float(scores[n - 1 - allowed]), name, certified)


def minimum_alpha(
    delta: float | None,
    calibration: ScoredResults,
    bound: Bound = "binomial",
    *,
    simultaneous: bool = False,
    anytime: bool = False,
) -> float | None:
    """Return the smallest alpha of the miss risk that `order_statistic` certifies at delta.

    Args:
        delta, calibration, bound, simultaneous, anytime: see `order_statistic`.

    Returns:
        The level; None if none below 1 can be certified.

    Example:
        >>> scores = np.repeat(np.array([0, 1, np.inf], np.float32), [860, 120, 20])
        >>> round(minimum_alpha(0.1, ScoredResults(scores, depth=50)), 4)
        0.0269
    """
    rule = _counting_rule(delta, calibration, bound, simultaneous, anytime)
    return _smallest_alpha(rule, _unmatched(calibration))


def _unmatched(calibration: ScoredResults) -> int:
    """Return the number of queries without a match, which no set serves."""
    scores = calibration.ascending_match_scores
    return len(scores) - int(np.searchsorted(scores, np.inf))


def _smallest_alpha(rule: _CountingRule, unmatched: int) -> float | None:
    smallest = rule.smallest(unmatched)
    step = math.ulp(smallest)
    while smallest < 1:
        if rule.allowed(smallest) >= unmatched:
            return smallest
        smallest, step = smallest + step, 2 * step  # the inverse was rounded down
    return None


def _counting_rule(
    delta: float | None, calibration: ScoredResults, bound: Bound, simultaneous: bool, anytime: bool
) -> _CountingRule:
    check_bound(bound)
    n = len(calibration)
    lost = _unmatched(calibration) / n
    if simultaneous and anytime:
        raise InvalidConfig(
            f"{as_option('simultaneous')} and {as_option('anytime')} exclude each other: choose one"
        )
    if delta is None:
        if simultaneous or anytime:
            kind = "simultaneous" if simultaneous else "anytime-valid"
            raise InvalidRiskLevel(f"{kind} levels need a delta: give one, such as 0.1")

        def allowed_on_average(alpha: float) -> int:
            # (misses + 1) / (n + 1) <= alpha
            exact = Fraction(check_level("alpha", alpha)) * (n + 1)
            return min(math.floor(exact) - 1, n - 1)

        return _CountingRule(
            allowed_on_average,
            lambda misses: (misses + 1) / (n + 1),
            lambda alpha: _required_queries(alpha, None, bound, lost),
        )
    level = check_level("delta", delta)
    if anytime:
        return _CountingRule(
            lambda alpha: anytime_allowed_misses(n, alpha, level),
            lambda misses: anytime_miss_rate_bound(misses, n, level),
            lambda alpha: anytime_required_calibration(alpha, level, lost),
        )
    if simultaneous:
        return _CountingRule(
            lambda alpha: allowed_misses(n, alpha, local_level(n, level)),
            lambda misses: miss_rate_bound(misses, n, local_level(n, level)),
            lambda alpha: band_required_calibration(alpha, level, lost),
        )
    return _CountingRule(
        lambda alpha: allowed_misses(n, alpha, level, bound),
        lambda misses: miss_rate_bound(misses, n, level, bound),
        lambda alpha: _required_queries(alpha, level, bound, lost),
    )


# Mean losses that fall as sets grow


def mean_loss(
    risk: Risk,
    alpha: float,
    delta: float | None,
    calibration: ScoredResults,
    tuning: ScoredResults | None = None,
    bound: Bound = "hoeffding-bentkus",
    weights: NDArray[np.float64] | None = None,
) -> Certificate:
    """Certify a monotone risk of losses in [0, 1].

    Risk-controlling prediction sets (Bates et al., JACM 2021, theorem 1): the mean loss falls as
    the threshold grows, and so does every bound here, so that bisection finds the smallest
    certified threshold among those at which some set gains a true match. These come from the
    calibration queries, but nothing changes between them: they stand for all thresholds.

    Losses are of independent units. If the queries come in clusters, the unit is the cluster and
    its loss the mean of its queries', so that the certificate is for the queries of new clusters,
    each cluster counted alike (the sampling of Lee, Barber and Willett, "Distribution-free
    inference with hierarchical data", 2023).

    Args:
        risk: a monotone one.
        alpha, delta: see `order_statistic`.
        calibration: the scored calibration queries.
        tuning: the tuning split; the "betting" bound learns its bet from it.
        bound: see `rcir.risk.p_value`; "binomial" for losses 0 or 1 of independent queries.
        weights: (units,) non-negative, with mean 1, of units in another population; they must not
            depend on losses. The bound is then "betting".

    Raises:
        InvalidData: risk or bound do not fit, or the losses are not those of a monotone risk.
        InvalidRiskLevel: alpha or delta is out of range.
        RiskUnattainable: not even the largest sets are certified.
    """
    check_bound(bound)
    whole = risk.binary and calibration.population.clusters is None and weights is None
    if bound == "binomial" and not whole:
        raise InvalidData("the binomial bound is for losses 0 or 1: choose hoeffding-bentkus")
    if not risk.monotone:
        raise InvalidData(f"the {risk.name} risk need not fall as sets grow")
    check_level("alpha", alpha)
    if delta is not None:
        check_level("delta", delta)
    elif weights is not None:
        raise InvalidRiskLevel("another mix of groups needs a delta: give one, such as 0.1")
    bound = bound if weights is None else "betting"
    risk.check_losses(calibration)
    calibrated = _MatchLosses(risk, calibration)
    thresholds = calibrated.thresholds
    tuned = _MatchLosses(risk, _required(tuning)) if bound == "betting" and delta else None

    def losses(index: int) -> NDArray[np.float64]:
        values = calibrated.at(index)
        return values if weights is None else values * weights

    def certifies(alpha: float) -> Callable[[NDArray[np.float64]], bool]:
        """Return the test of losses at a level."""
        if delta is None:
            return lambda losses: (math.fsum(losses) + 1) / (len(losses) + 1) <= alpha
        if tuned is not None:
            bet = _bet(tuned, alpha, delta, calibration.population.n_units, weights)
            wealth = math.log(1 / delta)
            return lambda losses: float(np.log1p(bet * (alpha - losses)).sum()) >= wealth
        return lambda losses: p_value(math.fsum(losses), len(losses), alpha, bound) <= delta

    test, largest = certifies(alpha), losses(len(thresholds) - 1)
    if not test(largest):
        lost = float(largest.mean())
        raise _unattainable(
            alpha,
            delta,
            calibration,
            minimum_alpha=_smallest_mean_alpha(largest, delta, bound, certifies),
            required_calibration=_required_queries(alpha, delta, bound, lost),
            lacking=None if risk.first_match else (risk.lacking, lost),
        )
    smallest = bisect_left(range(len(thresholds) - 1), True, key=lambda i: test(losses(i)))
    return Certificate(
        float(thresholds[smallest]), "conformal" if delta is None else bound, float(alpha)
    )


def _smallest_mean_alpha(
    losses: NDArray[np.float64],
    delta: float | None,
    bound: Bound,
    certifies: Callable[[float], Callable[[NDArray[np.float64]], bool]],
) -> float | None:
    """Return the smallest alpha that losses certify; None if none below 1 is."""
    n, total = len(losses), math.fsum(losses)
    if delta is None:
        smallest = (total + 1) / (n + 1)
        return smallest if smallest < 1 else None
    if bound != "betting":
        smallest = mean_bound(total, n, delta, bound)
        step = math.ulp(smallest)
        while smallest < 1 and not certifies(smallest)(losses):
            smallest, step = smallest + step, 2 * step  # the inverse was rounded down
        return smallest if smallest < 1 else None
    low, high = min(total / n, 1.0), math.nextafter(1.0, 0.0)
    if not certifies(high)(losses):
        return None
    while high - low > 1e-9:  # the bet depends on alpha: there is no closed form
        middle = (low + high) / 2
        low, high = (low, middle) if certifies(middle)(losses) else (middle, high)
    return high


@dataclass(frozen=True, eq=False)
class _MatchLosses:
    """Losses at the thresholds at which some set gains a true match.

    Bisections at several levels need the losses at the same few thresholds: each is computed once.
    """

    risk: Risk
    scored: ScoredResults
    _computed: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    @cached_property
    def thresholds(self) -> NDArray[np.float32]:
        """The thresholds, ascending."""
        return self.scored.match_thresholds()

    def at(self, index: int) -> NDArray[np.float64]:
        """(units,) losses at a threshold."""
        if index not in self._computed:
            threshold = self.thresholds[index : index + 1]
            self._computed[index] = self.risk.unit_losses(self.scored, threshold)[:, 0]
        return self._computed[index]


def _bet(
    tuned: _MatchLosses, alpha: float, delta: float, n: int, weights: NDArray[np.float64] | None
) -> float:
    """Return the fraction of the wealth to bet on every loss of n units.

    The bet of Waudby-Smith and Ramdas (JRSS-B 2024, eq. 26) for the variance that the tuning split
    has where its mean loss is about alpha. One bet for every threshold and unit keeps the wealth
    monotone in the threshold. Weighted losses have different means. The product of independent
    factors is at most the corresponding power of their mean (inequality of arithmetic and geometric
    means), so that the mean of all is what is tested.
    """
    last = len(tuned.thresholds) - 1
    chosen = bisect_left(range(last), True, key=lambda i: tuned.at(i).mean() <= alpha)
    spread = tuned.at(chosen)
    # A split without any variance does not prove that there is none: one unit of 1/4 is added.
    variance = (float(spread.var()) * len(spread) + 0.25) / (len(spread) + 1)
    largest = 1.0
    if weights is not None:
        variance *= float((weights**2).mean())
        largest = max(1.0, float(weights.max()))
    return min(1.0 / largest, math.sqrt(2 * math.log(1 / delta) / (n * variance)))


# Other mixes of groups


def any_mix(
    request: Request,
    calibration: ScoredResults,
    tuning: ScoredResults | None = None,
    bound: Bound = "binomial",
) -> Certificate:
    """Certify a request for every mix of the groups.

    Each group is certified at its share of delta, and the largest threshold serves all of them. If
    the queries come in clusters, each must hold queries of one group: a mean over clusters does not
    bound the risk of a group whose share in a cluster depends on how hard the cluster is.

    The groups must be fixed before the queries are drawn; for `anytime`, before the first one is.

    Raises:
        InvalidConfig: the calibration queries have no groups, or a cluster holds several.
        RiskUnattainable: a group cannot be certified.
    """
    population = calibration.population
    groups = population.group_names
    if not groups:
        raise InvalidConfig(
            f"{as_option('mix', 'any')} needs groups: none of the calibration queries has a group"
        )
    if mixed := population.n_mixed_clusters:
        remedy = "request every group alone (group)"
        if population.cluster_word != population.label_word:
            remedy = f"calibrate with such clusters, like the encounters at one site, or {remedy}"
        raise InvalidConfig(
            f"{mixed} of {population.n_units} {population.unit_word} "
            f"({population.cluster_word}) hold queries of several groups, and "
            f"{as_option('mix', 'any')} needs one group for each: {remedy}"
        )
    assert request.delta is not None
    share = request.delta / len(groups)
    certificates, refusals = _tried(
        partial(
            certify,
            replace(request, groups=Group(name), delta=share),
            calibration,
            tuning,
            bound,
        )
        for name in groups
    )
    if refusals:
        raise _all_refused(
            f"any mix of {len(groups)} groups, each at delta / {len(groups)}", refusals
        )
    return Certificate(
        max(one.threshold for one in certificates),
        certificates[0].bound,
        max(one.risk_bound or 0.0 for one in certificates),
        n_groups=len(groups),
    )


def group_weights(calibration: ScoredResults, mix: Mapping[str, float]) -> NDArray[np.float64]:
    """(n,) weights with mean 1 that give the groups of the calibration queries other shares.

    Raises:
        InvalidConfig: a group has no calibration queries.
    """
    for group in mix:
        calibration.population.in_group(group)  # raises with the groups that there are
    groups = np.asarray(calibration.population.groups)
    names, number, counts = np.unique(groups, return_inverse=True, return_counts=True)
    shares = np.array([mix.get(group, 0.0) for group in names.tolist()])
    weights: NDArray[np.float64] = (shares / counts)[number] * len(number)
    return weights


# Queries of new labels


def for_labels(
    request: Request,
    calibration: ScoredResults,
    tuning: ScoredResults | None = None,
    bound: Bound = "binomial",
) -> Certificate:
    """Certify a request for queries of new labels, or of both new and calibrated ones.

    Queries of labels that did not calibrate are not exchangeable with those that did, but labels
    are: if they are drawn independently of each other, the mean loss of the queries of a label is
    one draw, and the mean over labels is certified as that over clusters. The score function must
    not have been fitted on queries of the calibrating labels: it would know these labels and no
    others. For any mix of new and calibrated labels, both means have to be certified: each at half
    of delta where risks fall as sets grow, so that the larger sets satisfy both.

    Raises:
        InvalidConfig: the queries have no labels.
        RiskUnattainable: there are too few labels, or too few queries.
    """
    plain = replace(request, labels="calibrated")
    by_label = calibration.by_label()
    tuning_by_label = None if tuning is None else tuning.by_label()
    if request.labels == "new":
        return _mean_over_labels(plain, by_label, tuning_by_label, bound)
    if not request.monotone:
        assert request.delta is not None
        calibration = calibration.of_group(request.group)
        means = _bound_of_means(bound, by_label)
        return learn_then_test(
            request.levels, request.delta, calibration, _required(tuning), means, by_label=True
        )
    half = replace(plain, delta=None if request.delta is None else request.delta / 2)

    def calibrated_labels() -> Certificate:
        with _refused("queries of the calibrated labels"):
            return certify(half, calibration, tuning, bound)

    def new_labels() -> Certificate:
        with _refused("queries of new labels"):
            return _mean_over_labels(half, by_label, tuning_by_label, bound)

    certificates, refusals = _tried((calibrated_labels, new_labels))
    if refusals:
        # One kind may be certified at this alpha, but not at the one that the other kind needs.
        new = by_label.of_group(half.group)
        from_new = _certified_from(replace(half, groups="all"), new, tuning_by_label, bound)
        raise _all_refused("queries of any labels, each kind at half of delta", refusals, from_new)
    return replace(
        max(certificates, key=lambda one: one.threshold),
        bound=" and ".join(dict.fromkeys(one.bound for one in certificates)),
        risk_bound=max(one.risk_bound or 0.0 for one in certificates),
    )


def _mean_over_labels(
    request: Request,
    calibration: ScoredResults,
    tuning: ScoredResults | None,
    bound: Bound,
) -> Certificate:
    """Certify the mean over labels, by one query of each label or by all of them.

    One query of each label, drawn at random, is an independent draw from the queries of new labels:
    the exact certificate holds for these. It needs fewer labels than a bet on the means of labels,
    which in turn needs smaller sets where there are many. The tuning split says which is better at
    an alpha, before either sees the calibration queries. Labels are the clusters of both splits.
    """
    calibration = calibration.of_group(request.group)
    if request.group is not None:
        request = replace(request, groups="all")
    alpha, delta, risk = request.alpha, request.delta, request.risk
    if risk is not None and risk is not MISS and risk.exact:
        risk.check_losses(calibration)
    if tuning is None or not _has_two_bounds(request, bound):
        return certify(request, calibration, tuning, bound)
    assert delta is not None
    assert risk is not None
    assert not isinstance(alpha, Mapping)
    try:
        if not _one_of_each_is_better(
            alpha, delta, calibration.population.n_units, _MatchLosses(risk, tuning)
        ):
            return certify(request, calibration, tuning, bound)
        drawn = calibration[calibration.population.one_of_each_unit()]
        certificate = order_statistic(alpha, delta, drawn)
    except RiskUnattainable as refusal:
        lost = float(risk.unit_losses(calibration, calibration.match_thresholds()[-1:]).mean())
        raise _unattainable(
            alpha,
            delta,
            calibration,
            minimum_alpha=_certified_from(request, calibration, tuning, bound),
            required_calibration=refusal.required_calibration,
            lacking=None if risk.first_match else (risk.lacking, lost),
        ) from None
    return replace(certificate, bound="one-per-label binomial")


def _has_two_bounds(request: Request, bound: Bound) -> bool:
    """Return whether one query of each label can certify a request as well."""
    mixed = request.groups == "any mix" or isinstance(request.groups, Mix)
    exact = request.risk is not None and request.risk.exact
    return exact and request.delta is not None and not mixed and bound == "binomial"


def _one_of_each_is_better(alpha: float, delta: float, n: int, tuned: _MatchLosses) -> bool:
    """Return whether one query of each of n clusters needs smaller sets than a bet on their means.

    Both are compared on the tuning split, as if the clusters that calibrate had its losses, and at
    a multiple of `COMPARED`, so that the choice at every alpha is known. Where one query of each
    certifies nothing even without a miss, the bet certifies nothing either.
    """
    level = COMPARED * max(1, _cell(alpha))
    allowed = allowed_misses(n, level, delta)
    if allowed < 0:
        return True
    bet, wealth = _bet(tuned, level, delta, n, None), math.log(1 / delta) / n
    number = len(tuned.thresholds)

    def first(certifies: Callable[[NDArray[np.float64]], bool]) -> int:
        return bisect_left(range(number), True, key=lambda i: certifies(tuned.at(i)))

    by_bet = first(lambda losses: bool(np.log1p(bet * (level - losses)).mean() >= wealth))
    by_one = first(lambda losses: bool(losses.mean() <= (allowed + 1) / (n + 1)))
    return by_one < by_bet or by_bet == number


def _cell(alpha: float) -> int:
    """Return the number of multiples of `COMPARED`, above 0, that are at most alpha."""
    return int(alpha / COMPARED + 1e-9)


def _certified_from(
    request: Request,
    calibration: ScoredResults,
    tuning: ScoredResults | None,
    bound: Bound,
) -> float | None:
    """Return an alpha from which on `_mean_over_labels` certifies every alpha; None if none.

    Each bound certifies all alphas from its smallest on; between both, the choice decides.
    """

    def smallest(certified: Callable[[float], Certificate]) -> float:
        try:
            certified(math.ulp(0.5))
        except RiskUnattainable as refusal:
            return refusal.minimum_alpha or 1.0
        return 0.0

    delta = request.delta
    by_bet = smallest(
        lambda alpha: certify(
            replace(request, levels=dict.fromkeys(request.levels, alpha)),
            calibration,
            tuning,
            bound,
        )
    )
    risk = request.risk
    if tuning is None or delta is None or risk is None or not _has_two_bounds(request, bound):
        return by_bet if by_bet < 1 else None
    drawn = calibration[calibration.population.one_of_each_unit()]
    by_one = smallest(lambda alpha: order_statistic(alpha, delta, drawn))
    least, most = sorted([by_one, by_bet])
    tuned = _MatchLosses(risk, tuning)
    for cell in range(_cell(least), min(_cell(most) + 1, _cell(1.0))):
        better = _one_of_each_is_better(
            COMPARED * cell, delta, calibration.population.n_units, tuned
        )
        first = by_one if better else by_bet
        if first > COMPARED * cell:
            least = max(least, min(first, COMPARED * (cell + 1)))
    return least if least < 1 else None


# Refusals


def _tried(
    certified: Iterable[Callable[[], Certificate]],
) -> tuple[list[Certificate], list[RiskUnattainable]]:
    """Return the certificates that are needed together, and the errors of those refused."""
    certificates, refusals = [], []
    for certificate in certified:
        try:
            certificates.append(certificate())
        except RiskUnattainable as error:
            refusals.append(error)
    return certificates, refusals


def _deeper(calibration: ScoredResults, lacking: tuple[str, float] | None) -> str | None:
    """Return the advice to search deeper; None if no query has further matches there."""
    unmatched = np.isinf(calibration.match_score)
    totals, relevant = calibration.n_relevant, calibration.relevant
    if totals is None or relevant is None:  # it is not known how many matches there are
        beyond, where = unmatched, "have no match among them"
    else:
        beyond, where = totals > np.count_nonzero(relevant, axis=1), "have matches beyond them"
        if lacking is None:  # the other matches of a query make no difference
            beyond, where = beyond & unmatched, "have their first match beyond them"
    if not beyond.any():
        return None
    first = (
        f"allow more than {calibration.depth} items in a set"
        if calibration.is_cut
        else f"search deeper than {calibration.depth} candidates "
        f"({as_option('depth', 2 * calibration.depth)} in a new calibration)"
    )
    number = f"{np.count_nonzero(beyond)} of {len(calibration)} calibration queries {where}"
    if lacking is None:
        return f"{first} ({number})"
    return f"{first} (a share {lacking[1]:.4f} of the {lacking[0]} is not among them; {number})"


def _without_match(calibration: ScoredResults) -> str | None:
    """State how many queries have no match in the gallery; None if all have some."""
    totals = calibration.n_relevant
    if totals is None or (totals > 0).all():
        return None
    return (
        f"{np.count_nonzero(totals == 0)} of {len(calibration)} calibration queries have no match "
        "anywhere in the gallery, so that no depth and no size of their sets is enough"
    )


def _all_refused(
    subject: str, refusals: Sequence[RiskUnattainable], least: float | None = 0.0
) -> RiskUnattainable:
    """Return one error for certificates of a subject that are needed together.

    The others are certified from the alpha `least` on; None if from none.
    """
    smallest = [least, *(error.minimum_alpha for error in refusals)]
    required = [error.required_calibration for error in refusals]
    minimum = None if None in smallest else max(filter(None, smallest))
    if minimum is not None and minimum == least:
        subject += f", which alpha >= {_rounded_up(least):.4f} certifies together"
    return RiskUnattainable(
        f"{subject}: {'; '.join(map(str, refusals))}",
        minimum_alpha=minimum,
        required_calibration=None if None in required else max(filter(None, required)),
    )


def _rounded_up(alpha: float) -> float:
    """Return an alpha with the four digits that errors state."""
    return math.ceil(alpha * 1e4) / 1e4


def _required_queries(alpha: float, delta: float | None, bound: Bound, lost: float) -> int | None:
    """Return the calibration queries needed if no set prevents the share `lost` of the loss."""
    if bound == "betting" and delta is not None:
        if lost >= alpha:
            return None
        # The best bet on losses of 0 and 1 with mean `lost`, but at most 1, see `_bet`.
        bet = min(1.0, (alpha - lost) / (alpha * (1 - alpha)))
        gain = (1 - lost) * math.log1p(bet * alpha) + lost * math.log1p(bet * (alpha - 1))
        return math.ceil(math.log(1 / delta) / gain)
    if delta is not None:
        return bounds.required_calibration(alpha, delta, bound, lost)
    level = Fraction(check_level("alpha", alpha))
    return None if lost >= alpha else math.ceil((1 - level) / (level - Fraction(lost)))


def _unattainable(
    alpha: float,
    delta: float | None,
    calibration: ScoredResults,
    *,
    minimum_alpha: float | None,
    required_calibration: int | None,
    lacking: tuple[str, float] | None = None,
) -> RiskUnattainable:
    """Return the error that states what could be certified instead.

    `lacking` is what the largest sets lack, and the share of it; None if only the first match of a
    query counts.
    """
    advice, n, unit = [], calibration.population.n_units, calibration.population.unit_word
    rounded = _rounded_up(minimum_alpha or 1)
    if rounded < 1:
        advice.append(f"ask for alpha >= {rounded:.4f} (chosen after looking: on new queries)")
    if required_calibration is not None and required_calibration > n:
        advice.append(
            f"calibrate on about {required_calibration} new {unit}"
            if unit in ("queries", "clusters")
            else f"calibrate on queries of about {required_calibration - n} more {unit}"
        )
    if deeper := _deeper(calibration, lacking):
        advice.append(deeper)
    absent = _without_match(calibration)
    if not advice:
        advice.append(
            "put matches of the queries into the gallery"
            if absent
            else f"ask for a larger alpha and calibrate on more {unit}"
        )
    of = "calibration" if unit == "queries" else f"{unit} of calibration"
    at = "on average" if delta is None else f"at delta = {float(delta):g}"
    return RiskUnattainable(
        f"alpha = {float(alpha):g} {at} cannot be certified with {n} {of} queries: "
        f"{', or '.join(advice)}{f'. {absent}' if absent else ''}",
        minimum_alpha=minimum_alpha,
        required_calibration=required_calibration,
    )
