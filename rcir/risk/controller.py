"""All statements that one set of calibration queries supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk.abstention import AbstentionController, Answered
from rcir.risk.adapters import SizeAdapter
from rcir.risk.bounds import Bound, check_bound, check_level
from rcir.risk.joint import JointController
from rcir.risk.miss import MissController
from rcir.risk.outcomes import Outcomes, Risk, check_risk
from rcir.risk.rankings import Rankings
from rcir.risk.recall import RecallController

Alpha = float | Mapping[Risk, float]


@dataclass(frozen=True)
class Request:
    """A statement to certify.

    Attributes:
        alpha: the level of `risk`, or several risks with their levels, that hold together.
        delta: probability of misleading calibration queries; None for the marginal guarantee.
        risk: "miss", "recall" or "false-discovery"; with several in `alpha`, leave it.
        group: speak of the queries of this group only.
        abstain: answer with one candidate, or not at all; the risk is that of the answers.
        simultaneous: hold for all alpha at once.
    """

    alpha: Alpha
    delta: float | None
    risk: Risk = "miss"
    group: str | None = None
    abstain: bool = False
    simultaneous: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.alpha, Mapping) and len(self.alpha) == 1 and self.risk == "miss":
            ((risk, alpha),) = self.alpha.items()
            object.__setattr__(self, "risk", risk)
            object.__setattr__(self, "alpha", alpha)
        check_risk(self.risk)
        if not isinstance(self.group, str | None):
            raise InvalidConfig(f"group is {self.group!r}; it must be a string or None")
        for name in ("abstain", "simultaneous"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.alpha, Mapping):
            check_level("alpha", self.alpha)
        if self.delta is not None:
            check_level("delta", self.delta)
        several = isinstance(self.alpha, Mapping)
        if several and (self.risk != "miss" or self.abstain):
            raise InvalidConfig("alpha names several risks: leave risk and abstain as they are")
        if self.abstain and self.risk != "miss":
            raise InvalidConfig(f"abstain=True bounds misses among answers, not {self.risk}")
        if self.simultaneous and (several or self.risk != "miss" or self.abstain):
            raise InvalidConfig("simultaneous=True is for the miss risk alone, of all answers")
        if self.delta is None and (several or self.risk == "false-discovery" or self.abstain):
            raise InvalidConfig("delta=None is for the miss or the recall risk alone: give a delta")


@dataclass(frozen=True)
class Decision:
    """What certifies a request.

    Attributes:
        kappa: ranks that cost at most this are in the set.
        threshold: queries of greater doubt are not answered; None if all are.
        bound: what the certificate rests on.
        risk_bound: the risk that is certified in fact, at most alpha; None for several.
        n_calibration: number of calibration queries it rests on.
    """

    kappa: float
    threshold: float | None
    bound: str
    risk_bound: float | None
    n_calibration: int


class RiskController:
    """Everything that adapter split and calibration queries support, by request.

    Attributes:
        adapter: fitted on the adapter split.
        tuning, calibration: outcomes of the adapter split and of the calibration queries.
        bound: of the miss risk; the others take "hoeffding-bentkus" where it is "binomial".
        groups: (n,) the group of each calibration query, or None.

    Example:
        >>> from rcir.risk import Constant, Rankings
        >>> relevant = np.array([[True, False]] * 900 + [[False, True]] * 100)
        >>> queries = Rankings(np.zeros(1000), depth=2)
        >>> outcomes = Outcomes.of(Constant(), queries, relevant, np.ones(1000, int))
        >>> halves = (outcomes.subset(slice(start, None, 2)) for start in (0, 1))
        >>> controller = RiskController(Constant(), *halves)
        >>> [controller.decide(Request(alpha, delta=0.1)).kappa for alpha in (0.05, 0.15)]
        [1.0, 0.0]
    """

    def __init__(
        self,
        adapter: SizeAdapter,
        tuning: Outcomes,
        calibration: Outcomes,
        bound: Bound = "binomial",
        groups: NDArray[np.str_] | None = None,
    ) -> None:
        check_bound(bound)
        if tuning.costs.shape[1] != calibration.costs.shape[1]:
            raise InvalidData("adapter split and calibration queries were searched to other depths")
        if groups is not None and groups.shape != (len(calibration),):
            raise InvalidData(f"{len(calibration)} calibration queries, groups {groups.shape}")
        self.adapter = adapter
        self.tuning, self.calibration = tuning, calibration
        self.bound: Bound = bound
        self.groups = groups
        self._made: dict[tuple[Any, str | None], Any] = {}

    @property
    def depth(self) -> int:
        """Number of candidates that were searched."""
        return int(self.calibration.costs.shape[1])

    def miss(self, group: str | None = None) -> MissController:
        """The exact controller of the miss risk, for one group or all."""
        return self._made_once(MissController, group)  # type: ignore[no-any-return]

    def decide(self, request: Request) -> Decision:
        """What certifies the request.

        Raises:
            InvalidRiskLevel, InvalidConfig: of the request.
            RiskUnattainable: nothing does.
        """
        group = request.group
        try:
            return self._decide(request)
        except RiskUnattainable as error:
            if group is None:
                raise
            raise RiskUnattainable(
                f"group {group!r}: {error}",
                minimum_alpha=error.minimum_alpha,
                required_calibration=error.required_calibration,
            ) from None

    def _decide(self, request: Request) -> Decision:
        alpha, delta, group = request.alpha, request.delta, request.group
        n = self.miss(group).n_calibration
        if isinstance(alpha, Mapping) or request.risk == "false-discovery":
            alphas = alpha if isinstance(alpha, Mapping) else {request.risk: alpha}
            joint = self._made_once(JointController, group)
            level = None if isinstance(alpha, Mapping) else float(alpha)
            kappa = joint.kappa(alphas, delta)
            names = dict.fromkeys("binomial" if risk == "miss" else joint.bound for risk in alphas)
            return Decision(kappa, None, " and ".join(names), level, n)
        if request.abstain:
            threshold = self._made_once(AbstentionController, group).threshold(alpha, delta)
            return Decision(0.0, threshold, "binomial", float(alpha), n)
        if request.risk == "recall":
            recall = self._made_once(RecallController, group)
            bound = "conformal" if delta is None else recall.bound
            return Decision(recall.kappa(alpha, delta), None, bound, float(alpha), n)
        miss = self.miss(group)
        kappa = miss.kappa(alpha, delta, request.simultaneous)
        bound = "conformal" if delta is None else "dkw" if request.simultaneous else self.bound
        certified = miss.risk_bound(alpha, delta, request.simultaneous)
        return Decision(kappa, None, bound, certified, n)

    def sizes(self, rankings: Rankings, decision: Decision) -> NDArray[np.int64]:
        """(n,) set sizes of queries that were searched as deep; 0 for those not answered."""
        if rankings.depth != self.depth:
            raise InvalidData(
                f"the queries were searched to depth {rankings.depth}, the calibration queries to "
                f"{self.depth}: search alike"
            )
        if decision.threshold is not None:
            doubt = self.adapter.doubt(rankings, size=1)
            return (doubt <= decision.threshold).astype(np.int64)
        return self.adapter.sizes(rankings, decision.kappa)

    def _made_once(self, kind: Any, group: str | None) -> Any:
        """The controller of a kind and group, made once: the same few are asked for again."""
        if (kind, group) not in self._made:
            self._made[kind, group] = self._new(kind, self._outcomes(group))
        return self._made[kind, group]

    def _new(self, kind: Any, calibration: Outcomes) -> Any:
        if kind is MissController:
            return MissController(self.adapter, calibration.scores, self.depth, self.bound)
        if kind is AbstentionController:
            return AbstentionController(
                *(
                    Answered(outcomes.doubt, ~outcomes.relevant[:, 0])
                    for outcomes in (calibration, self.tuning)
                )
            )
        means: Bound = "hoeffding-bentkus" if self.bound == "binomial" else self.bound
        return kind(calibration, self.tuning, means)

    def _outcomes(self, group: str | None) -> Outcomes:
        """The calibration queries of a group."""
        if group is None:
            return self.calibration
        known = [] if self.groups is None else sorted(set(self.groups.tolist()))
        if self.groups is None or group not in known:
            raise InvalidConfig(
                f"group {group!r} has no calibration queries; "
                + (f"there are {', '.join(map(repr, known))}" if known else "none have a group")
            )
        return self.calibration.subset(self.groups == group)
