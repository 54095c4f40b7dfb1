"""Bodies of requests: pictures as multipart, vectors as JSON.

FastAPI's `Form` and `File` declare one media type for a route; these routes accept both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from rcir.errors import InvalidConfig
from rcir.serving.errors import UnsupportedBody
from rcir.serving.schemas import (
    JSON_TYPE,
    Kind,
    QueryBody,
    QueryTerms,
    Vector,
    terms_of,
    validate,
)
from rcir.serving.served import Served
from rcir.serving.settings import Settings

MAX_FIELDS = 32


@dataclass(frozen=True)
class Query(Generic[QueryTerms]):
    """The queries of one request."""

    terms: QueryTerms  # the requested guarantee
    n: int  # number of queries
    prepare: Callable[[Served], Any]  # prepares them for the model of a served retriever
    in_thread: bool  # True if that takes long
    client: str  # address of the sender; empty if it is unknown


async def read_query(
    request: Request, body: QueryBody[QueryTerms], settings: Settings
) -> Query[QueryTerms]:
    """Read the queries of a request, pictures or vectors."""
    client = "" if request.client is None else request.client.host
    if _media_type(request) == "multipart/form-data":
        files, fields = await _read_form(request, body)
        decode = partial(
            Served.pictures,
            files=files,
            most_pixels=settings.most_pixels,
            # The time includes that for which the request waits for a thread.
            deadline=time.monotonic() + settings.decode_seconds,
        )
        return Query(terms_of(fields, body.terms), len(files), decode, True, client)
    kinds = f"a picture as multipart/form-data, or a vector as {JSON_TYPE}"
    sent = await read_json(request, body.vectors, kinds)
    vectors = [sent.vector] if isinstance(sent, Vector) else sent.vectors
    prepare = partial(
        Served.vectors, vectors=vectors, uncertainty=sent.uncertainty, model=sent.model
    )
    return Query(sent, len(vectors), prepare, len(vectors) > 1, client)


async def read_json(request: Request, kind: type[Kind], kinds: str = JSON_TYPE) -> Kind:
    """Read a JSON body; `kinds` are the bodies that the route accepts, for messages."""
    media_type = _media_type(request)
    if media_type != JSON_TYPE:
        raise UnsupportedBody(f"the body is of type {media_type or 'unknown'}: send {kinds}")
    return validate(kind, await request.body())


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read_form(request: Request, body: QueryBody[Any]) -> tuple[list[bytes], dict[str, str]]:
    """Return the pictures and the other fields of a form."""
    try:
        async with request.form(max_fields=MAX_FIELDS) as form:
            files = [value for value in form.getlist(body.file) if isinstance(value, UploadFile)]
            pictures = [await file.read() for file in files]
            others = [(key, value) for key, value in form.multi_items() if key != body.file]
    except (MultiPartException, KeyError, ValueError) as error:
        raise InvalidConfig(f"the body is not multipart/form-data: {error}") from None
    if not pictures or (len(pictures) > 1 and not body.several):
        needed = "one or more files" if body.several else "one file"
        raise InvalidConfig(f"{len(pictures)} files in the field {body.file}: send {needed}")
    fields = {key: value for key, value in others if isinstance(value, str)}
    if len(fields) < len(others):
        raise InvalidConfig(f"some fields are repeated, or are files other than {body.file}")
    return pictures, fields
