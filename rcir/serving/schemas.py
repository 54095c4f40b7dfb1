"""Bodies of requests and responses: their fields, how they are read, their form in OpenAPI.

FastAPI's `Form` and `File` declare one media type for a route; routes of queries accept pictures as
multipart and vectors as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    create_model,
)
from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request as HttpRequest

from rcir.errors import InvalidConfig
from rcir.options import DELTA
from rcir.risk import Request, make_request, request_options
from rcir.risk.losses import MISS
from rcir.risk.request import Mix
from rcir.serving.errors import STATUS_WORDS, UnsupportedBody
from rcir.serving.served import Served
from rcir.serving.settings import Settings

Kind = TypeVar("Kind", bound=BaseModel)
QueryTerms = TypeVar("QueryTerms", bound="OptionFields")
JSON_TYPE = "application/json"
# The event loop parses JSON bodies, and many tiny parts would take seconds: signs that begin or
# separate parts, their maximum number, and what they count.
JSON_LIMITS = (
    ((b"[", b"{", b":"), 2**16, "lists, tables and fields"),
    ((b",",), 2**22, "values"),
)
MAX_DIMENSIONS = 2**16  # of a vector
MAX_NAMED_FAULTS = 100  # more faults are only counted
OPTIONS = {option.name: option for option in request_options()}
MAX_FIELDS = 32


class FirstFault(FailFast):
    """Names only the first fault of a list: all of a million take seconds."""

    __hash__ = object.__hash__  # so that it can be part of a union


Numbers: TypeAlias = Annotated[list[float], FirstFault(), Field(max_length=MAX_DIMENSIONS)]


class Body(BaseModel):
    """The fields of a request or an answer; there are no others."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class OptionFields(Body):
    """Options of a guarantee as fields, and how many candidates outside the set to return."""

    outside: int = Field(0, ge=0, le=100, description="Candidates that a larger set would hold.")

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, as keywords of `make_request`."""
        return {name: getattr(self, name) for name in OPTIONS if name in type(self).model_fields}


if TYPE_CHECKING:
    AllOptions = OptionFields
    ExploreOptions = OptionFields
else:

    def _fields_of(*names: str) -> type[OptionFields]:
        fields: dict[str, Any] = {}
        for option in map(OPTIONS.__getitem__, names):
            fields[option.name] = option.annotation, Field(option.default, description=option.help)
        return create_model("_Options", __base__=OptionFields, **fields)

    AllOptions = _fields_of(*OPTIONS)
    ExploreOptions = _fields_of("delta", "distinct", "group", "key", "together")


class ExploreTerms(ExploreOptions):
    """The guarantee at all alphas, see `Retriever.at_levels`."""


class Terms(AllOptions):
    """The guarantee that is requested, see `Retriever.retrieve`."""

    monitored: bool = Field(
        True,
        description="Whether feedback on the answer will follow; without it, a monitored query "
        "counts as a miss after some days.",
    )

    @cached_property
    def request(self) -> Request:
        """The requested guarantee."""
        return make_request(**self.options)

    @cached_property
    def guarantee(self) -> str:
        """The options as JSON: equal for requests of the same guarantee, which covers all parts."""
        return json.dumps(self.request.promised.to_keywords(), separators=(",", ":"))

    @property
    def encounters(self) -> Iterable[str | None]:
        """The encounters in the order of their answers; None for each, unless they are named."""
        names = self.request.together
        return repeat(None) if isinstance(names, bool) else dict.fromkeys(names)

    @property
    def watched(self) -> bool:
        """True if the rate of misses among such answers can contradict their guarantee.

        It cannot if the guarantee is an average over calibrations or fails often, covers another
        mix of groups or other labels, or queries with a match alone, or if alpha was chosen after
        looking at the set.
        """
        request = self.request
        holds = request.delta is not None and request.delta <= DELTA
        same_queries = not isinstance(request.groups, Mix) and request.labels == "calibrated"
        same_queries = same_queries and request.counted == "all"
        misses = request.risk is not None and request.risk.name == MISS.name
        in_advance = request.holds != "for all alphas"
        return self.monitored and holds and same_queries and misses and in_advance


class Vector(Body):
    """A query: a vector of the model that embedded the gallery, or one of its items."""

    vector: Annotated[Numbers, Field(min_length=1)] | None = None
    item: str | None = Field(None, description="A gallery item, searched without itself.")
    uncertainty: float | None = Field(
        None, description="Uncertainty of the vector; larger is less certain."
    )
    model: str | None = Field(None, description="The model that embedded it.")


class VectorQuery(Vector, Terms):
    """A vector, and the guarantee that is requested."""


class VectorExploration(Vector, ExploreTerms):
    """A vector, and the guarantee at all alphas."""


class VectorQueries(Terms):
    """Query vectors of the model that embedded the gallery, and the requested guarantee."""

    vectors: Annotated[list[Numbers], FirstFault()] = Field(min_length=1)
    uncertainty: Numbers | None = Field(None, description="Uncertainty of each vector.")
    model: str | None = Field(None, description="The model that embedded them.")


class Feedback(Body):
    """The truth about an answer."""

    answer: str = Field(description="The id of the answer.", max_length=64)
    match: StrictBool = Field(description="True if the set contained a true match.")
    label: StrictInt | StrictStr | Annotated[list[StrictStr], FirstFault()] | None = Field(
        None,
        description="The query's label, of the kind that the gallery has, or the ids of its true "
        "matches if the gallery has no labels. With it, the query can calibrate.",
    )


def terms_of(form: Mapping[str, str], kind: type[Kind]) -> Kind:
    """Return the guarantee that the fields of a form request; they are text."""
    fields: dict[str, Any] = dict(form)
    for name, option in OPTIONS.items():
        text = fields.get(name, "")
        if (option.table or option.nullable) and (text[:1] == "{" or text == "null"):
            try:
                fields[name] = from_json(text)
            except ValueError as error:
                raise InvalidConfig(
                    f"{name} is not JSON ({error}): send a number or a table"
                ) from error
    return validate(kind, fields)


def validate(kind: type[Kind], fields: Mapping[str, Any] | bytes) -> Kind:
    """Return the fields of a form, or a JSON text, as a body of some kind.

    Text is converted only if it comes from a form: JSON must have the types of the fields.
    """
    try:
        if not isinstance(fields, bytes):
            return kind.model_validate(fields)
        for signs, limit, parts in JSON_LIMITS:
            if sum(map(fields.count, signs)) > limit:
                raise InvalidConfig(
                    f"the body has more than {limit:,} {parts}: send less at a time"
                )
        return kind.model_validate_json(fields, strict=True)
    except ValidationError as error:
        if error.error_count() > MAX_NAMED_FAULTS:
            raise InvalidConfig(
                f"the body has {error.error_count():,} faults: send the fields that "
                "/openapi.json describes"
            ) from None
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg'][:1].lower()}"
            f"{fault['msg'][1:]}"
            for fault in error.errors()
        ]
        raise InvalidConfig("; ".join(dict.fromkeys(faults))) from None


class Refusal(Body):
    """Why there is no answer."""

    error: str
    message: str
    minimum_alpha: float | None = None
    required_calibration: int | None = None


class Answer(Body):
    """A set, with its guarantee."""

    answer: str | None
    encounter: str | None
    version: str
    ids: list[str]
    labels: list[int] | list[str] | None
    distances: list[float]
    probabilities: list[float]
    match_probability: float | None
    size: int
    abstained: bool
    label_calibrated: bool | None
    uncertainty: float
    uncertainty_rank: float
    unlike: float
    outside: dict[str, Any] | None = None
    guarantee: dict[str, Any]
    sentence: str


class Answers(Body):
    """A set for each query, in their order."""

    answers: list[Answer]


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of responses with these statuses."""
    return {status: {"model": Refusal, "description": STATUS_WORDS[status]} for status in statuses}


