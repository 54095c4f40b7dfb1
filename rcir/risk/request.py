"""Requests: what a guarantee must cover, made from keywords and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Unpack, get_type_hints

import numpy as np

from rcir.errors import InvalidConfig, as_option
from rcir.options import ALPHA, DELTA, require_at_least, require_kinds
from rcir.risk.bounds import Holds, check_level
from rcir.risk.losses import MISS, RISKS, Risk, find_risk
from rcir.risk.options import (
    DEFAULTS,
    OPTION_KINDS,
    Alpha,
    Balance,
    CountedQueries,
    Distinct,
    Key,
    QueryLabels,
    RequestKeywords,
    RequestOptions,
    Together,
)


@dataclass(frozen=True)
class Group:
    """The queries of one group."""

    name: str


@dataclass(frozen=True)
class Mix:
    """Queries of which each group has a given share, 1 in all."""

    shares: Mapping[str, float]

    def __post_init__(self) -> None:
        shares = list(self.shares.values())
        if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
            raise InvalidConfig(
                f"mix is {dict(self.shares)}; give the share of each group, 1 in all, or 'any'"
            )
        object.__setattr__(self, "shares", dict(self.shares))

    def __hash__(self) -> int:
        return hash(frozenset(self.shares.items()))


Groups = Literal["all", "any mix"] | Group | Mix


@dataclass(frozen=True, kw_only=True)
class Request:
    """A guarantee that is requested; `make_request` makes it from keywords.

    Attributes:
        levels: alpha of each risk, in (0, 1), at least one.
        delta: probability, in (0, 1), that the guarantee fails; None for one on average.
        groups: the groups of queries that it covers.
        labels: the labels of queries that it covers.
        holds: when it holds.
        abstain: True to return the first candidate, or none.
        distinct: what sets hold one item of each of.
        max_size: of a set.
        counted: the queries that alpha counts; "matchable" with `beta`.
        beta: share, in (0, 1), of the queries without a match in the gallery that may get a set;
            None if sets are never empty.
        balance: "uncertainty" if it holds in each quarter of the uncertainty.
        key: the part of the gallery that queries are searched in, or that of each query.
        together: True if all pictures are one query; or the name of the encounter of each.

    Raises:
        InvalidRiskLevel: alpha, beta or delta is not a number strictly between 0 and 1.
        InvalidConfig: a risk is unknown, or attributes exclude each other.
    """

    levels: Mapping[str, float]
    delta: float | None
    groups: Groups = "all"
    labels: QueryLabels = "calibrated"
    holds: Holds = "once"
    abstain: bool = False
    distinct: Distinct = None
    max_size: int | None = None
    counted: CountedQueries = "all"
    beta: float | None = None
    balance: Balance = None
    key: Key = None
    together: Together = False

    def __post_init__(self) -> None:
        kinds = {name: kind for name, kind in _kinds().items() if name not in ("levels", "delta")}
        require_kinds("request", kinds, {name: getattr(self, name) for name in kinds})
        for name in ("key", "together"):  # a list cannot be hashed
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if not self.levels or (self.abstain and len(self.levels) > 1):
            raise InvalidConfig(
                f"levels are {dict(self.levels)}: give a level of one risk, or of several without "
                "abstain"
            )
        levels = {}
        for name, alpha in self.levels.items():
            find_risk(name)
            levels[name] = check_level(
                "alpha" if len(self.levels) == 1 else f"alpha of {name}", alpha
            )
        object.__setattr__(self, "levels", levels)
        if self.delta is not None:
            object.__setattr__(self, "delta", check_level("delta", self.delta))
        if self.max_size is not None:
            object.__setattr__(self, "max_size", int(self.max_size))
            require_at_least(self, max_size=1)
        if self.beta is not None:
            object.__setattr__(self, "beta", check_level("beta", self.beta))
            object.__setattr__(self, "counted", "matchable")
        if reason := _contradiction(self):
            raise InvalidConfig(reason)

    def __hash__(self) -> int:
        values = self.delta, self.groups, self.labels, self.holds, self.abstain, self.distinct
        counted = self.max_size, self.counted, self.beta, self.balance, self.key, self.together
        return hash((frozenset(self.levels.items()), *values, *counted))

    @property
    def risk(self) -> Risk | None:
        """The risk; None for several."""
        name, *others = self.levels
        return None if others else find_risk(name, self.abstain)

    @property
    def alpha(self) -> Alpha:
        """The level of the risk; of several risks, each by its name."""
        return dict(self.levels) if len(self.levels) > 1 else next(iter(self.levels.values()))

    @property
    def group(self) -> str | None:
        """The name of the group that it covers; None if it covers others."""
        return self.groups.name if isinstance(self.groups, Group) else None

    @property
    def monotone(self) -> bool:
        """True for one risk that falls as sets grow."""
        return self.risk is not None and self.risk.monotone

    @property
    def promised(self) -> Request:
        """The request without what describes its queries: equal for one guarantee."""
        return replace(self, key=None, together=False)

    def to_keywords(self) -> RequestKeywords:
        """Return the keywords that make this request."""
        mix: Literal["any"] | Mapping[str, float] | None = None
        if isinstance(self.groups, Mix):
            mix = {name: float(share) for name, share in self.groups.shares.items()}
        elif self.groups == "any mix":
            mix = "any"
        return {
            "alpha": self.alpha,
            "delta": self.delta,
            "risk": MISS.name if self.risk is None else self.risk.name,
            "distinct": self.distinct,
            "group": self.group,
            "abstain": self.abstain,
            "simultaneous": self.holds == "for all alphas",
            "anytime": self.holds == "at every moment",
            "mix": mix,
            "max_size": self.max_size,
            "query_labels": self.labels,
            "counted": self.counted,
            "beta": self.beta,
            "balance": self.balance,
            "key": self.key,
            "together": self.together,
        }


_kinds = cache(lambda: get_type_hints(Request))


def make_request(
    alpha: Alpha = ALPHA, delta: float | None = DELTA, **options: Unpack[RequestOptions]
) -> Request:
    """Return the request that keywords make.

    Args:
        alpha, delta: levels; alpha may also be a mapping of risks to levels.
        options: see `request_options`.

    Raises:
        InvalidRiskLevel: alpha or delta is not a number strictly between 0 and 1.
        InvalidConfig: there is no such option, it has no such value, or options exclude each other.

    Example:
        >>> make_request(0.1, 0.1, risk="recall", mix="any").groups
        'any mix'
    """
    for name in ("key", "together"):
        if hasattr(values := options.get(name), "tolist"):  # an array or a column
            names = np.asarray(values).tolist()
            options[name] = list(map(str, names)) if isinstance(names, list) else names
    require_kinds("request", OPTION_KINDS, options)
    options = {**DEFAULTS, **options}
    find_risk(options["risk"])
    levels = alpha if isinstance(alpha, Mapping) else {options["risk"]: alpha}
    if not levels:
        raise InvalidConfig("alpha names no risk: give a level, or risks with levels")
    if levels is alpha and options["risk"] != MISS.name:
        raise InvalidConfig("alpha names the risks itself: leave out risk")
    mix, group = options["mix"], options["group"]
    groups: Groups = "all" if group is None else Group(group)
    if mix is not None:
        if group is not None:
            raise InvalidConfig("group and mix exclude each other: choose one")
        groups = "any mix" if isinstance(mix, str) else Mix(mix)
    holds: Holds = "for all alphas" if options["simultaneous"] else "once"
    if options["anytime"]:
        if options["simultaneous"]:
            flags = as_option("simultaneous"), as_option("anytime")
            raise InvalidConfig(f"{' and '.join(flags)} exclude each other: choose one")
        holds = "at every moment"
    return Request(
        levels=levels,
        delta=delta,
        groups=groups,
        labels=options["query_labels"],
        holds=holds,
        abstain=options["abstain"],
        distinct=options["distinct"],
        max_size=options["max_size"],
        counted=options["counted"],
        beta=options["beta"],
        balance=options["balance"],
        key=options["key"],
        together=options["together"],
    )


def _contradiction(request: Request) -> str | None:
    """Return which attributes of a request exclude each other, None if none do."""
    one_risk, once = request.risk, request.holds == "once"
    mixed = request.groups == "any mix" or isinstance(request.groups, Mix)
    names = " or the ".join(risk.name for risk in RISKS.values() if risk.monotone)
    option = as_option("simultaneous" if request.holds == "for all alphas" else "anytime")
    if not once and (one_risk is None or not one_risk.exact):
        exact = " or ".join(risk.name for risk in RISKS.values() if risk.exact)
        return f"{option} is for the {exact} risk alone, of all answers"
    if request.delta is None and (not request.monotone or not once or mixed):
        return (
            f"{as_option('delta', None)} is for the {names} risk without simultaneous, anytime and "
            f"mix: give a delta, such as {DELTA}"
        )
    if mixed and not request.monotone:
        return f"mix is for the {names} risk, of all answers and groups"
    if isinstance(request.groups, Mix) and not once:
        return "a mix of shares goes with neither simultaneous nor anytime"
    for name, value in (("beta", request.beta), ("balance", request.balance)):
        if value is not None and (reason := _why_not_together(request)):
            return f"{as_option(name, value)} {reason}"
    if request.balance is not None and (request.beta is not None or mixed):
        return f"{as_option('balance', request.balance)} goes with neither beta nor mix"
    if request.counted == "matchable" and request.holds == "at every moment":
        return (
            f"{as_option('counted', 'matchable')} does not go with anytime: queries that are added "
            "as misses may have a match"
        )
    if request.counted == "matchable" and isinstance(request.groups, Mix):
        return (
            f"{as_option('counted', 'matchable')} goes with mix = 'any' alone: shares of groups "
            "differ between queries with and without a match"
        )
    if request.labels != "calibrated":
        counted = f"{as_option('query_labels', request.labels)} counts labels"
        return _needs_independent_queries(request, counted)
    return None


def _why_not_together(request: Request) -> str | None:
    """Return why a request is impossible with beta or balance, None if it is possible."""
    if not request.monotone:
        return "goes with one risk that falls as sets grow, of all answers: miss or recall"
    if request.delta is None:
        return f"needs a delta: give one, such as {DELTA}"
    if request.holds != "once":
        return "needs levels that are fixed beforehand: leave out simultaneous and anytime"
    if isinstance(request.groups, Mix):
        return "goes with all queries, with one group, or with mix = 'any'"
    if request.labels != "calibrated":
        return f"needs {as_option('query_labels', 'calibrated')}"
    return None


def _needs_independent_queries(request: Request, counted: str) -> str | None:
    """Return why a request is impossible for queries that are not counted one by one."""
    dependent = {
        "simultaneous": request.holds == "for all alphas",
        "anytime": request.holds == "at every moment",
        "abstain": request.abstain,
    }
    for name, is_requested in dependent.items():
        if is_requested:
            return f"{counted}: {as_option(name)} needs independent queries"
    if isinstance(request.groups, Mix):
        return f"{counted}: mix can be 'any' only"
    return None


def conflict(request: Request, cluster: str | None, sequential: bool = False) -> str | None:
    """Return why a request is impossible for a calibration, None if it is possible.

    `cluster` names the clusters of its queries, None if they are independent; `sequential` is True
    if queries were added one by one.
    """
    new_labels = as_option("query_labels", request.labels)
    if cluster is not None:
        clustered = f"queries come in clusters ({cluster})"
        if request.labels != "calibrated":
            return f"{clustered}: {new_labels} needs independent ones"
        if reason := _needs_independent_queries(request, clustered):
            return reason
    if sequential and request.labels != "calibrated":
        return (
            "calibration queries were added one by one, and labels are not counted at every "
            f"moment: calibrate again for {new_labels}"
        )
    for name, value in (("beta", request.beta), ("balance", request.balance)):
        if sequential and value is not None:
            return (
                "calibration queries were added one by one, so that a guarantee has to hold at "
                f"every moment: calibrate again for {as_option(name, value)}"
            )
    if sequential and request.holds != "at every moment":
        return (
            "calibration queries were added one by one, so that a guarantee has to hold at every "
            f"moment: request it with {as_option('anytime')}"
        )
    return None
