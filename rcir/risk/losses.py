"""Risks: the loss of one query, and the words for its mean.

A risk is data. Which procedure certifies it follows from its attributes, see
`rcir.risk.certify`. To add one, define a `Risk` and put it in the table at the end of this file; a
program that uses rcir calls `register_risk`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, as_option
from rcir.risk.results import ScoredResults, Thresholds

Losses = Callable[[ScoredResults, Thresholds], NDArray[np.float64]]

N_CHECKED = 64  # thresholds at which the losses of a risk are checked
ROUNDING = 1e-9  # by which a loss may rise


@dataclass(frozen=True, kw_only=True)
class Risk:
    """The mean, over queries, of a loss of the set that a query gets.

    Attributes:
        name: the name by which it is requested.
        losses: returns (n, g) losses in [0, 1] of scored results at g ascending thresholds.
        clause: of the sentence of a guarantee, a format of {alpha}, {sets}, {matches} (true ones)
            and {items} (of a set).
        sets: the word for what is returned.
        lacking: what the sets lack where the loss is large, in words.
        monotone: True if no loss rises as sets grow. Then the smallest certified sets are returned,
            otherwise the largest.
        binary: True if every loss is 0 or 1.
        first_match: True if the loss is 1 as long as the set does not hold the first true match,
            and 0 from then on. Such a risk is certified exactly, also for all alphas at once
            (`simultaneous`) and at every moment (`anytime`).
        abstains: True if it is the risk among the queries that are answered.
        is_miss_for_one_match: True if it equals the miss risk for queries with one true match.
        levels: alphas at which score functions are compared; None for the usual ones.

    Example:
        >>> def lacks_two(scored, thresholds):
        ...     return (scored.n_within(thresholds, scored.relevant) < 2).astype(float)
        >>> fewer_than_two = Risk(
        ...     name="fewer-than-two",
        ...     losses=lacks_two,
        ...     clause="fewer than two true {matches} are in at most {alpha} of the {sets}",
        ...     binary=True,
        ... )
        >>> fewer_than_two.key
        'fewer-than-two'
    """

    name: str
    losses: Losses
    clause: str
    sets: str = "sets"
    lacking: str = "true matches"
    monotone: bool = True
    binary: bool = False
    first_match: bool = False
    abstains: bool = False
    is_miss_for_one_match: bool = False
    levels: Sequence[float] | None = (0.1, 0.2, 0.3, 0.5)

    @property
    def key(self) -> str:
        """The name, which says whether it abstains."""
        return f"{self.name}, abstaining" if self.abstains else self.name

    @property
    def exact(self) -> bool:
        """True if the order statistics of the match scores certify it."""
        return self.first_match and self.monotone and not self.abstains

    def query_losses(self, scored: ScoredResults, thresholds: Thresholds) -> NDArray[np.float64]:
        """(n, g) loss of each query, or `InvalidData` unless in [0, 1], and 0 or 1 if binary."""
        losses = np.asarray(self.losses(scored, thresholds), np.float64)
        if losses.shape != (len(scored), len(thresholds)):
            raise InvalidData(
                f"losses of the {self.name} risk have shape {losses.shape}; expected "
                f"{(len(scored), len(thresholds))}"
            )
        valid = (losses == 0) | (losses == 1) if self.binary else (losses >= 0) & (losses <= 1)
        if not valid.all():
            allowed = "0 or 1" if self.binary else "in [0, 1]"
            raise InvalidData(
                f"a loss of the {self.name} risk is {losses[~valid][0]}; losses must be {allowed}"
            )
        return losses

    def unit_losses(self, scored: ScoredResults, thresholds: Thresholds) -> NDArray[np.float64]:
        """(units, g) loss of each query, or mean loss of each cluster of queries."""
        return scored.population.unit_means(self.query_losses(scored, thresholds))

    def check_losses(self, scored: ScoredResults) -> None:
        """Raise `InvalidData` unless the losses are what the attributes say.

        A certificate evaluates few thresholds, and infers the losses at the others. They are
        checked at a grid of thresholds; those of the miss risk need no check.
        """
        if self.losses is miss_losses:
            return
        thresholds = scored.size_thresholds(N_CHECKED)
        losses = self.query_losses(scored, thresholds)
        if self.monotone and (np.diff(losses, axis=1) > ROUNDING).any():
            raise InvalidData(
                f"a loss of the {self.name} risk rises as the set grows, but the risk is declared "
                "monotone: register it with monotone=False"
            )
        if self.first_match and (losses != miss_losses(scored, thresholds)).any():
            raise InvalidData(
                f"a loss of the {self.name} risk is not 1 up to the first true match and 0 from "
                "then on, but the risk is declared so: register it with first_match=False"
            )

    def fits_own_scores(self, n_relevant: NDArray[np.int64]) -> bool:
        """Return True if a score function of its own may give smaller sets than that of misses.

        The (n,) numbers of true matches are of the tuning split: the calibration queries must not
        influence this.
        """
        if self.first_match:
            return False
        return not self.is_miss_for_one_match or bool(n_relevant.max() > 1)


def miss_losses(scored: ScoredResults, thresholds: Thresholds) -> NDArray[np.float64]:
    """(n, g) 1 if the set holds no true match, else 0."""
    return (scored.match_score[:, None] > thresholds.astype(np.float32)).astype(np.float64)


def recall_losses(scored: ScoredResults, thresholds: Thresholds) -> NDArray[np.float64]:
    """(n, g) share of the gallery's true matches that the set lacks; 1 if the gallery has none."""
    matches = scored.n_within(thresholds, scored.require("relevant"))
    n_relevant = scored.require("n_relevant")
    return 1 - matches / np.maximum(n_relevant, 1)[:, None]


