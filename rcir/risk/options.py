"""Options of a request: the only declaration of the keywords that a guarantee has.

The keyword arguments of `Retriever.retrieve`, the flags of `rcir retrieve`, the fields of HTTP
requests, the parameters of a logged MLflow model and the table of the site derive from
`RequestKeywords`. To add an option, declare it there; `rcir.risk.make_request` says what it means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Literal, TypedDict, get_args, get_origin, get_type_hints

from rcir.errors import InvalidConfig
from rcir.options import ALPHA, DELTA, KIND_NAMES
from rcir.risk.losses import MISS, risk_names

Alpha = float | Mapping[str, float]
Distinct = Literal["label"] | None
CountedQueries = Literal["all", "matchable"]
QueryLabels = Literal["calibrated", "new", "any"]
Balance = Literal["uncertainty"] | None
Key = str | Sequence[str] | None
Together = bool | Sequence[str]


class _Levels(TypedDict, total=False):
    alpha: Annotated[
        Alpha,
        "Largest share of queries whose set may hold no true match; or several risks with a level "
        "each, which hold together.",
    ]
    delta: Annotated[
        float | None,
        "Probability that the guarantee fails because of unluckily easy calibration queries; none: "
        "a guarantee on average over calibrations.",
    ]


class RequestOptions(TypedDict, total=False):
    """The keywords of a request beside alpha and delta, each with its meaning."""

    risk: Annotated[
        str,
        "What alpha limits: sets without a true match (miss), the share of the true matches that a "
        "set lacks (recall), or the share of a set that is not a match (false-discovery).",
    ]
    distinct: Annotated[Distinct, "Return one item of each label; sizes count labels."]
    group: Annotated[
        str | None, "Cover the queries of this group, one of those that calibrated, instead of all."
    ]
    abstain: Annotated[
        bool, "Return one item, or none if it is too uncertain; alpha limits the wrong ones."
    ]
    simultaneous: Annotated[
        bool, "Hold for all alphas at once, so that alpha may be chosen after looking."
    ]
    anytime: Annotated[bool, "Hold at every moment while calibration queries are added one by one."]
    mix: Annotated[
        Literal["any"] | Mapping[str, float] | None,
        "Hold for any mix of the groups, or for one in which each group has a given share.",
    ]
    max_size: Annotated[
        int | None, "Return at most this many items; an alpha that needs more is refused."
    ]
    query_labels: Annotated[
        QueryLabels,
        "Cover queries of the labels that the calibration queries have (calibrated), of new labels "
        "drawn like these (new), or both (any).",
    ]
    counted: Annotated[
        CountedQueries,
        "Count all queries, where one without a match in the gallery is a miss (all), or those "
        "that have a match (matchable).",
    ]
    beta: Annotated[
        float | None,
        "Largest share of the queries without a match in the gallery that get a set at all; alpha "
        "then counts the queries that have one.",
    ]
    balance: Annotated[
        Balance,
        "Hold in each quarter of the uncertainty of queries by itself, instead of missing mostly "
        "uncertain ones; sets are larger.",
    ]
    key: Annotated[
        Key,
        "Search only the part of the gallery with this key, such as a site; one for "
        "all queries, or one for each. Required if and only if the gallery is divided by keys.",
    ]
    together: Annotated[
        Together,
        "Answer all pictures as one query, because they are of one encounter; or those of each "
        "encounter, which a name for each picture states.",
    ]


class RequestKeywords(_Levels, RequestOptions, total=False):
    """All keywords of a request."""


DEFAULTS: RequestOptions = {
    "risk": MISS.name,
    "distinct": None,
    "group": None,
    "abstain": False,
    "simultaneous": False,
    "anytime": False,
    "mix": None,
    "max_size": None,
    "query_labels": "calibrated",
    "counted": "all",
    "beta": None,
    "balance": None,
    "key": None,
    "together": False,
}
OPTION_KINDS: Mapping[str, object] = get_type_hints(RequestOptions)


@dataclass(frozen=True)
class RequestOption:
    """One option of a request."""

    name: str
    annotation: object
    kind: type  # of its scalar values: bool, int, float or str
    choices: tuple[str, ...]  # empty if there are too many
    default: object
    help: str
    table: bool  # True if it may also be numbers by name
    nullable: bool  # True if None is a value that "none" states

    def parse(self, words: Sequence[str]) -> object:
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
                pairs = [pair.rpartition("=") for pair in words]
                table = {name: float(number) for name, _, number in pairs}
                if all(table) and len(table) == len(words):
                    return table
            elif self.nullable and word == "none":
                return None
            elif not self.choices or word in self.choices:
                return self.kind(word)
        except ValueError:
            pass
        allowed = " or ".join(self.choices) or KIND_NAMES[self.kind]
        allowed += ", or none" * self.nullable
        allowed += ", or NAME=NUMBER for each of several different names" * self.table
        raise InvalidConfig(f"{' '.join(words)!r} is not a value of {self.name}: give {allowed}")


def request_options() -> list[RequestOption]:
    """List the options of a request.

    Example:
        >>> [option.name for option in request_options()][:3]
        ['alpha', 'delta', 'risk']
    """
    options, defaults = [], {"alpha": ALPHA, "delta": DELTA, **DEFAULTS}
    for name, hint in get_type_hints(RequestKeywords, include_extras=True).items():
        annotation, help = get_args(hint)
        is_literal = get_origin(annotation) is Literal
        types = (annotation,) if is_literal else get_args(annotation) or (annotation,)
        choices = [value for kind in types for value in get_args(kind) if isinstance(value, str)]
        options.append(
            RequestOption(
                name=name,
                annotation=annotation,
                kind=next((kind for kind in types if kind in (bool, int, float, str)), str),
                choices=tuple(risk_names() if name == "risk" else choices),
                default=defaults[name],
                help=help,
                table=any(get_origin(kind) is Mapping for kind in types),
                nullable=NoneType in types and (float in types or int in types),
            )
        )
    return options
