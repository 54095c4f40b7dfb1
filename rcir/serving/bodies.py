"""Bodies of requests: pictures as multipart, vectors as JSON.

FastAPI's `Form` and `File` declare one media type for a route; these routes accept both.
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
from rcir.serving.schemas import Body, Kind, Vector, VectorQueries, terms_of, validate
from rcir.serving.served import Served
from rcir.serving.settings import Settings

MAX_FIELDS = 32
QueryTerms = TypeVar("QueryTerms", bound=Body)


class UnsupportedBody(RcirError):
    """A body has another media type than the route accepts."""


@dataclass(frozen=True)
class Query(Generic[QueryTerms]):
    """The queries of one request."""

    terms: QueryTerms  # the requested guarantee
    n: int  # number of queries
    prepare: Callable[[Served], Any]  # prepares them for the model of a served retriever
    in_thread: bool  # True if that takes long
    client: str  # address of the sender; empty if it is unknown


async def read_query(
    request: Request, settings: Settings, kind: type[QueryTerms], vectors: type[Body]
) -> Query[QueryTerms]:
    """Read the queries of a request.

    Args:
        kind: of its terms.
        vectors: of a JSON body; a multipart body has several pictures for `VectorQueries`.
    """
    client = "" if request.client is None else request.client.host
    if _media_type(request) == "multipart/form-data":
        return await _read_pictures(request, settings, kind, vectors is VectorQueries, client)
    kinds = "a picture as multipart/form-data, or a vector as application/json"
    return _vector_query(await read_json(request, vectors, kinds), kind, client)


async def read_json(request: Request, kind: type[Kind], kinds: str = "application/json") -> Kind:
    """Read a JSON body; `kinds` are the bodies that the route accepts, for messages."""
    media_type = _media_type(request)
    if media_type != "application/json":
        raise UnsupportedBody(f"the body is of type {media_type or 'unknown'}: send {kinds}")
    return validate(kind, await request.body())


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _vector_query(body: Any, kind: type[QueryTerms], client: str) -> Query[QueryTerms]:
    if isinstance(body, Vector):
        vectors = [body.vector]
        uncertainty = None if body.uncertainty is None else [body.uncertainty]
    else:
        vectors, uncertainty = body.vectors, body.uncertainty
    terms = kind(**{name: getattr(body, name) for name in kind.model_fields})
    prepare = partial(Served.vectors, vectors=vectors, uncertainty=uncertainty, model=body.model)
    return Query(terms, len(vectors), prepare, len(vectors) > 1, client)


async def _read_pictures(
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
        raise InvalidConfig(f"some fields are repeated, or are files other than {name}")
    prepare = partial(
        Served.pictures,
        files=pictures,
        most_pixels=settings.most_pixels,
        # The time includes that for which the request waits for a thread.
        deadline=time.monotonic() + settings.decode_seconds,
    )
    return Query(terms_of(fields, kind), len(pictures), prepare, True, client)
