"""Requests: which guarantee is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from rcir.errors import InvalidConfig
from rcir.risk.bounds import check_level
from rcir.risk.risks import RISKS, Risk, find_risk

Alpha = float | Mapping[str, float]
Mix = Literal["any"] | Mapping[str, float] | None
DEFAULT = "miss"


@dataclass(frozen=True)
class Request:
    """A guarantee that is asked for.

    Attributes:
        alpha: the level of `risk`, or several risks with their levels, that hold together.
        delta: probability of misleading calibration queries; None for the marginal guarantee.
        risk: the name of one of `rcir.risk.RISKS`; with several in `alpha`, leave it.
        group: speak of the queries of this group only.
        abstain: answer with one candidate, or not at all; the risk is that of the answers.
        simultaneous: hold for all alpha at once.
        anytime: hold at every moment since calibration began.
        mix: hold whatever the mix of the groups ("any"), or for one in which each group has this
            share of the queries; the groups that are not named have none.
    """

    alpha: Alpha
    delta: float | None
    risk: str = DEFAULT
    group: str | None = None
    abstain: bool = False
    simultaneous: bool = False
    anytime: bool = False
    mix: Mix = None

    def __post_init__(self) -> None:
        if isinstance(self.alpha, Mapping) and len(self.alpha) == 1 and self.risk == DEFAULT:
            ((risk, alpha),) = self.alpha.items()
            object.__setattr__(self, "risk", risk)
            object.__setattr__(self, "alpha", alpha)
        find_risk(self.risk)
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
        if several and (self.risk != DEFAULT or self.abstain):
            raise InvalidConfig("alpha names several risks: leave risk and abstain as they are")
        one = find_risk(self.risk, self.abstain)
        for name in ("simultaneous", "anytime"):
            if getattr(self, name) and (several or not one.exact):
                exact = " or ".join(each.name for each in RISKS.values() if each.exact)
                raise InvalidConfig(f"{name}=True is for the {exact} risk alone, of all answers")
        if self.simultaneous and self.anytime:
            raise InvalidConfig("simultaneous=True and anytime=True exclude each other: take one")
        falls = one.falls and not several
        if self.delta is None and not (falls and not self.anytime and self.mix is None):
            raise InvalidConfig(f"delta=None is for the {_falling()} risk alone: give a delta")
        if self.mix is not None:
            self._check_mix(falls)

    def _check_mix(self, falls: bool) -> None:
        if not falls or self.group is not None:
            raise InvalidConfig(f"mix is for the {_falling()} risk, of all answers and groups")
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

    @property
    def one_risk(self) -> Risk:
        """The risk that is asked for, where it is one."""
        return find_risk(self.risk, self.abstain)


def _falling() -> str:
    return " or the ".join(risk.name for risk in RISKS.values() if risk.falls)