@dataclass(frozen=True)
class QueryBody(Generic[QueryTerms]):
    """A body with queries: pictures as multipart, or vectors as JSON, and the guarantee."""

    terms: type[QueryTerms]  # the guarantee: the other fields of a form
    vectors: type[Any]  # with the guarantee
    file: str  # field of a form with a picture, or with several

    @property
    def several(self) -> bool:
        """True if there may be several queries."""
        return self.vectors is VectorQueries

    @property
    def description(self) -> dict[str, Any]:
        """The description for OpenAPI."""
        picture: dict[str, Any] = {"type": "string", "format": "binary"}
        pictures = {"type": "array", "items": picture, "minItems": 1} if self.several else picture
        fields = self.terms.model_json_schema()
        properties = fields["properties"] | {self.file: pictures}
        form = {"title": "Pictures", "properties": properties, "required": [self.file]}
        return _describe_body(
            {"multipart/form-data": fields | form, JSON_TYPE: self.vectors.model_json_schema()}
        )


def _describe_body(schemas: Mapping[str, Any]) -> dict[str, Any]:
    content = {media_type: {"schema": schema} for media_type, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


QUERY = QueryBody(Terms, VectorQuery, "picture")
QUERIES = QueryBody(Terms, VectorQueries, "pictures")
EXPLORATION = QueryBody(ExploreTerms, VectorExploration, "picture")
FEEDBACK_BODY = _describe_body({JSON_TYPE: Feedback.model_json_schema()})


@dataclass(frozen=True)
class Query(Generic[QueryTerms]):
    """The queries of one request."""

    terms: QueryTerms  # the requested guarantee
    n: int  # number of queries
    prepare: Callable[[Served], Any]  # prepares them for the model of a served retriever
    in_thread: bool  # True if that takes long
    client: str  # address of the sender; empty if it is unknown


async def read_query(
    request: HttpRequest, body: QueryBody[QueryTerms], settings: Settings
) -> Query[QueryTerms]:
    """Read the queries of a request, pictures or vectors."""
    client = "" if request.client is None else request.client.host
    if _media_type(request) == "multipart/form-data":
        files, fields = await _read_form(request, body)
        terms = terms_of(fields, body.terms)
        if len(files) > 1 and not (body.several or terms.options["together"]):
            raise InvalidConfig(
                f"{len(files)} files in the field {body.file}: send one file, or together=true for "
                "several pictures of one query"
            )
        decode = partial(
            Served.pictures,
            files=files,
            most_pixels=settings.most_pixels,
            # The time includes that for which the request waits for a thread.
            deadline=time.monotonic() + settings.decode_seconds,
        )
        return Query(terms, len(files), decode, True, client)
    kinds = f"a picture as multipart/form-data, or a vector as {JSON_TYPE}"
    sent = await read_json(request, body.vectors, kinds)
    item = getattr(sent, "item", None)
    vectors = [sent.vector] if body.vectors is not VectorQueries else sent.vectors
    if (vectors == [None]) == (item is None):
        raise InvalidConfig("send either a vector or an item")
    if item is not None:
        return Query(sent, 1, partial(Served.item, name=item), False, client)
    prepare = partial(
        Served.vectors, vectors=vectors, uncertainty=sent.uncertainty, model=sent.model
    )
    return Query(sent, len(vectors), prepare, len(vectors) > 1, client)


async def read_json(request: HttpRequest, kind: type[Kind], kinds: str = JSON_TYPE) -> Kind:
    """Read a JSON body; `kinds` are the bodies that the route accepts, for messages."""
    media_type = _media_type(request)
    if media_type != JSON_TYPE:
        raise UnsupportedBody(f"the body is of type {media_type or 'unknown'}: send {kinds}")
    return validate(kind, await request.body())


def _media_type(request: HttpRequest) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read_form(
    request: HttpRequest, body: QueryBody[Any]
) -> tuple[list[bytes], dict[str, str]]:
    """Return the pictures and the other fields of a form."""
    try:
        async with request.form(max_fields=MAX_FIELDS) as form:
            files = [value for value in form.getlist(body.file) if isinstance(value, UploadFile)]
            pictures = [await file.read() for file in files]
            others = [(key, value) for key, value in form.multi_items() if key != body.file]
    except (MultiPartException, KeyError, ValueError) as error:
        raise InvalidConfig(f"the body is not multipart/form-data: {error}") from None
    if not pictures:
        raise InvalidConfig(f"no file in the field {body.file}: send one")
    fields = {key: value for key, value in others if isinstance(value, str)}
    if len(fields) < len(others):
        raise InvalidConfig(f"some fields are repeated, or are files other than {body.file}")
    return pictures, fields
