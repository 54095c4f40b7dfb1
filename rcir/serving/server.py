"""The server as a process."""

from __future__ import annotations

import os
import socket

import uvicorn

from rcir.errors import InvalidConfig
from rcir.serving.app import create_app
from rcir.serving.served import source_of
from rcir.serving.settings import Settings

GRACE = 30  # seconds that requests under way are given when the server stops


def serve(place: str | os.PathLike[str], settings: Settings) -> None:
    """Serve a retriever until the process is told to stop; what was accepted is answered first.

    Args:
        place: folder of a retriever, or `models:/NAME@ALIAS`.

    Raises:
        InvalidConfig: the port is taken, or the host is not this machine's.
        RcirError: as `create_app` does.
    """
    listening = listen(settings)
    with listening:
        app = create_app(source_of(place), settings)
        host, port = listening.getsockname()[:2]
        service = app.state.service
        print(f"{service.source.name}, version {service.served.version}", flush=True)
        print(f"serving on {address_of(host, port)}", flush=True)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=GRACE,
            server_header=False,
            proxy_headers=False,
        )
        uvicorn.Server(config).run(sockets=[listening])


def address_of(host: str, port: int) -> str:
    """The address that a browser opens.

    Example:
        >>> address_of("::1", 8000)
        'http://[::1]:8000'
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(settings: Settings) -> socket.socket:
    """A socket that listens already, so that a taken port shows before anything is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidConfig(
            f"{settings.host}:{settings.port} cannot be listened on ({error}): choose another "
            "--port, or 0 for a free one"
        ) from error
    return listening
