"""The server as a process, or as replicas on Ray Serve."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from rcir import trust
from rcir.errors import InvalidConfig
from rcir.serving.app import create_app
from rcir.serving.settings import Settings
from rcir.serving.sources import source_of

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    try:  # faster, if it is installed
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol

GRACE_SECONDS = 30  # for requests in progress when the server stops
APPLICATION_NAME = "rcir"
TARGET_REQUESTS = 32  # requests in progress of a replica, above which another one is started
MAX_REQUESTS = 512  # requests in progress of a replica


def serve(place: str | os.PathLike[str], settings: Settings) -> None:
    """Serve a retriever until the process is stopped; accepted requests are answered first.

    Args:
        place: folder of a retriever, or `models:/NAME@ALIAS`.
        settings: of the server.

    Raises:
        InvalidConfig: the port is in use, or the host is not this machine's.
        NoRetriever, CorruptRetriever, StaleCalibration: nothing can be served from there.
        StoreUnavailable: the file of answers and feedback cannot be used.
    """
    with listen(settings) as listening:
        app = create_app(source_of(place), settings)
        host, port = listening.getsockname()[:2]
        service = app.state.service
        print(f"{service.source.name}, version {service.served.version}", flush=True)
        print(f"serving on {address_of(host, port)}", flush=True)
        uvicorn.Server(configuration(app, settings)).run(sockets=[listening])


def configuration(app: ASGIApp, settings: Settings, **options: Any) -> uvicorn.Config:
    """Return the configuration of uvicorn for an application."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        server_header=False,
        proxy_headers=False,
        http=partial(Guarded, settings=settings),  # type: ignore[arg-type]
        **options,
    )


class Guarded(Protocol):
    """uvicorn's protocol with limits on the time for headers and on the connections of a client."""

    def __init__(self, *arguments: Any, settings: Settings, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._settings = settings
        self._headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        hosts = [(getattr(other, "client", None) or ("",))[0] for other in self.connections]
        if hosts.count((self.client or ("",))[0]) > self._settings.client_connections:
            transport.abort()
        else:
            self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()
        elif self._headers_due is None:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        def close() -> None:
            self._headers_due = None
            if not self._is_answering():
                self.transport.close()

        self._headers_due = self.loop.call_later(self._settings.header_seconds, close)

    def _stop_waiting(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


def address_of(host: str, port: int) -> str:
    """Return the URL of a server; IPv6 addresses are in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(settings: Settings) -> socket.socket:
    """Return a listening socket, so that a port in use is refused before anything is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidConfig(
            f"cannot listen on {settings.host}:{settings.port} ({error}): choose another --port, "
            "or 0 for a free one"
        ) from error
    return listening


def serve_on_ray(
    place: str | os.PathLike[str], settings: Settings, replicas: tuple[int, int], gpus: float = 0
) -> None:
    """Serve a retriever by replicas on the Ray cluster of this process, behind one address.

    It returns when the process is stopped. Each replica is a whole application that loads new
    versions by itself and reads the feedback of the others from the file.

    Args:
        place, settings: as for `rcir.serving.serve`; every node must reach all folders and files.
        replicas: minimum and maximum number.
        gpus: number of GPUs of a replica, which embed pictures; may be a fraction.

    Raises:
        RcirError: as `rcir.serving.serve` does.
    """
    from ray import serve

    from rcir.cluster import join_cluster

    source = source_of(place, on_gpu=gpus > 0)
    version = source.version()  # refuses a missing retriever here, not in the replicas
    with listen(settings) as listening:
        port = listening.getsockname()[1]

    def build() -> FastAPI:
        return create_app(source, settings)

    join_cluster()
    minimum, maximum = replicas
    deployment: Any = serve.deployment(
        serve.ingress(build)(),
        name=APPLICATION_NAME,
        autoscaling_config={
            "min_replicas": minimum,
            "max_replicas": maximum,
            "target_ongoing_requests": TARGET_REQUESTS,
        },
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_gpus": gpus, "runtime_env": {"env_vars": trust.permissions()}},
    )
    serve.start(http_options={"host": settings.host, "port": port})
    serve.run(deployment.bind(), name=APPLICATION_NAME, route_prefix="/")
    print(f"{source.name}, version {version}", flush=True)
    print(f"serving on {address_of(settings.host, port)}", flush=True)
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        serve.shutdown()
