"""Requests: the only declaration of the options that a guarantee has.

The keyword arguments of `Retriever.retrieve`, the flags of `rcir retrieve`, the fields of HTTP
requests, the parameters of a logged MLflow model and the table in docs/guarantee.md derive from the
fields of `GuaranteeRequest`. To add an option, add a field to it; `conflict` says with which others
it can be combined, `rcir.risk.certification` and `rcir.risk.guarantee` what it changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rcir.errors import InvalidConfig, as_option
from rcir.options import ALPHA, DELTA
from rcir.risk.bounds import check_level
from rcir.risk.losses import RISKS, Risk, find_risk, risk_names
from rcir.risk.population import LABEL

Alpha = float | Mapping[str, float]
Distinct = Literal["label"] | None
Mix = Literal["any"] | Mapping[str, float] | None
QueryLabels = Literal["calibrated", "new", "any"]
DEFAULT = "miss"


def option(default: Any, help: str, choices: Callable[[], Sequence[str]] | None = None) -> Any:
    """Declare an option of a request.

    Args:
        default: its value if it is not requested.
        help: one sentence.
        choices: returns the values that it may have, if they are not in its type.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class GuaranteeRequest:
    """A guarantee that is requested.

    Args:
        alpha, delta, risk, ...: the options; `request_options` lists them with their meaning.

    Raises:
        InvalidRiskLevel: alpha or delta is not a number strictly between 0 and 1.
        InvalidConfig: another option has no such value, or options exclude each other.

    Example:
        >>> GuaranteeRequest(0.1, 0.1, abstain=True).one_risk.key
        'miss, abstaining'
    """

    alpha: Alpha = option(
        ALPHA,
        "Largest share of queries whose set may hold no true match; or several risks with a level "
        "each, which hold together.",
    )
    delta: float | None = option(
        DELTA,
        "Probability that the guarantee fails because of unluckily easy calibration queries; none: "
        "a guarantee on average over calibrations.",
    )
    risk: str = option(
        DEFAULT,
        "What alpha limits: sets without a true match (miss), the share of the true matches that a "
        "set lacks (recall), or the share of a set that is not a match (false-discovery).",
        choices=risk_names,
    )
    _: KW_ONLY
    distinct: Distinct = option(None, "Return one item of each label; sizes count labels.")
    group: str | None = option(
        None, "Cover the queries of this group, one of those that calibrated, instead of all."
    )
    abstain: bool = option(
        False, "Return one item, or none if it is too uncertain; alpha limits the wrong ones."
    )
    simultaneous: bool = option(
        False, "Hold for all alphas at once, so that alpha may be chosen after looking."
    )
    anytime: bool = option(
        False, "Hold at every moment while calibration queries are added one by one."
    )
    mix: Mix = option(
        None, "Hold for any mix of the groups, or for one in which each group has a given share."
    )
    max_size: int | None = option(
        None, "Return at most this many items; an alpha that needs more is refused."
    )
    query_labels: QueryLabels = option(
        "calibrated",
        "Cover queries of the labels that the calibration queries have (calibrated), of new labels "
        "drawn like these (new), or both (any).",
    )

    def __post_init__(self) -> None:
        if isinstance(self.alpha, Mapping) and len(self.alpha) == 1 and self.risk == DEFAULT:
            ((risk, alpha),) = self.alpha.items()
            object.__setattr__(self, "risk", risk)
            object.__setattr__(self, "alpha", alpha)
        find_risk(self.risk)
        if isinstance(self.alpha, Mapping):
            if not self.alpha:
                raise InvalidConfig("alpha names no risk: give a level, or risks with levels")
            for name, level in self.alpha.items():
                find_risk(name)
                check_level(f"alpha of {name}", level)
        else:
            object.__setattr__(self, "alpha", check_level("alpha", self.alpha))
        if self.delta is not None:
            object.__setattr__(self, "delta", check_level("delta", self.delta))
        if reason := _wrong_value(self) or conflict(self):
            raise InvalidConfig(reason)
        if self.max_size is not None:
            object.__setattr__(self, "max_size", int(self.max_size))
        for name in ("alpha", "mix"):
            if isinstance(getattr(self, name), Mapping):
                object.__setattr__(self, name, dict(getattr(self, name)))

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in fields(self))
        return hash(
            tuple(frozenset(one.items()) if isinstance(one, Mapping) else one for one in values)
        )

    @property
    def one_risk(self) -> Risk:
        """The risk, if there is one."""
        return find_risk(self.risk, self.abstain)

    @property
    def levels(self) -> Mapping[str, float]:
        """The alpha of each risk."""
        return self.alpha if isinstance(self.alpha, Mapping) else {self.risk: self.alpha}


