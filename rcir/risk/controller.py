"""The risk controller: every request, decided from one set of calibration queries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk.bounds import Bound, check_bound
from rcir.risk.guarantee import Guarantee
from rcir.risk.joint import JointController
from rcir.risk.labelled import LabelledResults
from rcir.risk.miss_controller import MissController
from rcir.risk.mixes import certify_any_mix, mix_weights
from rcir.risk.monotone import MonotoneController
from rcir.risk.request import Request
from rcir.risk.risks import Risk
from rcir.risk.score_functions import Constant, ScoreFunction
from rcir.risk.search_results import SearchResults

MOST_KEPT = 1000  # decisions, with what they are made from


class RiskController:
    """Everything that tuning split and calibration queries support, by request.

    Attributes:
        score_function: fitted on the tuning split.
        tuning, calibration: the tuning split and the calibration queries, scored here unless they
            are.
        bound: of the miss risk; the others take "hoeffding-bentkus" where it is "binomial", and
            queries in clusters "betting".
        own: risks whose sets are chosen by a score function of their own, with their controllers.
        growing: whether calibration queries were added one by one; then every request has to be
            `anytime`.

    Example:
        >>> from rcir.risk import Constant, SearchResults
        >>> relevant = np.array([[True, False]] * 900 + [[False, True]] * 100)
        >>> queries = SearchResults(np.zeros(1000), depth=2)
        >>> labelled = LabelledResults.of(queries, relevant, totals=np.ones(1000, int))
        >>> controller = RiskController(Constant(), labelled[::2], labelled[1::2])
        >>> [controller.decide(Request(alpha, delta=0.1)).threshold for alpha in (0.05, 0.15)]
        [1.0, 0.0]
    """

    def __init__(
        self,
        score_function: ScoreFunction,
        tuning: LabelledResults,
        calibration: LabelledResults,
        bound: Bound = "binomial",
        own: Mapping[str, RiskController] | None = None,
        growing: bool = False,
    ) -> None:
        check_bound(bound)
        if tuning.depth != calibration.depth:
            raise InvalidData("tuning split and calibration queries were searched to other depths")
        self.score_function = score_function
        self.tuning = tuning.scored(score_function)
        self.calibration = calibration.scored(score_function)
        self.bound: Bound = bound
        self.own: dict[str, RiskController] = dict(own or {})
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
        return self.calibration.depth

    @property
    def groups(self) -> NDArray[np.str_] | None:
        """(n,) the group of each calibration query, if they have groups."""
        return self.calibration.groups

    @property
    def cluster(self) -> str | None:
        """The kind of cluster, such as "video", that queries come in; None if independent."""
        return self.calibration.cluster

    def for_risk(self, request: Request) -> RiskController:
        """The controller in charge of a request: that of the risk's own score function, or this
        one.
        """
        if isinstance(request.alpha, Mapping):
            return self
        return self.own.get(request.risk, self)

    def miss(self, group: str | None = None) -> MissController:
        """The exact controller of the miss risk, for one group or all independent queries."""
        return self.once(  # type: ignore[no-any-return]
            ("miss", group),
            lambda: MissController(
                self.score_function, self.queries(group).scores, self.depth, self.bound
            ),
        )

    def decide(self, request: Request) -> Guarantee:
        """Certify a request.

        Raises:
            InvalidRiskLevel, InvalidConfig: of the request.
            RiskUnattainable: nothing does.
        """
        if self.growing and not request.anytime:
            raise InvalidConfig(
                "calibration queries were added one by one, so that a guarantee has to hold at "
                "every moment: ask with anytime=True"
            )
        try:
            hash(request)
        except TypeError:  # several levels, or the shares of a mix
            return self._decide(request)
        if len(self._made) > MOST_KEPT:  # whoever sweeps over alpha asks for each once
            self._made.clear()
        return self.once(request, lambda: self._decide(request))  # type: ignore[no-any-return]

    def _decide(self, request: Request) -> Guarantee:
        if request.max_size is not None and request.max_size < self.depth:
            return self._decide_cut(request, request.max_size)
        if request.mix == "any":
            return certify_any_mix(self, request)
        try:
            if isinstance(request.alpha, Mapping):
                return self.certify_jointly(request)
            return request.one_risk.certify(self, request)
        except RiskUnattainable as error:
            if request.group is None:
                raise
            raise RiskUnattainable(
                f"group {request.group!r}: {error}",
                minimum_alpha=error.minimum_alpha,
                required_calibration=error.required_calibration,
            ) from None

    def _decide_cut(self, request: Request, size: int) -> Guarantee:
        """Certify sets of at most `size` candidates.

        Candidates beyond have an infinite score before anything is certified. If sets were cut
        afterwards, the calibration queries whose match is beyond would count as served.
        """
        cut: RiskController = self.once(
            ("max_size", size),
            lambda: RiskController(
                self.score_function,
                _cut(self.tuning, size),
                _cut(self.calibration, size),
                self.bound,
                growing=self.growing,
            ),
        )
        try:
            return replace(cut.decide(replace(request, max_size=None)), request=request)
        except RiskUnattainable as error:
            raise RiskUnattainable(
                f"sets of at most {size} items (a larger max_size allows more): {error}",
                minimum_alpha=error.minimum_alpha,
                required_calibration=error.required_calibration,
            ) from None

    def guarantee(
        self,
        request: Request,
        threshold: float,
        bound: str,
        risk_bound: float | None,
        selection_threshold: float | None = None,
    ) -> Guarantee:
        """The guarantee of what certifies a request, see the attributes of `Guarantee`."""
        queries = self.queries(request.group)
        return Guarantee(
            request=request,
            threshold=threshold,
            bound=bound,
            score_function=self.score_function.name,
            n_calibration=len(queries),
            risk_bound=risk_bound,
            selection_threshold=selection_threshold,
            cluster=self.cluster,
            n_clusters=None if self.cluster is None else queries.units,
        )

    def certify_jointly(self, request: Request) -> Guarantee:
        """Certify several risks at once, or one that need not fall: Learn Then Test."""
        alpha, group = request.alpha, request.group
        alphas = alpha if isinstance(alpha, Mapping) else {request.risk: alpha}
        joint = self.once(
            ("joint", group),
            lambda: JointController(self.queries(group), self.tuning, self._of_means),
        )
        level = None if isinstance(alpha, Mapping) else float(alpha)
        threshold = joint.threshold(alphas, request.delta)
        names = dict.fromkeys(joint.bound_of(risk) for risk in alphas)
        return self.guarantee(request, threshold, " and ".join(names), level)

    def certify_mean(self, risk: Risk, request: Request) -> Guarantee:
        """Certify a risk that falls as sets grow, of losses anywhere in [0, 1]."""
        if request.simultaneous or request.anytime:
            raise InvalidConfig(
                f"queries come in clusters ({self.cluster}): neither simultaneous nor anytime "
                "guarantees are to be had of them"
            )
        weights = None if request.mix is None else mix_weights(self, dict(request.mix))  # type: ignore[arg-type]
        exact = risk.binary and self.cluster is None and weights is None
        mean = self.once(
            (risk.name, request.group, None if weights is None else weights.tobytes()),
            lambda: MonotoneController(
                self.queries(request.group),
                self.tuning,
                risk.name,
                self.bound if exact else self._of_means,
                weights,
            ),
        )
        alpha = float(request.alpha)  # type: ignore[arg-type]
        bound = "conformal" if request.delta is None else mean.bound
        return self.guarantee(request, mean.threshold(alpha, request.delta), bound, alpha)

    def sets(
        self, results: SearchResults, guarantee: Guarantee
    ) -> tuple[SearchResults, NDArray[np.int64]]:
        """Queries that were searched as deep, with the candidates of their sets in order, and (n,)
        how many of these each set holds: 0 for a query that is not answered.
        """
        if results.depth != self.depth:
            raise InvalidData(
                f"the queries were searched to depth {results.depth}, the calibration queries to "
                f"{self.depth}: search alike"
            )
        score_function, limit = self.score_function, guarantee.selection_threshold
        most = score_function.most(guarantee.threshold) if limit is None else 1
        ordered, _ = score_function.ordered(results, int(min(most, results.depth)))
        if limit is None:
            sizes = score_function.sizes(ordered, guarantee.threshold)
            return ordered, np.minimum(sizes, guarantee.request.max_size or results.depth)
        return ordered, (score_function.selection_score(ordered, 1) <= limit).astype(np.int64)

    @property
    def _of_means(self) -> Bound:
        """The bound of losses in between 0 and 1."""
        if self.bound != "binomial":
            return self.bound
        return "hoeffding-bentkus" if self.cluster is None else "betting"

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Make what a key stands for, once: the same few controllers are asked for again."""
        made = self._made.get(key)
        if made is None:  # found by one look-up: another thread may forget what is kept
            made = self._made[key] = make()
        return made

    def known_groups(self) -> list[str]:
        """The groups that calibration queries have."""
        return [] if self.groups is None else sorted(set(self.groups.tolist()))

    def queries(self, group: str | None) -> LabelledResults:
        """The calibration queries of a group."""
        if group is None:
            return self.calibration
        known = self.known_groups()
        if self.groups is None or group not in known:
            raise InvalidConfig(
                f"group {group!r} has no calibration queries; "
                + (f"there are {', '.join(map(repr, known))}" if known else "none have a group")
            )
        return self.calibration[self.groups == group]


