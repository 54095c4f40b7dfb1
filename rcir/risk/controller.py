"""All statements that one set of calibration queries supports."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk.abstention import AbstentionController, Answered
from rcir.risk.bounds import Bound, check_bound
from rcir.risk.joint import JointController
from rcir.risk.miss import MissController
from rcir.risk.monotone import MonotoneController
from rcir.risk.outcomes import Outcomes, Risk
from rcir.risk.rankings import Rankings
from rcir.risk.request import Decision, Request
from rcir.risk.score_functions import ScoreFunction


class RiskController:
    """Everything that tuning split and calibration queries support, by request.

    Attributes:
        score_function: fitted on the tuning split.
        tuning, calibration: outcomes of the tuning split and of the calibration queries.
        bound: of the miss risk; the others take "hoeffding-bentkus" where it is "binomial", and
            queries in clusters "betting".
        groups: (n,) the group of each calibration query, or None.
        cluster: what the clusters of the calibration queries are, such as "video"; None where
            queries are independent.
        own: risks whose sets are chosen by a score function of their own, with their controllers.
        growing: whether calibration queries were added one by one; then every request has to be
            `anytime`.

    Example:
        >>> from rcir.risk import Constant, Rankings
        >>> relevant = np.array([[True, False]] * 900 + [[False, True]] * 100)
        >>> queries = Rankings(np.zeros(1000), depth=2)
        >>> outcomes = Outcomes.of(Constant(), queries, relevant, np.ones(1000, int))
        >>> halves = (outcomes.subset(slice(start, None, 2)) for start in (0, 1))
        >>> controller = RiskController(Constant(), *halves)
        >>> [controller.decide(Request(alpha, delta=0.1)).threshold for alpha in (0.05, 0.15)]
        [1.0, 0.0]
    """

    def __init__(
        self,
        score_function: ScoreFunction,
        tuning: Outcomes,
        calibration: Outcomes,
        bound: Bound = "binomial",
        groups: NDArray[np.str_] | None = None,
        cluster: str | None = None,
        own: Mapping[Risk, RiskController] | None = None,
        growing: bool = False,
    ) -> None:
        check_bound(bound)
        if tuning.candidate_scores.shape[1] != calibration.candidate_scores.shape[1]:
            raise InvalidData("tuning split and calibration queries were searched to other depths")
        if groups is not None and groups.shape != (len(calibration),):
            raise InvalidData(f"{len(calibration)} calibration queries, groups {groups.shape}")
        if (cluster is None) != (calibration.clusters is None):
            raise InvalidData("name what the clusters of the queries are, if they have any")
        self.score_function = score_function
        self.tuning, self.calibration = tuning, calibration
        self.bound: Bound = bound
        self.groups = groups
        self.cluster = cluster
        self.own: dict[Risk, RiskController] = dict(own or {})
        self.growing = growing
        self._made: dict[Any, Any] = {}
        self._sealed = (bound, _digest(score_function))

    @property
    def intact(self) -> bool:
        """Whether bound and score function are, in their numbers, what this was made with."""
        return (self.bound, _digest(self.score_function)) == self._sealed

    @property
    def depth(self) -> int:
        """Number of candidates that were searched."""
        return int(self.calibration.candidate_scores.shape[1])

    def for_risk(self, request: Request) -> RiskController:
        """The controller in charge of a request: that of the risk's own score function, or this
        one.
        """
        if isinstance(request.alpha, Mapping):
            return self
        return self.own.get(request.risk, self)

    def miss(self, group: str | None = None) -> MissController:
        """The exact controller of the miss risk, for one group or all independent queries."""
        return self._once(  # type: ignore[no-any-return]
            ("miss", group),
            lambda: MissController(
                self.score_function, self._outcomes(group).scores, self.depth, self.bound
            ),
        )

    def decide(self, request: Request) -> Decision:
        """What certifies the request.

        Raises:
            InvalidRiskLevel, InvalidConfig: of the request.
            RiskUnattainable: nothing does.
        """
        if self.growing and not request.anytime:
            raise InvalidConfig(
                "calibration queries were added one by one, so that a guarantee has to hold at "
                "every moment: ask with anytime=True"
            )
        if request.mix == "any":
            return self._of_any_mix(request)
        group = request.group
        try:
            decision = self._decide(request)
        except RiskUnattainable as error:
            if group is None:
                raise
            raise RiskUnattainable(
                f"group {group!r}: {error}",
                minimum_alpha=error.minimum_alpha,
                required_calibration=error.required_calibration,
            ) from None
        if self.cluster is None:
            return decision
        return replace(decision, n_clusters=self._outcomes(group).units)

    def _of_any_mix(self, request: Request) -> Decision:
        """The largest sets that a group needs, each at its part of delta, serve every mix."""
        groups = self._known_groups()
        if not groups:
            self._outcomes("")  # says that there are none
        delta = float(request.delta or 0) / len(groups)
        parts = [replace(request, mix=None, group=group, delta=delta) for group in groups]
        try:
            each = [self.decide(part) for part in parts]
        except RiskUnattainable as error:
            raise RiskUnattainable(
                f"any mix, for which each of {len(groups)} groups is certified at delta / "
                f"{len(groups)}: {error}",
                minimum_alpha=error.minimum_alpha,
                required_calibration=error.required_calibration,
            ) from None
        return replace(
            max(each, key=lambda decision: decision.threshold),
            risk_bound=max(decision.risk_bound or 0.0 for decision in each),
            n_calibration=len(self.calibration),
            n_clusters=None if self.cluster is None else self.calibration.units,
            n_groups=len(groups),
        )

    def _decide(self, request: Request) -> Decision:
        alpha, delta, group = request.alpha, request.delta, request.group
        n = len(self._outcomes(group))
        if isinstance(alpha, Mapping) or request.risk == "false-discovery":
            alphas = alpha if isinstance(alpha, Mapping) else {request.risk: alpha}
            joint = self._once(
                ("joint", group),
                lambda: JointController(self._outcomes(group), self.tuning, self._of_means),
            )
            level = None if isinstance(alpha, Mapping) else float(alpha)
            threshold = joint.threshold(alphas, delta)
            names = dict.fromkeys(joint.bound_of(risk) for risk in alphas)
            return Decision(threshold, None, " and ".join(names), level, n)
        if request.abstain:
            threshold = self._abstention(group).threshold(alpha, float(delta or 0))
            return Decision(0.0, threshold, "binomial", float(alpha), n)
        if request.risk == "recall" or self.cluster is not None or request.mix is not None:
            return self._of_mean(request, n)
        miss = self.miss(group)
        modes = {"simultaneous": request.simultaneous, "anytime": request.anytime}
        bound: str = "conformal" if delta is None else self.bound
        bound = "band" if request.simultaneous else "anytime" if request.anytime else bound
        threshold, certified = (
            miss.threshold(alpha, delta, **modes),
            miss.risk_bound(alpha, delta, **modes),
        )
        return Decision(threshold, None, bound, certified, n)

    def _of_mean(self, request: Request, n: int) -> Decision:
        """Of losses in between 0 and 1: recall, clusters of queries, another mix of groups."""
        if request.simultaneous or request.anytime:
            raise InvalidConfig(
                f"queries come in clusters ({self.cluster}): neither simultaneous nor anytime "
                "guarantees are to be had of them"
            )
        weights = None if request.mix is None else self._weights(dict(request.mix))  # type: ignore[arg-type]
        mean = self._once(
            (request.risk, request.group, None if weights is None else weights.tobytes()),
            lambda: MonotoneController(
                self._outcomes(request.group), self.tuning, request.risk, self._of_means, weights
            ),
        )
        alpha = float(request.alpha)  # type: ignore[arg-type]
        bound = "conformal" if request.delta is None else mean.bound
        return Decision(mean.threshold(alpha, request.delta), None, bound, alpha, n)

    def sizes(self, rankings: Rankings, decision: Decision) -> NDArray[np.int64]:
        """(n,) set sizes of queries that were searched as deep; 0 for those not answered."""
        if rankings.depth != self.depth:
            raise InvalidData(
                f"the queries were searched to depth {rankings.depth}, the calibration queries to "
                f"{self.depth}: search alike"
            )
        if decision.selection_threshold is not None:
            selection_score = self.score_function.selection_score(rankings, size=1)
            return (selection_score <= decision.selection_threshold).astype(np.int64)
        return self.score_function.sizes(rankings, decision.threshold)

    @property
    def _of_means(self) -> Bound:
        """The bound of losses in between 0 and 1."""
        if self.bound != "binomial":
            return self.bound
        return "hoeffding-bentkus" if self.cluster is None else "betting"

    def _abstention(self, group: str | None) -> AbstentionController:
        if self.cluster is not None:
            raise InvalidConfig(
                f"queries come in clusters ({self.cluster}): abstain=True needs independent queries"
            )
        return self._once(  # type: ignore[no-any-return]
            ("abstention", group),
            lambda: AbstentionController(
                *(
                    Answered(outcomes.selection_score, ~outcomes.relevant[:, 0])
                    for outcomes in (self._outcomes(group), self.tuning)
                )
            ),
        )

    def _weights(self, mix: Mapping[str, float]) -> NDArray[np.float64]:
        """(n,) of mean 1, with which the calibration queries have a mix of groups."""
        if self.cluster is not None:
            raise InvalidConfig(f"queries come in clusters ({self.cluster}): mix can be 'any' only")
        for group in mix:
            self._outcomes(group)  # says which there are if this is none of them
        groups = np.asarray(self.groups)
        known, which, counts = np.unique(groups, return_inverse=True, return_counts=True)
        shares = np.array([mix.get(group, 0.0) for group in known.tolist()])
        weights: NDArray[np.float64] = (shares / counts)[which] * len(which)
        return weights

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """A controller, made once: the same few are asked for again."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _known_groups(self) -> list[str]:
        return [] if self.groups is None else sorted(set(self.groups.tolist()))

    def _outcomes(self, group: str | None) -> Outcomes:
        """The calibration queries of a group."""
        if group is None:
            return self.calibration
        known = self._known_groups()
        if self.groups is None or group not in known:
            raise InvalidConfig(
                f"group {group!r} has no calibration queries; "
                + (f"there are {', '.join(map(repr, known))}" if known else "none have a group")
            )
        return self.calibration.subset(self.groups == group)


def _digest(score_function: ScoreFunction) -> bytes:
    """Of the numbers of a score function."""
    digest = hashlib.blake2b(score_function.name.encode())
    for name, values in sorted(score_function.state().items()):
        digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
    return digest.digest()
