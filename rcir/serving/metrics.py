"""The metrics of a server, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WATCHED = ("alpha", "delta", "terms")  # labels of a watched guarantee
RANKS = tuple(tenth / 10 for tenth in range(1, 11))


class Metrics:
    """The metrics of one server, in a registry of their own.

    How uncertain queries are is told by the share of calibration queries that are less uncertain:
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
