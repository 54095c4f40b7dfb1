"""The routes of a server."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from rcir.errors import DataUnavailable
from rcir.serving.bodies import exploration, many_queries, one_query, read_json
from rcir.serving.documented import EXPLORED, MANY, ONE, Answer, Answers, errors
from rcir.serving.service import Service
from rcir.serving.terms import Feedback

EXPLORED_ALPHAS = tuple(hundredth / 100 for hundredth in range(1, 100))  # alphas of an exploration


def routes_of(service: Service) -> APIRouter:
    """The routes of a service."""
    router = APIRouter()
    settings = service.settings

    @router.post(
        "/retrieve",
        response_model=Answer,
        responses=errors(400, 409, 413, 415, 429, 503),
        openapi_extra=ONE,
    )
    async def retrieve(request: Request) -> Response:
        """The set of one query, with its guarantee."""
        service.batcher.require_room(1)  # before the body is read
        query = await one_query(request, settings.most_pixels)
        (answer,) = await service.answer(query)
        return JSONResponse(answer)

    @router.post(
        "/retrieve/batch",
        response_model=Answers,
        responses=errors(400, 409, 413, 415, 429, 503),
        openapi_extra=MANY,
    )
    async def retrieve_batch(request: Request) -> Response:
        """A set for each of several queries."""
        service.batcher.require_room(1)
        query = await many_queries(request, settings.most_pixels)
        return JSONResponse({"answers": await service.answer(query)})

    @router.post("/explore", responses=errors(400, 409, 413, 415, 429, 503), openapi_extra=EXPLORED)
    async def explore(request: Request) -> Response:
        """The sets of one query at all alphas, from one search."""
        service.batcher.require_room(1)
        query = await exploration(request, settings.most_pixels)
        return JSONResponse(await service.explore(query, EXPLORED_ALPHAS))

    @router.get("/guarantees")
    async def guarantees() -> Response:
        """The levels that can be certified, with the sizes of the sets that takes."""
        served = service.served
        return JSONResponse({"version": served.version} | served.guarantees)

    @router.get(
        "/items/{item:path}/image",
        responses=errors(400, 404) | {200: {"content": {"image/png": {}}}},
        response_class=Response,
    )
    async def image(item: str, version: str | None = None) -> Response:
        """A thumbnail of a gallery item; with the version that is served, it may be kept."""
        live = service.live
        if item not in live.served.positions:
            raise DataUnavailable(f"{item!r} is no item of the gallery")
        picture = await asyncio.to_thread(live.pictures.thumbnail, item)
        kept = "private, max-age=600" if version == live.served.version else "no-cache"
        return Response(picture, media_type="image/png", headers={"cache-control": kept})

    @router.get("/sample", responses=errors(404))
    async def sample() -> Response:
        """A query to try: a test picture where there are any, else a calibration query."""
        return JSONResponse(await asyncio.to_thread(service.sample, np.random.default_rng()))

    @router.post(
        "/feedback", responses=errors(400, 404, 409, 413, 415, 429, 507), openapi_extra=_feedback()
    )
    async def feedback(request: Request) -> Response:
        """Feedback on an answer; it is on disk when this is acknowledged."""
        given = await read_json(request, Feedback)
        return JSONResponse(await service.feed(given))

    @router.get("/monitor", responses=errors(429, 503, 507))
    async def monitor() -> Response:
        """The evidence of feedback: bets against each guarantee, and one look at whether the
        labelled queries are like those that calibrated.
        """
        return JSONResponse(await service.monitor())

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    @router.get("/ready", responses=errors(503))
    async def ready() -> Response:
        """Whether requests are answered, and whether all is well."""
        live, ready = service.live, not service.batcher.stopping
        body = {
            "ready": ready,
            "source": service.source.name,
            "version": live.served.version,
            "trouble": service.trouble,
            "alarm": live.evidence.watch.alarm,
        }
        return JSONResponse(body, 200 if ready else 503)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4")

    return router


def _feedback() -> dict[str, Any]:
    schema = Feedback.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