def false_discovery_losses(scored: ScoredResults, thresholds: Thresholds) -> NDArray[np.float64]:
    """(n, g) share of the set that is not a true match."""
    right = scored.n_within(thresholds, scored.require("relevant"))
    candidates = scored.n_within(thresholds, np.isfinite(scored.require("scores")))
    return 1 - right / candidates


MISS = Risk(
    name="miss",
    losses=miss_losses,
    clause="a true match is missing from at most {alpha} of the {sets}",
    lacking="queries' matches",
    binary=True,
    first_match=True,
    levels=None,
)
# The answer is the first candidate. This risk need not fall as more queries are answered.
ABSTENTION = replace(MISS, sets="answers", monotone=False, abstains=True)
RECALL = Risk(
    name="recall",
    losses=recall_losses,
    clause="at most {alpha} of a query's true {matches}, on average over queries, are missing from "
    "the {sets}",
    is_miss_for_one_match=True,
)
# Small sets satisfy it best: of the certified sets, the largest are returned.
FALSE_DISCOVERY = Risk(
    name="false-discovery",
    losses=false_discovery_losses,
    clause="at most {alpha} of a set's {items}, on average over queries, are wrong in the {sets}",
    monotone=False,
    levels=(0.1, 0.2, 0.3, 0.5, 0.7),
)

_table = {risk.key: risk for risk in (MISS, ABSTENTION, RECALL, FALSE_DISCOVERY)}
RISKS: Mapping[str, Risk] = MappingProxyType(_table)  # read-only; `register_risk` adds to it


def register_risk(risk: Risk) -> None:
    """Add a risk of your own to `RISKS`, so that it can be requested by its name.

    Requests come from anywhere, so that they name risks and cannot import them. Register a risk
    before calibrating, for a score function of its own to be chosen.

    Raises:
        InvalidConfig: it is not a `Risk`, its name is unsuitable or taken by another one, or it
            abstains, which only the miss risk can.
    """
    if not isinstance(risk, Risk):
        raise InvalidConfig(f"got a {type(risk).__name__}: pass an instance of rcir.risk.Risk")
    valid = isinstance(risk.name, str) and re.fullmatch(r"[a-z][a-z0-9-]*", risk.name)
    if not valid:
        raise InvalidConfig(
            f"the name of a risk is {risk.name!r}; use lower-case letters, digits and hyphens"
        )
    if risk.abstains or (risk.first_match and not risk.binary):
        raise InvalidConfig(
            f"risk {risk.name!r} abstains, or is decided by the first match without being binary: "
            "only the miss risk abstains, and losses that a first match decides are 0 or 1"
        )
    if _table.setdefault(risk.key, risk) is not risk:
        raise InvalidConfig(f"risk {risk.key!r} exists already: choose another name")


def risk_names() -> list[str]:
    """Return the names that a request may give."""
    return list(dict.fromkeys(risk.name for risk in RISKS.values()))


def find_risk(name: str, abstain: bool = False) -> Risk:
    """Return the risk of a name, of all answers or among those of an abstaining retriever.

    Raises:
        InvalidConfig: there is no such risk.

    Example:
        >>> find_risk("recall").monotone, find_risk("false-discovery").monotone
        (True, False)
        >>> find_risk("precision")
        Traceback (most recent call last):
            ...
        rcir.errors.InvalidConfig: risk 'precision' is unknown; choose one of miss, recall, ...
    """
    names = risk_names()
    if not isinstance(name, str) or name not in names:
        raise InvalidConfig(f"risk {name!r} is unknown; choose one of {', '.join(names)}")
    for risk in RISKS.values():
        if (risk.name, risk.abstains) == (name, abstain):
            return risk
    possible = " or ".join(risk.name for risk in RISKS.values() if risk.abstains)
    raise InvalidConfig(
        f"{as_option('abstain')} limits the {possible} risk among answers, not {name}"
    )
