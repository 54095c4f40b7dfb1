"""Limits of bodies, access, and metrics of a server, around all of its routes."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter as Counts
from collections.abc import Callable, Collection
from functools import partial
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rcir.serving.errors import Busy, TooLarge, TooSlow

PUBLIC_PATHS = ("/", "/health", "/ready")
PAGE_PREFIX = "/page/"
SECONDS_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZE_BUCKETS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RANK_BUCKETS = tuple(tenth / 10 for tenth in range(1, 11))
GUARANTEE_LABELS = ("alpha", "delta", "terms")


class Shared:
    """A limited amount; a client may use half of it, or more by one request.

    Messages describe the amount in use by `unit`, such as "bytes are in progress".
    """

    def __init__(self, limit: int, unit: str) -> None:
        self.limit, self.unit, self.used = limit, unit, 0
        self._by_client: Counts[str] = Counts()

    def take(self, client: str, n: int) -> None:
        """Use n more for the address of a client, "" if it is unknown, or raise `Busy`."""
        by_client = self._by_client[client]
        if self.used + n > self.limit:
            raise Busy(
                f"{self.used:,} {self.unit}, and {n:,} more would exceed the limit of "
                f"{self.limit:,}: try again in a moment"
            )
        if client and by_client and by_client + n > self.limit // 2:
            raise Busy(
                f"{by_client:,} {self.unit} for {client}, and {n:,} more would exceed its limit of "
                f"{self.limit // 2:,}: try again when they are answered"
            )
        self.used += n
        self._by_client[client] += n

    def give_back(self, client: str, n: int) -> None:
        """End the use of n."""
        self.used -= n
        self._by_client[client] -= n
        if not self._by_client[client]:
            del self._by_client[client]


class Bounded:
    """An ASGI application with limits on the bytes of a body and of all bodies in progress.

    A body has some seconds to arrive.
    """

    def __init__(self, app: ASGIApp, limit: int, total: int, seconds: float) -> None:
        self.app, self.limit, self.seconds = app, limit, seconds
        self._bytes = Shared(total, "bytes of requests are in progress")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        client = (scope.get("client") or ("",))[0]  # a Unix socket has no address
        until = asyncio.get_running_loop().time() + self.seconds
        n_bytes, complete = 0, False

        def require(n: int) -> None:
            if n > self.limit:
                raise TooLarge(f"the body is larger than {self.limit:,} bytes: send less at a time")

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
            require(n_bytes + n)
            self._bytes.take(client, n)
            n_bytes += n
            return message

        try:
            await self.app(scope, bounded, send)
        finally:
            self._bytes.give_back(client, n_bytes)


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

    A page may query this server by its address, or by a name of its own host that points here.
    """
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    is_link = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
    is_foreign = origin is not None and origin.partition("://")[2] != host
    try:
        hostname = urlsplit(f"//{host}").hostname
    except ValueError:
        hostname = None
    if hostname not in hosts:
        message = f"this server is not {host!r}: use {', '.join(sorted(hosts))}"
    elif not is_link and (is_foreign or headers.get("sec-fetch-site") == "cross-site"):
        message = "pages of other sites must not use this server"
    else:
        return None
    return JSONResponse({"error": "forbidden", "message": message}, 403)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        histogram = partial(Histogram, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self.seconds = histogram(
            "rcir_request_seconds", "Time to answer.", ["route"], buckets=SECONDS_BUCKETS
        )
        self.responses = counter("rcir_responses", "Responses.", ["route", "status"])
        self.batch = histogram("rcir_batch_queries", "Queries of a batch.", buckets=BATCH_BUCKETS)
        self.size = histogram("rcir_set_size", "Items of an answer.", buckets=SIZE_BUCKETS)
        self.uncertainty = histogram(
            "rcir_uncertainty_rank",
            "Share of calibration queries that are less uncertain than the query.",
            buckets=RANK_BUCKETS,
        )
        self.refusals = counter("rcir_refusals", "Requests refused.", ["kind"])
        self.not_stored = counter(
            "rcir_answers_not_kept", "Answers that feedback cannot be given on."
        )
        self.feedback = counter("rcir_feedback", "Feedback.", ["match"])
        self.evidence = gauge(
            "rcir_monitor_wealth", "Evidence against a guarantee.", GUARANTEE_LABELS
        )
        self.alarm = gauge("rcir_monitor_alarm", "1 if it is contradicted.", GUARANTEE_LABELS)
        self.drift = gauge("rcir_drift_wealth", "Evidence that queries have changed.")
        self.drift_alarm = gauge("rcir_drift_alarm", "1 if queries have changed.")
        self.model = gauge("rcir_model", "1 for the served version.", ["version"])
        self.swaps = counter("rcir_swaps", "New versions.", ["outcome"])


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