Request = GuaranteeRequest  # a short name


@dataclass(frozen=True)
class RequestOption:
    """One option of a request.

    Attributes:
        name: as a keyword.
        kind: type of its scalar values: bool, int, float or str.
        choices: the values that it may have; empty if there are too many.
        default: its value if it is not requested.
        help: its meaning, in one sentence.
        table: whether it may also be numbers by name.
        nullable: whether None is a value other than the default.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    default: Any
    help: str
    table: bool
    nullable: bool

    def parse(self, words: Sequence[str]) -> Any:
        """Return the value that words of a command line state.

        Raises:
            InvalidConfig: they state none; the message says what is allowed.

        Example:
            >>> alpha, delta = request_options()[:2]
            >>> alpha.parse(["0.1"]), alpha.parse(["miss=0.1", "recall=0.3"]), delta.parse(["none"])
            (0.1, {'miss': 0.1, 'recall': 0.3}, None)
        """
        word, *more = words
        try:
            if self.table and (more or "=" in word):
                pairs = [each.rpartition("=") for each in words]
                table = {name: float(number) for name, _, number in pairs}
                if all(table) and len(table) == len(words):
                    return table
            elif self.nullable and word == "none":
                return None
            elif not self.choices or word in self.choices:
                return self.kind(word)
        except ValueError:
            pass
        kinds = {float: "a number", int: "a whole number", str: "a text"}
        allowed = " or ".join(self.choices) or kinds[self.kind]
        allowed += ", or none" * self.nullable
        allowed += ", or NAME=NUMBER for each of several different names" * self.table
        raise InvalidConfig(f"{' '.join(words)!r} is not a value of {self.name}: give {allowed}")


@cache
def _hints() -> dict[str, Any]:
    hints = get_type_hints(GuaranteeRequest)
    return {field.name: hints[field.name] for field in fields(GuaranteeRequest)}


def request_options() -> list[RequestOption]:
    """List the options of a request.

    Example:
        >>> [one.name for one in request_options()][:3]
        ['alpha', 'delta', 'risk']
    """
    options = []
    for field in fields(GuaranteeRequest):
        hint = _hints()[field.name]
        types = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
        literals = [value for each in types for value in get_args(each) if isinstance(value, str)]
        given = field.metadata["choices"]
        choices = tuple(given()) if given else tuple(literals)
        kind = next((each for each in types if each in (bool, int, float, str)), str)
        options.append(
            RequestOption(
                name=field.name,
                kind=kind,
                choices=choices,
                default=field.default,
                help=field.metadata["help"],
                table=any(get_origin(each) is Mapping for each in types),
                nullable=NoneType in types and field.default is not None,
            )
        )
    return options


def _wrong_value(request: GuaranteeRequest) -> str | None:
    """Return what is wrong with a single option, None if nothing is."""
    for name, hint in _hints().items():
        value = getattr(request, name)
        if hint is bool and not isinstance(value, bool):
            return f"{name} is {value!r}; it must be True or False"
    if not isinstance(request.group, str | None):
        return f"group is {request.group!r}; it must be a string or None"
    if not isinstance(request.distinct, str | None) or request.distinct not in (None, "label"):
        return f"distinct is {request.distinct!r}; it can be 'label' or None"
    if request.query_labels not in get_args(QueryLabels):
        choices = ", ".join(map(repr, get_args(QueryLabels)))
        return f"query_labels is {request.query_labels!r}; it can be one of {choices}"
    size = request.max_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, Integral) or size < 1):
        return f"max_size is {size!r}; it must be a whole number, at least 1, or None"
    mix = request.mix
    if isinstance(mix, Mapping):
        shares = list(mix.values())
        valid = all(isinstance(share, Real) and 0 <= share <= 1 for share in shares)
        valid = valid and all(isinstance(group, str) for group in mix)
        if not valid or abs(sum(shares) - 1) > 1e-6:
            return f"mix is {dict(mix)}; give the share of each group, 1 in all, or 'any'"
    elif mix is not None and not (isinstance(mix, str) and mix == "any"):
        return f"mix is {mix!r}; give 'any', or the share of each group"
    return None


def conflict(
    request: GuaranteeRequest,
    cluster: str | None = None,
    sequential: bool = False,
    chosen_among: int = 1,
) -> str | None:
    """Return why a request is impossible for a calibration, None if it is possible.

    The arguments are those of `rcir.retrieval.calibration.Calibration`; `cluster` is None if its
    queries are independent.
    """
    several = isinstance(request.alpha, Mapping)
    if several and (request.risk != DEFAULT or request.abstain):
        return "alpha names several risks: leave risk and abstain as they are"
    risk = find_risk(request.risk, request.abstain)
    monotone = risk.monotone and not several
    names = " or the ".join(each.name for each in RISKS.values() if each.monotone)
    exact = " or ".join(each.name for each in RISKS.values() if each.exact)
    for name in ("simultaneous", "anytime"):
        if getattr(request, name) and (several or not risk.exact):
            return f"{as_option(name)} is for the {exact} risk alone, of all answers"
    if request.simultaneous and request.anytime:
        return (
            f"{as_option('simultaneous')} and {as_option('anytime')} exclude each other: choose one"
        )
    of_several_levels = request.simultaneous or request.anytime
    if request.delta is None and (not monotone or of_several_levels or request.mix is not None):
        return (
            f"{as_option('delta', None)} is for the {names} risk without simultaneous, anytime and "
            f"mix: give a delta, such as {DELTA}"
        )
    if request.mix is not None and (not monotone or request.group is not None):
        return f"mix is for the {names} risk, of all answers and groups"
    shares = isinstance(request.mix, Mapping)
    if shares and of_several_levels:
        return "a mix of shares goes with neither simultaneous nor anytime"
    if request.query_labels != "calibrated":
        if cluster is not None:
            return (
                f"queries come in clusters ({cluster}): "
                f"{as_option('query_labels', request.query_labels)} needs independent ones"
            )
        cluster = LABEL
    if cluster is not None:
        grouped = (
            f"queries come in clusters ({cluster})"
            if request.query_labels == "calibrated"
            else f"{as_option('query_labels', request.query_labels)} counts labels"
        )
        for name in ("simultaneous", "anytime", "abstain"):
            if getattr(request, name):
                return f"{grouped}: {as_option(name)} needs independent queries"
        if shares:
            return f"{grouped}: mix can be 'any' only"
    if sequential and request.query_labels != "calibrated":
        return (
            "calibration queries were added one by one, and labels are not counted at every "
            f"moment: calibrate again for {as_option('query_labels', request.query_labels)}"
        )
    if sequential and not request.anytime:
        return (
            "calibration queries were added one by one, so that a guarantee has to hold at every "
            f"moment: request it with {as_option('anytime')}"
        )
    if chosen_among > 1 and request.delta is None:
        return (
            f"delta is None, but the retriever was chosen among {chosen_among}: an average over "
            "calibrations does not survive a choice; give a delta, or calibrate on other queries"
        )
    return None
