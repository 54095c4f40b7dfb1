"""Limits of bodies, access, and metrics of a server, around all of its routes."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter as Counts
from collections.abc import Callable, Collection
from functools import partial
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rcir.errors import RcirError

PUBLIC_PATHS = ("/", "/health", "/ready")
PAGE_PREFIX = "/page/"
# Buckets of histograms.
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RANKS = tuple(tenth / 10 for tenth in range(1, 11))
GUARANTEE = ("alpha", "delta", "terms")  # labels of a monitored guarantee


class TooLarge(RcirError):
    """A body or a picture is larger than this server allows."""


class Overloaded(RcirError):
    """The bodies of all requests in progress are larger than this server allows."""


class TooSlow(RcirError):
    """A body did not arrive in time."""


class Bounded:
    """An ASGI application with limits on the size of bodies, and on the time for their arrival.

    Args:
        app: the application.
        most: bytes of a body.
        most_together: bytes of all bodies in progress; those of one client may have half of them.
        seconds: in which a body has to arrive.
    """

    def __init__(self, app: ASGIApp, most: int, most_together: int, seconds: float) -> None:
        self.app, self.most, self.most_together, self.seconds = app, most, most_together, seconds
        self._together = 0
        self._of_client: Counts[str] = Counts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        client = (scope.get("client") or ("",))[0]  # a Unix socket has no address
        until = asyncio.get_running_loop().time() + self.seconds
        n_bytes, complete = 0, False

        def require(n: int) -> None:
            if n > self.most:
                raise TooLarge(f"the body is larger than {self.most:,} bytes: send less at a time")

        async def bounded() -> Message:
            nonlocal n_bytes, complete
            if declared.isdecimal():
                require(int(declared))  # before anything is read
            if complete:  # the next message is that the client has gone
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise TooSlow(
                    f"the body did not arrive within {self.seconds:g} s: send less at a time"
                ) from None
            complete = not message.get("more_body", False)
            n = len(message.get("body", b""))
            n_bytes += n
            self._together += n
            self._of_client[client] += n
            require(n_bytes)
            if self._together > self.most_together:
                raise Overloaded(
                    f"requests of more than {self.most_together:,} bytes are in progress: try "
                    "again in a moment"
                )
            if client and self._of_client[client] > self.most_together // 2:
                raise Overloaded(
                    f"requests of more than {self.most_together // 2:,} bytes from {client} are "
                    "in progress: try again when they are answered"
                )
            return message

        try:
            await self.app(scope, bounded, send)
        finally:
            self._together -= n_bytes
            self._of_client[client] -= n_bytes
            if not self._of_client[client]:
                del self._of_client[client]


class Access:
    """An ASGI application that refuses requests for which `refusal(scope)` is a response."""

    def __init__(self, app: ASGIApp, refusal: Callable[[Scope], JSONResponse | None]) -> None:
        self.app, self.refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self.refusal(scope) if scope["type"] == "http" else None
        await (response or self.app)(scope, receive, send)


def refuse_without_token(scope: Scope, token: str) -> JSONResponse | None:
    """Refuse requests without the bearer token (RFC 6750), except those for public paths."""
    path: str = scope["path"]
    if path in PUBLIC_PATHS or path.startswith(PAGE_PREFIX):
        return None
    scheme, _, sent = Headers(scope=scope).get("authorization", "").partition(" ")
    same = hmac.compare_digest(sent.strip(" ").encode(), token.encode())
    if same and scheme.lower() == "bearer":  # RFC 9110: in any case
        return None
    body = {"error": "unauthorized", "message": "send the header Authorization: Bearer TOKEN"}
    return JSONResponse(body, 401, {"www-authenticate": "Bearer"})


def refuse_other_sites(scope: Scope, hosts: Collection[str]) -> JSONResponse | None:
    """Refuse requests of pages of other sites, and those that name another host than `hosts`.

    The owner of such a page may let a name of the page's host point to this server, or the page may
    query this server under its own name.
    """
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    origin = headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != host
    message = None
    if _hostname(f"//{host}") not in hosts:
        message = f"this server is not {host!r}: use {', '.join(sorted(hosts))}"
    elif headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET":
        pass  # a link to this server
    elif foreign or headers.get("sec-fetch-site") == "cross-site":
        message = "pages of other sites must not use this server"
    if message is None:
        return None
    return JSONResponse({"error": "forbidden", "message": message}, 403)


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class Metrics:
    """The metrics of one server, in a registry of their own.

    The rank of an uncertainty is the share of calibration queries that are less uncertain. If
    queries resemble these, all buckets of ranks are equally full.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        histogram = partial(Histogram, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self.seconds = histogram(
            "rcir_request_seconds", "Time to answer.", ["route"], buckets=SECONDS
        )
        self.responses = counter("rcir_responses", "Responses.", ["route", "status"])
        self.batch = histogram("rcir_batch_queries", "Queries of a batch.", buckets=BATCHES)
        self.size = histogram("rcir_set_size", "Items of an answer.", buckets=SIZES)
        self.uncertainty = histogram(
            "rcir_uncertainty_rank",
            "Share of calibration queries that are less uncertain than the query.",
            buckets=RANKS,
        )
        self.refusals = counter("rcir_refusals", "Requests refused.", ["kind"])
        self.unkept = counter("rcir_answers_not_kept", "Answers that feedback cannot be given on.")
        self.feedback = counter("rcir_feedback", "Feedback.", ["match"])
        self.evidence = gauge("rcir_monitor_wealth", "Evidence against a guarantee.", GUARANTEE)
        self.alarm = gauge("rcir_monitor_alarm", "1 if it is contradicted.", GUARANTEE)
        self.model = gauge("rcir_model", "1 for the served version.", ["version"])
        self.swaps = counter("rcir_swaps", "New versions.", ["outcome"])

    def exposition(self) -> bytes:
        """Return the metrics in the format of Prometheus."""
        return generate_latest(self.registry)


class Timed:
    """An ASGI application that records its times and statuses by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self.metrics.seconds.labels(route).observe(time.perf_counter() - began)
                self.metrics.responses.labels(route, message["status"]).inc()
            await send(message)

        await self.app(scope, receive, recorded)
