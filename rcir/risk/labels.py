"""Certification for queries of new labels, or of both new and calibrated ones.

Queries of labels that did not calibrate are not exchangeable with those that did, but labels are:
if they are drawn independently of each other, the mean loss of the queries of a label is one draw,
and the mean over labels is certified as that over clusters. The score function must not have been
fitted on queries of the calibrating labels: it would know these labels and no others.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rcir.errors import RiskUnattainable
from rcir.risk.bounds import Bound, Certificate, allowed_misses
from rcir.risk.exact import minimum_alpha, order_statistic
from rcir.risk.groups import bound_of_means, certify_groups
from rcir.risk.means import MatchLosses, constant_bet, require_tuning
from rcir.risk.refusals import joint_refusal, refusal, refused, try_all
from rcir.risk.request import Request
from rcir.risk.results import ScoredResults
from rcir.risk.testing import learn_then_test

CELL = 0.005  # the two bounds of means over labels are compared at multiples of it


def certify_labels(
    request: Request, calibration: ScoredResults, tuning: ScoredResults | None, bound: Bound
) -> Certificate:
    """Certify a request for queries of new or of any labels, see `rcir.risk.certify`.

    For any mix of new and calibrated labels, both means have to be certified: each at half of delta
    where risks fall as sets grow, so that the larger sets satisfy both.

    Raises:
        InvalidConfig: the queries have no labels.
    """
    of_labels = calibration.by_label()
    tuning_of_labels = None if tuning is None else tuning.by_label()
    if request.labels == "new":
        return _MeanOverLabels.make(request, of_labels, tuning_of_labels, bound).certify()
    if not request.monotone:
        assert request.delta is not None  # a request without delta has one monotone risk
        return learn_then_test(
            request.levels,
            request.delta,
            calibration.of_group(request.group),
            require_tuning(tuning),
            bound_of_means(bound, of_labels),
            by_label=True,
        )
    delta = None if request.delta is None else request.delta / 2
    half = replace(request, labels="calibrated", delta=delta)
    new = _MeanOverLabels.make(half, of_labels, tuning_of_labels, bound)

    def calibrated_labels() -> Certificate:
        with refused("queries of the calibrated labels"):
            return certify_groups(half, calibration, tuning, bound)

    def new_labels() -> Certificate:
        with refused("queries of new labels"):
            return new.certify()

    certificates, refusals = try_all((calibrated_labels, new_labels))
    if refusals:
        # One kind may be certified at this alpha, but not at the one that the other kind needs.
        least = new.minimum_alpha
        raise joint_refusal("queries of any labels, each kind at half of delta", refusals, least)
    return replace(
        max(certificates, key=lambda certificate: certificate.threshold),
        bound=" and ".join(dict.fromkeys(certificate.bound for certificate in certificates)),
        risk_bound=max(certificate.risk_bound or 0.0 for certificate in certificates),
    )


@dataclass(frozen=True, eq=False)
class _MeanOverLabels:
    """A request for the mean over labels, which are the clusters of both splits.

    Certified by one query of each label or by all of them. One query of each label, drawn at
    random, is an independent draw from the queries of new labels: the exact certificate holds for
    these. It needs fewer labels than a bet on the means of labels, which in turn needs smaller sets
    where there are many. The tuning split says which is better at an alpha, before either sees the
    calibration queries.
    """

    request: Request
    calibration: ScoredResults
    tuning: ScoredResults | None
    bound: Bound

    @classmethod
    def make(
        cls,
        request: Request,
        calibration: ScoredResults,
        tuning: ScoredResults | None,
        bound: Bound,
    ) -> _MeanOverLabels:
        """Return it for the queries of the group that a request names, if it names one."""
        if request.group is not None:
            calibration = calibration.of_group(request.group)
            request = replace(request, groups="all")
        return cls(replace(request, labels="calibrated"), calibration, tuning, bound)

    @cached_property
    def _choice(self) -> _ChoiceOfBounds | None:
        """The comparison of the two bounds; None if one query of each label cannot certify this."""
        risk, delta, tuning = self.request.risk, self.request.delta, self.tuning
        if risk is None or delta is None or tuning is None or not risk.exact:
            return None
        if self.request.groups != "all" or self.bound != "binomial":
            return None
        return _ChoiceOfBounds(
            delta, self.calibration.population.n_units, MatchLosses(risk, tuning)
        )

    @cached_property
    def _one_of_each(self) -> ScoredResults:
        """One query of each label."""
        return self.calibration[self.calibration.population.one_of_each_unit()]

    def certify(self) -> Certificate:
        """Certify the request."""
        request, risk = self.request, self.request.risk
        if self._choice is None or risk is None:
            return self._certify_by_all(request)
        (alpha,) = request.levels.values()
        try:
            if not self._choice.is_one_of_each_better(alpha):
                return self._certify_by_all(request)
            risk.check_losses(self.calibration)
            certificate = order_statistic(alpha, request.delta, self._one_of_each)
        except RiskUnattainable as error:
            raise refusal(
                alpha,
                request.delta,
                self.calibration,
                minimum_alpha=self.minimum_alpha,
                required_calibration=error.required_calibration,
            ) from None
        return replace(certificate, bound="one-per-label binomial")

    def _certify_by_all(self, request: Request) -> Certificate:
        return certify_groups(request, self.calibration, self.tuning, self.bound)

    @cached_property
    def minimum_alpha(self) -> float | None:
        """An alpha of one risk from which on every alpha is certified; None if none is.

        Each bound certifies all alphas from its smallest on; between both, the choice decides.
        """
        request = self.request
        tiny = replace(request, levels=dict.fromkeys(request.levels, math.ulp(0.5)))
        try:
            self._certify_by_all(tiny)
            by_all = 0.0
        except RiskUnattainable as error:
            by_all = error.minimum_alpha or 1.0
        if self._choice is None:
            return by_all if by_all < 1 else None
        by_one = minimum_alpha(request.delta, self._one_of_each) or 1.0
        least, most = sorted([by_one, by_all])
        for cell in range(_cell(least), min(_cell(most) + 1, _cell(1.0))):
            one_is_better = self._choice.is_one_of_each_better(CELL * cell)
            first = by_one if one_is_better else by_all
            if first > CELL * cell:
                least = max(least, min(first, CELL * (cell + 1)))
        return least if least < 1 else None


@dataclass(frozen=True, eq=False)
class _ChoiceOfBounds:
    """Compares a bet on the means of n labels with one query of each of them.

    Both are compared on the tuning split, as if the labels that calibrate had its losses, and at a
    multiple of `CELL`, so that the choice at every alpha is known.
    """

    delta: float
    n: int
    tuned: MatchLosses

    def is_one_of_each_better(self, alpha: float) -> bool:
        """Return True if one query of each label needs smaller sets.

        Where one query of each certifies nothing even without a miss, the bet certifies nothing
        either.
        """
        level = CELL * max(1, _cell(alpha))
        allowed = allowed_misses(self.n, level, self.delta)
        if allowed < 0:
            return True
        bet = constant_bet(self.tuned, level, self.delta, self.n)
        wealth = math.log(1 / self.delta) / self.n
        number = len(self.tuned.thresholds)

        def first(certifies: Callable[[NDArray[np.float64]], bool]) -> int:
            return bisect_left(range(number), True, key=lambda i: certifies(self.tuned.at(i)))

        by_bet = first(lambda losses: bool(np.log1p(bet * (level - losses)).mean() >= wealth))
        by_one = first(lambda losses: bool(losses.mean() <= (allowed + 1) / (self.n + 1)))
        return by_one < by_bet or by_bet == number


def _cell(alpha: float) -> int:
    """Return the number of multiples of `CELL`, above 0, that are at most alpha."""
    return int(alpha / CELL + 1e-9)
