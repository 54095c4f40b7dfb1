"""Risks that need not fall as sets grow, and several risks at once: Learn Then Test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.risk.bounds import Bound, check_level, p_values
from rcir.risk.labelled import LabelledResults
from rcir.risk.risks import find_risk
from rcir.risk.score_functions import widened
from rcir.risk.testing import bonferroni_holm, fixed_sequence

CANDIDATES = 256
Procedure = Literal["fixed-sequence", "bonferroni-holm"]


class JointController:
    """Set sizes for which every one of several risks is at most its alpha.

    Each of a few hundred thresholds is a hypothesis ("some risk is too large at this threshold"),
    refuted by p-values of the calibration queries (Angelopoulos et al., "Learn Then Test", 2021,
    theorem 1). Which thresholds there are and, for fixed-sequence testing, in which order they are
    tried comes from the tuning split: the most promising first. Of those certified, the smallest
        sets are
    taken; for risks that small sets satisfy best, such as that of false discoveries, the largest.

    Args:
        calibration: the calibration queries.
        tuning: other queries, of the tuning split.
        bound: of the mean losses, see `rcir.risk.p_value`; misses are bounded by the binomial.
        procedure: how the whole is kept at delta: "fixed-sequence" or "bonferroni-holm".

    Example:
        >>> from rcir.risk import Constant, SearchResults
        >>> relevant = np.array([[True, False, True]] * 900 + [[False, True, False]] * 100)
        >>> queries = SearchResults(np.zeros(1000), depth=3)
        >>> labelled = LabelledResults.of(queries, relevant, np.full(1000, 2)).scored(Constant())
        >>> halves = (labelled[slice(start, None, 2)] for start in (0, 1))
        >>> controller = JointController(*halves)
        >>> controller.threshold({"miss": 0.05, "false-discovery": 0.6}, delta=0.1)
        1.0
    """

    def __init__(
        self,
        calibration: LabelledResults,
        tuning: LabelledResults,
        bound: Bound = "hoeffding-bentkus",
        procedure: Procedure = "fixed-sequence",
    ) -> None:
        self.calibration, self.tuning = calibration, tuning
        self.bound: Bound = "hoeffding-bentkus" if bound == "binomial" else bound
        if procedure not in get_args(Procedure):
            choices = ", ".join(get_args(Procedure))
            raise InvalidConfig(f"procedure {procedure!r} is unknown; choose one of {choices}")
        self.procedure: Procedure = procedure
        self.thresholds = tuning.steps(CANDIDATES)
        self._totals: dict[tuple[bool, str], NDArray[np.float64]] = {}

    def threshold(self, alphas: Mapping[str, float], delta: float) -> float:
        """The threshold to use, certified for all risks together with probability 1 - delta.

        Args:
            alphas: for each risk to control, its level in (0, 1).
            delta: as in `MissController.threshold`.

        Raises:
            InvalidConfig: no risk, or one that does not exist.
            InvalidRiskLevel: a level outside (0, 1).
            RiskUnattainable: no threshold is certified.
        """
        if not alphas:
            raise InvalidConfig("there is no risk to control: give at least one with its alpha")
        for risk, alpha in alphas.items():
            find_risk(risk)
            check_level(f"alpha of {risk}", alpha)
        check_level("delta", delta)
        certified = self._certified(alphas, delta)
        if len(certified) == 0:
            raise self._unattainable(alphas, delta)
        largest = not any(find_risk(risk).falls for risk in alphas)
        return float(certified.max() if largest else certified.min())

    def bound_of(self, risk: str) -> Bound:
        """The bound of a risk: losses 0 or 1 of independent queries sum to whole numbers."""
        whole = find_risk(risk).binary and self.calibration.clusters is None
        return "binomial" if whole else self.bound

    def minimum_alpha(self, risk: str, delta: float) -> float | None:
        """The smallest alpha at which some threshold is certified for one risk; to 4 decimals."""
        low, high = 0, 10_000
        while high - low > 1:
            middle = (low + high) // 2
            if len(self._certified({risk: middle / 10_000}, delta)):
                high = middle
            else:
                low = middle
        return high / 10_000 if high < 10_000 else None

    def _certified(self, alphas: Mapping[str, float], delta: float) -> NDArray[np.float32]:
        values = self._p_values(self.calibration, alphas)
        if self.procedure == "bonferroni-holm":
            return self.thresholds[bonferroni_holm(values, delta)]
        order = np.argsort(self._p_values(self.tuning, alphas), kind="stable")
        return self.thresholds[order[fixed_sequence(values[order], delta)]]

    def _p_values(
        self, labelled: LabelledResults, alphas: Mapping[str, float]
    ) -> NDArray[np.float64]:
        """(g,) for each threshold, of the hypothesis that some risk is above its alpha there."""
        each = [
            p_values(self._sums(labelled, risk), labelled.units, alpha, self.bound_of(risk))
            for risk, alpha in alphas.items()
        ]
        return np.max(each, axis=0)  # type: ignore[no-any-return]

    def _sums(self, labelled: LabelledResults, risk: str) -> NDArray[np.float64]:
        """(g,) summed losses at each threshold; computed once."""
        key = (labelled is self.tuning, risk)
        if key not in self._totals:
            # Of the sets that these thresholds give, which `set_sizes` allows a tolerance.
            self._totals[key] = (
                find_risk(risk).unit_losses(labelled, widened(self.thresholds)).sum(axis=0)
            )
        return self._totals[key]

    def _unattainable(self, alphas: Mapping[str, float], delta: float) -> RiskUnattainable:
        attainable = {risk: self.minimum_alpha(risk, delta) for risk in alphas}
        asked = ", ".join(f"{risk} {alpha:g}" for risk, alpha in alphas.items())
        alone = ", ".join(f"{risk} {alpha or 1:.4f}" for risk, alpha in attainable.items())
        each = ", each alone" if len(alphas) > 1 else ""
        return RiskUnattainable(
            f"{asked} at delta = {delta:g} cannot be certified with {len(self.calibration)} "
            f"calibration queries: ask for more (the smallest alpha that can be certified{each}: "
            f"{alone}), or calibrate on more queries",
            minimum_alpha=next(iter(attainable.values())) if len(alphas) == 1 else None,
            required_calibration=None,
        )
