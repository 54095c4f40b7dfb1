"""Bodies of requests: pictures as multipart, vectors as JSON.

FastAPI's `Form` and `File` declare one media type for a route; these routes take both. Pydantic
models check the fields, and Starlette parses the forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from rcir.errors import InvalidConfig, RcirError
from rcir.serving.middleware import TooLarge
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

MOST_FIELDS = 32
FEW_PIXELS = 2**16  # that are decoded sooner than another thread begins to
PIXELS_TOGETHER = 8  # times the pixels of one picture, that the pictures of a request may have
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
    """

    terms: AskedTerms
    n: int
    prepare: Callable[[Served], Any]
    apart: bool


async def one_query(request: Request, most_pixels: int) -> Query[Terms]:
    """The query of a request.

    Raises:
        InvalidConfig, InvalidImage: of the body.
        TooLarge: a picture, by its header.
        UnsupportedBody: it is neither multipart nor JSON.
    """
    return await _query(request, most_pixels, Terms, VectorQuery)


async def many_queries(request: Request, most_pixels: int) -> Query[Terms]:
    """The queries of a request; errors are those of `one_query`."""
    return await _query(request, most_pixels, Terms, VectorQueries)


async def exploration(request: Request, most_pixels: int) -> Query[ExploreTerms]:
    """The query of a request for its sets at all alphas; errors are those of `one_query`."""
    return await _query(request, most_pixels, ExploreTerms, VectorExploration)


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
    request: Request, most_pixels: int, terms: type[AskedTerms], vectors: type[Body]
) -> Query[AskedTerms]:
    media_type = _media_type(request)
    if media_type == "application/json":
        return _of_vectors(await read_json(request, vectors), terms)
    if media_type != "multipart/form-data":
        raise UnsupportedBody(
            f"the body is of type {media_type or 'unknown'}: send a picture as "
            "multipart/form-data, or a vector as application/json"
        )
    return await _of_pictures(request, most_pixels, terms, many=vectors is VectorQueries)


def _of_vectors(body: Any, kind: type[AskedTerms]) -> Query[AskedTerms]:
    vectors, uncertainty = (
        ([body.vector], None if body.uncertainty is None else [body.uncertainty])
        if isinstance(body, Vector)
        else (body.vectors, body.uncertainty)
    )
    terms = kind(**{name: getattr(body, name) for name in kind.model_fields})
    prepare = partial(Served.vectors, vectors=vectors, uncertainty=uncertainty, model=body.model)
    return Query(terms, len(vectors), prepare, apart=len(vectors) > 1)


async def _of_pictures(
    request: Request, most_pixels: int, kind: type[AskedTerms], many: bool
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
    small = sum(_pixels(pictures, most_pixels)) <= FEW_PIXELS
    prepare = partial(Served.pictures, files=pictures, small=small)
    return Query(terms_of(fields, kind), len(pictures), prepare, apart=not small)


def _pixels(pictures: list[bytes], most: int) -> list[int]:
    """Return the size of each picture that its header declares."""
    from rcir.data.images import image_size  # with Pillow, which vectors do without

    sizes = [image_size(picture) for picture in pictures]
    pixels = [width * height for width, height in sizes]
    if max(pixels) > most:
        width, height = sizes[pixels.index(max(pixels))]
        raise TooLarge(
            f"the picture declares {width} x {height} pixels; at most {most:,} are decoded: scale "
            "it down first"
        )
    if sum(pixels) > PIXELS_TOGETHER * most:
        raise TooLarge(
            f"the pictures have {sum(pixels):,} pixels together; at most "
            f"{PIXELS_TOGETHER * most:,} are decoded for one request: send fewer at a time, or "
            "scale them down"
        )
    return pixels