def _cut(results: LabelledResults, size: int) -> LabelledResults:
    """Return scored results of which the first `size` candidates are all there are."""
    scores = results.known("candidate_scores")
    return replace(
        results,
        depth=size,
        candidate_scores=np.ascontiguousarray(scores[:, :size]),
        relevant=np.ascontiguousarray(results.relevant[:, :size]),
    )


def constant_baseline(
    score_function: ScoreFunction,
    tuning: LabelledResults,
    calibration: LabelledResults,
    bound: Bound = "binomial",
) -> RiskController:
    """Return the controller that gives every query the same set size: what adaptive sets save.

    It takes the candidates in the order of `score_function`. Where that order has one image of
    each label first, the baseline takes one image of each label too, so that the comparison shows
    what it is worth to adapt the size, not what it is worth to leave out further images of a label.
    `sets` expects test queries in that order as well (`score_function.ordered`).

    Args:
        score_function: fitted, of the sets to compare with.
        tuning, calibration: the searched splits, not scored yet.
        bound: of the miss risk, see `RiskController`.

    Example:
        >>> from rcir.risk import Quantile
        >>> relevant = np.array([[True, False]] * 900 + [[False, True]] * 100)
        >>> queries = SearchResults(np.linspace(0, 1, 1000), depth=2)
        >>> labelled = LabelledResults.of(queries, relevant, totals=np.ones(1000, int))
        >>> fitted = Quantile.fit(labelled[::2], labelled[::2].ranks)
        >>> baseline = constant_baseline(fitted, labelled[::2], labelled[1::2])
        >>> guarantee = baseline.decide(Request(0.05, delta=0.1))
        >>> set(baseline.sets(labelled, guarantee)[1].tolist())
        {2}
    """
    ordered = [score_function.ordered(split)[0] for split in (tuning, calibration)]
    return RiskController(Constant(), ordered[0], ordered[1], bound)


def _digest(score_function: ScoreFunction) -> bytes:
    """Of the numbers of a score function."""
    digest = hashlib.blake2b(score_function.name.encode())
    for name, values in sorted(score_function.state().items()):
        digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
    return digest.digest()
