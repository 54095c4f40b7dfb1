"""Bodies of requests: pictures as multipart, vectors as JSON.

FastAPI's `Form` and `File` declare one media type for a route; these routes take both. Pydantic
models check the fields, and Starlette parses the forms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from rcir.errors import InvalidConfig, RcirError
from rcir.serving.schemas import Body, Kind, Vector, VectorQueries, checked, terms_of
from rcir.serving.served import Served
from rcir.serving.settings import Settings

MAX_FIELDS = 32
QueryTerms = TypeVar("QueryTerms", bound=Body)


class UnsupportedBody(RcirError):
    """A body has another media type than the route takes."""


@dataclass(frozen=True)
class Query(Generic[QueryTerms]):
    """n queries of one request.

    Attributes:
        terms: the requested guarantee.
        n: their number.
        prepare: prepares them for the model of a served retriever.
        in_thread: True if that takes long.
        client: address that the request came from; empty if it is unknown.
    """

    terms: QueryTerms
    n: int
    prepare: Callable[[Served], Any]
    in_thread: bool
    client: str


async def read_query(
    request: Request, settings: Settings, kind: type[QueryTerms], vectors: type[Body]
) -> Query[QueryTerms]:
    """Read the queries of a request.

    Args:
        kind: of its terms.
        vectors: of a JSON body; a multipart body has several pictures for `VectorQueries`.
    """
    media_type = _media_type(request)
    client = "" if request.client is None else request.client.host
    if media_type == "application/json":
        return _of_vectors(await read_json(request, vectors), kind, client)
    if media_type != "multipart/form-data":
        raise UnsupportedBody(
            f"the body is of type {media_type or 'unknown'}: send a picture as "
            "multipart/form-data, or a vector as application/json"
        )
    return await _of_pictures(request, settings, kind, vectors is VectorQueries, client)


async def read_json(request: Request, kind: type[Kind]) -> Kind:
    """Read a JSON body."""
    media_type = _media_type(request)
    if media_type != "application/json":
        raise UnsupportedBody(
            f"the body is of type {media_type or 'unknown'}: send application/json"
        )
    return checked(kind, await request.body())


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _of_vectors(body: Any, kind: type[QueryTerms], client: str) -> Query[QueryTerms]:
    if isinstance(body, Vector):
        vectors = [body.vector]
        uncertainty = None if body.uncertainty is None else [body.uncertainty]
    else:
        vectors, uncertainty = body.vectors, body.uncertainty
    terms = kind(**{name: getattr(body, name) for name in kind.model_fields})
    prepare = partial(Served.vectors, vectors=vectors, uncertainty=uncertainty, model=body.model)
    return Query(terms, len(vectors), prepare, len(vectors) > 1, client)


async def _of_pictures(
    request: Request, settings: Settings, kind: type[QueryTerms], many: bool, client: str
) -> Query[QueryTerms]:
    name = "pictures" if many else "picture"
    try:
        async with request.form(max_fields=MAX_FIELDS) as form:
            files = [value for value in form.getlist(name) if isinstance(value, UploadFile)]
            pictures = [await file.read() for file in files]
            others = [(key, value) for key, value in form.multi_items() if key != name]
    except (MultiPartException, KeyError, ValueError) as error:
        raise InvalidConfig(f"the body is not multipart/form-data: {error}") from None
    if not pictures or (len(pictures) > 1 and not many):
        needed = "one or more files" if many else "one file"
        raise InvalidConfig(f"{len(pictures)} files in the field {name}: send {needed}")
    fields = {key: value for key, value in others if isinstance(value, str)}
    if len(fields) < len(others):
        raise InvalidConfig(f"some fields are given twice, or are files: files go into {name}")
    prepare = partial(
        Served.pictures,
        files=pictures,
        most_pixels=settings.most_pixels,
        # The time includes that for which the request waits for a thread.
        deadline=time.monotonic() + settings.decode_seconds,
    )
    return Query(terms_of(fields, kind), len(pictures), prepare, True, client)
