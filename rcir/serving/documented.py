"""Bodies and responses as the OpenAPI description has them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rcir.serving.terms import (
    Body,
    ExploreTerms,
    Terms,
    VectorExploration,
    VectorQueries,
    VectorQuery,
)


class Refusal(Body):
    """Why there is no answer."""

    error: str
    message: str
    minimum_alpha: float | None = None
    required_calibration: int | None = None


class Answer(BaseModel):
    """A set, with its guarantee."""

    answer: str | None
    version: str
    ids: list[str]
    labels: list[int] | list[str] | None
    distances: list[float]
    size: int
    abstained: bool
    covered: bool | None
    uncertainty: float
    uncertainty_rank: float
    guarantee: dict[str, Any]
    sentence: str


class Answers(BaseModel):
    """A set for each query, in their order."""

    answers: list[Answer]


STATUS_WORDS = {
    400: "The picture, the vector or the guarantee that is asked for cannot be used.",
    401: "The token is missing or wrong.",
    403: "The request is of a page from elsewhere, or names another host.",
    404: "There is no such thing.",
    409: "Nothing certifies that, or the calibration is stale.",
    413: "The body, or a picture, is too large.",
    415: "The body is neither multipart/form-data nor application/json.",
    429: "Too many queries wait.",
    503: "The server is stopping.",
    507: "The file of answers and feedback cannot be written.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The responses of statuses."""
    return {status: {"model": Refusal, "description": STATUS_WORDS[status]} for status in statuses}


def body_of(terms: type[BaseModel], file: str, vector: type[BaseModel]) -> dict[str, Any]:
    """The body of a route that takes pictures as multipart, and vectors as JSON."""
    picture: dict[str, Any] = {"type": "string", "format": "binary"}
    fields, many = terms.model_json_schema(), vector is VectorQueries
    properties = fields["properties"] | {
        file: {"type": "array", "items": picture, "minItems": 1} if many else picture
    }
    form = fields | {"title": "Pictures", "properties": properties, "required": [file]}
    content = {
        "multipart/form-data": {"schema": form},
        "application/json": {"schema": vector.model_json_schema()},
    }
    return {"requestBody": {"required": True, "content": content}}


ONE = body_of(Terms, "picture", VectorQuery)
MANY = body_of(Terms, "pictures", VectorQueries)
EXPLORED = body_of(ExploreTerms, "picture", VectorExploration)
