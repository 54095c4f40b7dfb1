"""The application: its routes, and what is around them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rcir.errors import DataUnavailable, RcirError
from rcir.serving.errors import refusal
from rcir.serving.middleware import Access, Bounded, Timed, refuse_other_sites, refuse_without_token
from rcir.serving.schemas import (
    EXPLORATION,
    FEEDBACK_BODY,
    QUERIES,
    QUERY,
    Answer,
    Answers,
    Feedback,
    read_json,
    read_query,
    responses,
)
from rcir.serving.service import Service
from rcir.serving.settings import Settings
from rcir.serving.sources import RetrieverSource

EXPLORED_ALPHAS = tuple(hundredth / 100 for hundredth in range(1, 100))
PAGE_FOLDER = Path(__file__).with_name("page")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
TOTAL_BYTES = 8  # maximum of the bytes of all requests in progress, in those of one request
HTTP_ERRORS = {
    404: ("not-found", "there is no such path"),
    405: ("not-found", "this path does not accept that method"),
}
QUERY_ERRORS = (400, 408, 409, 413, 415, 429, 503)
_log = logging.getLogger("rcir.serving")


def routes_of(service: Service) -> APIRouter:
    """Return the routes of a service."""
    router = APIRouter()
    settings = service.settings

    @router.post(
        "/retrieve",
        response_model=Answer,
        responses=responses(*QUERY_ERRORS),
        openapi_extra=QUERY.description,
    )
    async def retrieve(request: Request) -> Response:
        """The set of one query, with its guarantee."""
        service.batcher.require_room(1)  # before the body is read
        query = await read_query(request, QUERY, settings)
        (answer,) = await service.answer(query)
        return JSONResponse(answer)

    @router.post(
        "/retrieve/batch",
        response_model=Answers,
        responses=responses(*QUERY_ERRORS),
        openapi_extra=QUERIES.description,
    )
    async def retrieve_batch(request: Request) -> Response:
        """A set for each of several queries."""
        service.batcher.require_room(1)
        query = await read_query(request, QUERIES, settings)
        return JSONResponse({"answers": await service.answer(query)})

    @router.post(
        "/explore", responses=responses(*QUERY_ERRORS), openapi_extra=EXPLORATION.description
    )
    async def explore(request: Request) -> Response:
        """The sets of one query at all alphas, from one search."""
        service.batcher.require_room(1)
        query = await read_query(request, EXPLORATION, settings)
        return JSONResponse(await service.explore(query, EXPLORED_ALPHAS))

    @router.get("/guarantees")
    async def guarantees() -> Response:
        """The levels that can be certified, with mean set sizes, and what the server offers."""
        live = service.live
        offers = {"feedback": service.store is not None, "pictures": live.pictures.expected}
        return JSONResponse({"version": live.served.version} | offers | live.served.guarantees)

    @router.get(
        "/items/{item:path}/image",
        responses=responses(400, 404) | {200: {"content": {"image/jpeg": {}, "image/png": {}}}},
        response_class=Response,
    )
    async def image(item: str, version: str | None = None) -> Response:
        """A thumbnail of a gallery item; with the served version, it may be cached."""
        live = service.live
        if item not in live.served.positions:
            raise DataUnavailable(f"{item!r} is not an item of the gallery")
        picture, kind = await asyncio.to_thread(live.pictures.thumbnail, item)
        caching = "private, max-age=600" if version == live.served.version else "no-cache"
        return Response(picture, media_type=kind, headers={"cache-control": caching})

    @router.get("/sample", responses=responses(404))
    async def sample() -> Response:
        """A query to try: a test picture, a gallery item, or a calibration query's vector."""
        return JSONResponse(await asyncio.to_thread(service.sample, np.random.default_rng()))

    @router.post(
        "/feedback",
        responses=responses(400, 404, 408, 409, 413, 415, 429, 507),
        openapi_extra=FEEDBACK_BODY,
    )
    async def feedback(request: Request) -> Response:
        """Feedback on an answer; it is on disk when this is acknowledged."""
        body = await read_json(request, Feedback)
        return JSONResponse(await service.feed(body))

    @router.get("/monitor", responses=responses(429, 503, 507))
    async def monitor() -> Response:
        """The evidence on each guarantee, and on changes of the queries."""
        return JSONResponse(await service.monitor())

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Report that the process answers."""
        return {"status": "ok"}

    @router.get("/ready", responses=responses(503))
    async def ready() -> Response:
        """Report whether requests are answered, and whether anything is wrong."""
        live, ready = service.live, not service.batcher.stopping
        body = {
            "ready": ready,
            "source": service.source.name,
            "version": live.served.version,
            "trouble": service.trouble,
            "feedback_trouble": await asyncio.to_thread(service.feedback_trouble),
            "alarm": live.evidence.watch.alarm,
            "drift_alarm": live.drift.row["alarm"],
        }
        return JSONResponse(body, 200 if ready else 503)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        text = generate_latest(service.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    return router


def create_app(source: RetrieverSource, settings: Settings | None = None) -> FastAPI:
    """Return the application that serves a source; the retriever is loaded here.

    Raises:
        NoRetriever, CorruptRetriever, StaleCalibration: nothing can be served from there.
        StoreUnavailable: the file of answers and feedback cannot be used.
    """
    settings = settings or Settings()
    service = Service(source, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="rcir",
        version=version("rcir"),
        description="Image retrieval with a guarantee.",
        lifespan=lifespan,
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(routes_of(service), responses=responses(401, 403))
    app.mount("/page", StaticFiles(directory=PAGE_FOLDER))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE_FOLDER / "index.html", headers=PAGE_HEADERS)

    @app.exception_handler(RcirError)
    async def refused(_: Request, error: RcirError) -> JSONResponse:
        status, body = refusal(error)
        service.metrics.refusals.labels(body["error"]).inc()
        headers = {"retry-after": "1"} if status in (429, 503) else None
        return JSONResponse(body, status, headers)

    @app.exception_handler(ClientDisconnect)
    async def disconnected(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def not_found(_: Request, error: HTTPException) -> JSONResponse:
        kind, words = HTTP_ERRORS.get(error.status_code, ("invalid-request", str(error.detail)))
        return JSONResponse({"error": kind, "message": words}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        _log.error("%s failed", request.url.path, exc_info=error)
        words = "the server failed; its log says why"
        return JSONResponse({"error": "failed", "message": words}, 500)

    limit, seconds = settings.most_bytes, settings.body_seconds
    app.add_middleware(Bounded, limit=limit, total=TOTAL_BYTES * limit, seconds=seconds)
    if settings.token is not None:
        app.add_middleware(Access, refusal=partial(refuse_without_token, token=settings.token))
    elif settings.local:
        hosts = {*LOOPBACK_NAMES, settings.host}
        app.add_middleware(Access, refusal=partial(refuse_other_sites, hosts=hosts))
    app.add_middleware(Timed, metrics=service.metrics)
    return app
