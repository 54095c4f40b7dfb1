"""Requests to a calibration, and decisions on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from rcir.errors import InvalidConfig
from rcir.risk.bounds import check_level
from rcir.risk.outcomes import Risk, check_risk

Alpha = float | Mapping[Risk, float]
Mix = Literal["any"] | Mapping[str, float] | None


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
        anytime: hold at every moment since calibration began.
        mix: hold whatever the mix of the groups ("any"), or for one in which each group has this
            share of the queries; the groups that are not named have none.
    """

    alpha: Alpha
    delta: float | None
    risk: Risk = "miss"
    group: str | None = None
    abstain: bool = False
    simultaneous: bool = False
    anytime: bool = False
    mix: Mix = None

    def __post_init__(self) -> None:
        if isinstance(self.alpha, Mapping) and len(self.alpha) == 1 and self.risk == "miss":
            ((risk, alpha),) = self.alpha.items()
            object.__setattr__(self, "risk", risk)
            object.__setattr__(self, "alpha", alpha)
        check_risk(self.risk)
        if not isinstance(self.group, str | None):
            raise InvalidConfig(f"group is {self.group!r}; it must be a string or None")
        for name in ("abstain", "simultaneous", "anytime"):
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
        for name in ("simultaneous", "anytime"):
            if getattr(self, name) and (several or self.risk != "miss" or self.abstain):
                raise InvalidConfig(f"{name}=True is for the miss risk alone, of all answers")
        if self.simultaneous and self.anytime:
            raise InvalidConfig("simultaneous=True and anytime=True exclude each other: take one")
        if self.delta is None and (
            several
            or self.risk == "false-discovery"
            or self.abstain
            or self.anytime
            or self.mix is not None
        ):
            raise InvalidConfig("delta=None is for the miss or the recall risk alone: give a delta")
        if self.mix is not None:
            self._check_mix(several)

    def _check_mix(self, several: bool) -> None:
        if several or self.risk == "false-discovery" or self.abstain or self.group is not None:
            raise InvalidConfig("mix is for the miss or the recall risk, of all answers and groups")
        if isinstance(self.mix, Mapping):
            if self.simultaneous or self.anytime:
                raise InvalidConfig("a mix of shares goes with neither simultaneous nor anytime")
            shares = list(self.mix.values())
            known = all(isinstance(share, Real) and 0 <= share <= 1 for share in shares)
            known = known and all(isinstance(group, str) for group in self.mix)
            if not known or abs(sum(shares) - 1) > 1e-6:
                raise InvalidConfig(
                    f"mix is {dict(self.mix)}; give the share of each group, 1 in all, or 'any'"
                )
        elif not (isinstance(self.mix, str) and self.mix == "any"):
            raise InvalidConfig(f"mix is {self.mix!r}; give 'any', or the share of each group")


@dataclass(frozen=True)
class Decision:
    """The certificate of a request.

    Attributes:
        threshold: ranks that cost at most this are in the set, up to
            `rcir.risk.score_functions.TOLERANCE`.
        selection_threshold: queries of greater selection score are not answered; None if all are.
        bound: what the certificate rests on.
        risk_bound: the risk that is certified in fact, at most alpha; None for several.
        n_calibration: number of calibration queries it rests on.
        n_clusters: number of the clusters that they come in; None where they are independent.
        n_groups: number of the groups of which any mix may come; None of all as they are.
    """

    threshold: float
    selection_threshold: float | None
    bound: str
    risk_bound: float | None
    n_calibration: int
    n_clusters: int | None = None
    n_groups: int | None = None
