"""Around every answer of a server: which hosts it answers, how much it accepts, and metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter as Counts
from collections.abc import Sequence
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rcir.errors import RcirError

OPEN = ("/", "/health", "/ready")  # that hold nothing which a token protects
OPEN_BELOW = "/page/"
UNAUTHORIZED = "give the token of this server: Authorization: Bearer TOKEN"


class TooLarge(RcirError):
    """A body or a picture is larger than this server takes."""


class Overloaded(RcirError):
    """The bodies of all requests under way are larger than this server holds."""


class TooSlow(RcirError):
    """A body did not arrive in time."""


class Bounded:
    """An ASGI application that reads no more of a body than so many bytes, in so many seconds, and
    no more of all bodies under way than so many.

    Args:
        app: the application.
        most: bytes of a body.
        most_together: bytes of all that are under way; those of one client may have half of them.
        seconds: from the begin of a body to its end.
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
        client = (scope.get("client") or ("",))[0]  # unknown at a Unix socket
        until = asyncio.get_running_loop().time() + self.seconds
        held_bytes, complete = 0, False

        def require(n: int) -> None:
            if n > self.most:
                raise TooLarge(f"the body is larger than {self.most:,} bytes: send less at a time")

        async def bounded() -> Message:
            nonlocal held_bytes, complete
            if declared.isdecimal():
                require(int(declared))  # before anything is read
            if complete:  # what follows says that the client has gone
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
            held_bytes += n
            self._together += n
            self._of_client[client] += n
            require(held_bytes)
            if self._together > self.most_together:
                raise Overloaded(
                    f"requests of more than {self.most_together:,} bytes are under way: ask again "
                    "in a moment"
                )
            if client and self._of_client[client] > self.most_together // 2:
                raise Overloaded(
                    f"requests of more than {self.most_together // 2:,} bytes from {client} are "
                    "under way: ask again when they are answered"
                )
            return message

        try:
            await self.app(scope, bounded, send)
        finally:
            self._together -= held_bytes
            self._of_client[client] -= held_bytes
            if not self._of_client[client]:
                del self._of_client[client]


class Bearer:
    """An ASGI application behind a bearer token (RFC 6750)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._expected = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may(scope):
            headers = {"www-authenticate": "Bearer"}
            await _refused("unauthorized", UNAUTHORIZED, 401, headers)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path in OPEN or path.startswith(OPEN_BELOW):
            return True
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        same = hmac.compare_digest(token.strip(" ").encode(), self._expected)
        return same and scheme.lower() == "bearer"  # RFC 9110: in any case


class SameSite:
    """An ASGI application that answers no page from elsewhere, which asks in a visitor's name.

    Such a page may have a name of its own that its owner points here, or ask under this server's.

    Args:
        app: the application.
        hosts: the names and addresses that are this server's.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        words = self._foreign(scope) if scope["type"] == "http" else None
        if words is None:
            await self.app(scope, receive, send)
        else:
            await _refused("forbidden", words, 403)(scope, receive, send)

    def _foreign(self, scope: Scope) -> str | None:
        """Words on why a request is refused, or None."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _hostname(f"//{host}") not in self.hosts:
            return f"this server is not {host!r}: ask it by {', '.join(sorted(self.hosts))}"
        if headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET":
            return None  # a link leads here
        origin = headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != host
        if foreign or headers.get("sec-fetch-site") == "cross-site":
            return "pages from elsewhere may not ask this server"
        return None


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _refused(
    kind: str, words: str, status: int, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": kind, "message": words}, status, headers)


SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WATCHED = ("alpha", "delta", "terms")  # labels of a watched guarantee
RANKS = tuple(tenth / 10 for tenth in range(1, 11))


class Metrics:
    """The metrics of one server, in a registry of their own.

    Uncertainty is measured by the share of calibration queries that are less uncertain:
    while queries are like those, every tenth is as full as the others, whatever the model.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.seconds = Histogram(
            "rcir_request_seconds", "Time to answer.", ["route"], buckets=SECONDS, registry=own
        )
        self.responses = Counter("rcir_responses", "Responses.", ["route", "status"], registry=own)
        self.batch = Histogram(
            "rcir_batch_queries", "Queries of a batch.", buckets=BATCHES, registry=own
        )
        self.size = Histogram("rcir_set_size", "Items of an answer.", buckets=SIZES, registry=own)
        self.uncertainty = Histogram(
            "rcir_uncertainty_rank",
            "Share of calibration queries that are less uncertain than the query.",
            buckets=RANKS,
            registry=own,
        )
        self.refusals = Counter("rcir_refusals", "Requests refused.", ["kind"], registry=own)
        self.unkept = Counter(
            "rcir_answers_not_kept", "Answers that feedback cannot be given on.", registry=own
        )
        self.feedback = Counter("rcir_feedback", "Feedback.", ["match"], registry=own)
        self.evidence = Gauge(
            "rcir_monitor_wealth", "Evidence against a guarantee.", WATCHED, registry=own
        )
        self.alarm = Gauge(
            "rcir_monitor_alarm", "Whether it is contradicted.", WATCHED, registry=own
        )
        self.model = Gauge("rcir_model", "1 for what is served.", ["version"], registry=own)
        self.swaps = Counter("rcir_swaps", "New versions.", ["outcome"], registry=own)

    def exposition(self) -> bytes:
        """Return the metrics in the format of Prometheus."""
        return generate_latest(self.registry)


class Timed:
    """An ASGI application whose times and statuses are observed, by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self.metrics.seconds.labels(route).observe(time.perf_counter() - began)
                self.metrics.responses.labels(route, message["status"]).inc()
            await send(message)

        await self.app(scope, receive, noting)
