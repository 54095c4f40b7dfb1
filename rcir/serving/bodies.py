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
from rcir.serving.schemas import (
    Body,
    ExploreTerms,
    Kind,
    Terms,
    Vector,
    VectorExploration,
    VectorQueries,
    VectorQuery,
    checked,
    terms_of,
)
from rcir.serving.served import Served
from rcir.serving.settings import Settings

MOST_FIELDS = 32
AskedTerms = TypeVar("AskedTerms", bound=Body)


class UnsupportedBody(RcirError):
    """A request is of a kind that is not read."""


@dataclass(frozen=True)
class Query(Generic[AskedTerms]):
    """n queries of one request.

    Attributes:
        terms: the guarantee that is asked for.
        n: their number.
        prepare: makes them ready for the model of a served retriever.
        apart: whether that takes long.
        client: address that the request came from; empty if it is unknown.
    """

    terms: AskedTerms
    n: int
    prepare: Callable[[Served], Any]
    apart: bool
    client: str = ""


async def one_query(request: Request, settings: Settings) -> Query[Terms]:
    """The query of a request.

    Raises:
        InvalidConfig: of the body.
        UnsupportedBody: it is neither multipart nor JSON.
    """
    return await _query(request, settings, Terms, VectorQuery)


async def many_queries(request: Request, settings: Settings) -> Query[Terms]:
    """The queries of a request; errors are those of `one_query`."""
    return await _query(request, settings, Terms, VectorQueries)


async def exploration(request: Request, settings: Settings) -> Query[ExploreTerms]:
    """The query of a request for its sets at all alphas; errors are those of `one_query`."""
    return await _query(request, settings, ExploreTerms, VectorExploration)


async def read_json(request: Request, kind: type[Kind]) -> Kind:
    """A JSON body.

    Raises:
        InvalidConfig: it is none, or holds something else.
        UnsupportedBody: it is of another type.
    """
    media_type = _media_type(request)
    if media_type != "application/json":
        raise UnsupportedBody(
            f"the body is of type {media_type or 'unknown'}: send application/json"
        )
    return checked(kind, await request.body())


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _query(
    request: Request, settings: Settings, terms: type[AskedTerms], vectors: type[Body]
) -> Query[AskedTerms]:
    media_type = _media_type(request)
    if media_type == "application/json":
        return _of_vectors(await read_json(request, vectors), terms, _client(request))
    if media_type != "multipart/form-data":
        raise UnsupportedBody(
            f"the body is of type {media_type or 'unknown'}: send a picture as "
            "multipart/form-data, or a vector as application/json"
        )
    return await _of_pictures(request, settings, terms, many=vectors is VectorQueries)


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _of_vectors(body: Any, kind: type[AskedTerms], client: str) -> Query[AskedTerms]:
    vectors, uncertainty = (
        ([body.vector], None if body.uncertainty is None else [body.uncertainty])
        if isinstance(body, Vector)
        else (body.vectors, body.uncertainty)
    )
    terms = kind(**{name: getattr(body, name) for name in kind.model_fields})
    prepare = partial(Served.vectors, vectors=vectors, uncertainty=uncertainty, model=body.model)
    return Query(terms, len(vectors), prepare, apart=len(vectors) > 1, client=client)


async def _of_pictures(
    request: Request, settings: Settings, kind: type[AskedTerms], many: bool
) -> Query[AskedTerms]:
    name = "pictures" if many else "picture"
    try:
        async with request.form(max_fields=MOST_FIELDS) as form:
            files = [one for one in form.getlist(name) if isinstance(one, UploadFile)]
            pictures = [await one.read() for one in files]
            others = [(key, value) for key, value in form.multi_items() if key != name]
    except (MultiPartException, KeyError, ValueError) as error:
        raise InvalidConfig(f"the body is no multipart/form-data: {error}") from None
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
        # From now on, so that it includes the time that the request waits for a thread.
        deadline=time.monotonic() + settings.decode_seconds,
    )
    return Query(
        terms_of(fields, kind), len(pictures), prepare, apart=True, client=_client(request)
    )
