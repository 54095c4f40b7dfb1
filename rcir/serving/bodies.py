"""Requests as they come, read: pictures as multipart, vectors as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from rcir.errors import InvalidConfig, RcirError
from rcir.serving.guards import TooLarge
from rcir.serving.served import Served
from rcir.serving.terms import Kind, Terms, VectorQueries, VectorQuery, checked, terms_of

MOST_FIELDS = 32
FEW_PIXELS = 2**16  # that are decoded sooner than another thread begins to


class UnsupportedBody(RcirError):
    """A request is of a kind that is not read."""


@dataclass(frozen=True)
class Query:
    """n queries of one request.

    Attributes:
        terms: the guarantee that is asked for.
        n: how many.
        prepare: makes of the served retriever what its model is asked.
        apart: whether that takes long.
    """

    terms: Terms
    n: int
    prepare: Callable[[Served], Any]
    apart: bool


async def query_of(request: Request, most_pixels: int, many: bool) -> Query:
    """The query of a request; of `many`, the queries.

    Raises:
        InvalidConfig, InvalidImage: of what it holds.
        TooLarge: a picture, by its header.
        UnsupportedBody: it is neither multipart nor JSON.
    """
    kind = kind_of(request)
    if kind == "application/json":
        return await _of_vectors(request, many)
    if kind != "multipart/form-data":
        raise UnsupportedBody(
            f"the body is of type {kind or 'unknown'}: send a picture as multipart/form-data, or a "
            "vector as application/json"
        )
    return await _of_pictures(request, most_pixels, many)


async def read_json(request: Request, kind: type[Kind]) -> Kind:
    """A JSON body.

    Raises:
        InvalidConfig: it is none, or holds something else.
        UnsupportedBody: it is of another type.
    """
    given = kind_of(request)
    if given != "application/json":
        raise UnsupportedBody(f"the body is of type {given or 'unknown'}: send application/json")
    try:
        fields = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"the body is no JSON ({error})") from None
    return checked(kind, fields)


def kind_of(request: Request) -> str:
    """The media type of a body."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _of_vectors(request: Request, many: bool) -> Query:
    if many:
        asked = await read_json(request, VectorQueries)
        vectors, uncertainty = asked.vectors, asked.uncertainty
        terms, model = Terms(**asked.model_dump(include=set(Terms.model_fields))), asked.model
    else:
        one = await read_json(request, VectorQuery)
        vectors = [one.vector]
        uncertainty = None if one.uncertainty is None else [one.uncertainty]
        terms, model = Terms(**one.model_dump(include=set(Terms.model_fields))), one.model
    prepare = partial(Served.vectors, vectors=vectors, uncertainty=uncertainty, model=model)
    return Query(terms, len(vectors), prepare, apart=len(vectors) > 1)


async def _of_pictures(request: Request, most_pixels: int, many: bool) -> Query:
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
    pixels = [_pixels(picture, most_pixels) for picture in pictures]
    small = sum(pixels) <= FEW_PIXELS
    prepare = partial(Served.pictures, files=pictures, small=small)
    return Query(terms_of(fields), len(pictures), prepare, apart=not small)


def _pixels(picture: bytes, most: int) -> int:
    from rcir.data.images import image_size  # with Pillow, which vectors do without

    width, height = image_size(picture)
    if width * height > most:
        raise TooLarge(
            f"the picture declares {width} x {height} pixels; at most {most:,} are decoded: scale "
            "it down first"
        )
    return width * height
