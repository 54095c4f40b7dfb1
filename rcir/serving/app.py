"""The HTTP application of a service."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from rcir.errors import RcirError
from rcir.serving.documented import errors
from rcir.serving.guards import Bearer, Bounded, SameSite
from rcir.serving.metrics import Timed
from rcir.serving.refusals import refusal
from rcir.serving.routes import routes_of
from rcir.serving.service import Service
from rcir.serving.settings import Settings
from rcir.serving.sources import RetrieverSource

PAGE_FOLDER = Path(__file__).with_name("page")
OTHERS = {
    404: ("not-found", "there is no such path"),
    405: ("not-found", "this path is not for that method"),
}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
LOCAL = ("localhost", "127.0.0.1", "::1")
BYTES_TOGETHER = 8  # times the bytes of one request, that all under way may have
_log = logging.getLogger("rcir.serving")


def create_app(source: RetrieverSource, settings: Settings | None = None) -> FastAPI:
    """The application that serves what a source has; its model is loaded here.

    Raises:
        RcirError: as `rcir.serving.sources.ready_to_serve` does.
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
    app.include_router(routes_of(service), responses=errors(401, 403))
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

    @app.exception_handler(HTTPException)
    async def none(_: Request, error: HTTPException) -> JSONResponse:
        kind, words = OTHERS.get(error.status_code, ("invalid-request", str(error.detail)))
        return JSONResponse({"error": kind, "message": words}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        _log.error("%s failed", request.url.path, exc_info=error)
        words = "the server failed; its log says why"
        return JSONResponse({"error": "failed", "message": words}, 500)

    most = settings.most_bytes
    app.add_middleware(Bounded, most=most, most_together=BYTES_TOGETHER * most)
    if settings.token is not None:
        app.add_middleware(Bearer, token=settings.token)
    elif settings.local:
        app.add_middleware(SameSite, hosts=(*LOCAL, settings.host))
    app.add_middleware(Timed, metrics=service.metrics)
    return app
