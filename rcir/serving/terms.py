"""The guarantees, vectors and feedback that requests hold, checked before anything is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rcir.errors import InvalidConfig
from rcir.levels import ALPHA, DELTA

Kind = TypeVar("Kind", bound=BaseModel)
STRUCTURED = ("alpha", "delta", "mix")  # fields of a form that may be more than a text


class Body(BaseModel):
    """What a request holds; a field that is none of it is refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class Terms(Body):
    """The guarantee that is asked for, see `Retriever.retrieve`."""

    alpha: float | dict[str, float] = Field(
        ALPHA, description="Share of queries whose set may hold no true match; or several risks."
    )
    delta: float | None = Field(
        DELTA, description="Probability of misleading calibration queries; null: on average."
    )
    risk: str = Field("miss", description="miss, recall or false-discovery")
    distinct: Literal["label"] | None = Field(None, description="One item of each label.")
    group: str | None = Field(None, description="The group that the query belongs to.")
    abstain: bool = Field(False, description="One item, or none if too uncertain.")
    simultaneous: bool = Field(False, description="Alpha was chosen after looking.")
    anytime: bool = Field(False, description="Calibration queries were added one by one.")
    mix: Literal["any"] | dict[str, float] | None = Field(None, description="Of the groups.")

    @cached_property
    def key(self) -> str:
        """Equal for requests of the same guarantee."""
        return self.model_dump_json()

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `Retriever.retrieve`."""
        return {
            name: getattr(self, name)
            for name in Terms.model_fields
            if name not in ("alpha", "delta")
        }


class VectorQuery(Terms):
    """A vector to be asked, of what embedded the gallery."""

    vector: list[float] = Field(min_length=1)
    uncertainty: float | None = Field(None, description="Of the vector; larger is less certain.")
    model: str | None = Field(None, description="What embedded it.")


class VectorQueries(Terms):
    """Vectors to be asked, of what embedded the gallery."""

    vectors: list[list[float]] = Field(min_length=1)
    uncertainty: list[float] | None = Field(None, description="Of each vector.")
    model: str | None = Field(None, description="What embedded them.")


class Feedback(Body):
    """What became known of an answer."""

    answer: str = Field(description="The id of the answer.", max_length=64)
    match: bool = Field(description="Whether the set held a true match.")
    label: int | str | list[str] | None = Field(
        None,
        description="The query's label, of the kind that the gallery has; where it has none, the "
        "ids of the query's true matches. With it the query can calibrate.",
    )


def terms_of(form: Mapping[str, str]) -> Terms:
    """The guarantee that the fields of a form ask for.

    Raises:
        InvalidConfig: a field is none, or has no such value.

    Example:
        >>> asked = terms_of({"alpha": "0.05", "abstain": "true"})
        >>> asked.alpha, asked.abstain, asked.delta
        (0.05, True, 0.1)
    """
    fields: dict[str, Any] = dict(form)
    for name in STRUCTURED:
        text = fields.get(name, "")
        if text[:1] == "{" or text == "null":
            try:
                fields[name] = json.loads(text)
            except ValueError as error:
                raise InvalidConfig(
                    f"{name} is no JSON ({error}): give a number or a table"
                ) from error
    return checked(Terms, fields)


def checked(kind: type[Kind], fields: object) -> Kind:
    """Values as what they have to be.

    Raises:
        InvalidConfig: they are not; every fault is named.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidConfig(faults_of(error.errors())) from None


def faults_of(errors: list[Any]) -> str:
    """The faults that validation found, in one sentence."""
    said = []
    for one in errors:
        place = ".".join(str(part) for part in one["loc"]) or "the body"
        said.append(f"{place}: {one['msg'][:1].lower()}{one['msg'][1:]}")
    return "; ".join(dict.fromkeys(said))
