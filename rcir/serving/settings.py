"""Settings of a server."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from pathlib import Path

from rcir.errors import InvalidConfig
from rcir.options import require_at_least

TOKEN_VARIABLE = "RCIR_TOKEN"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Args:
        host: address to listen on; any other than loopback requires RCIR_TOKEN.
        port: port to listen on; 0 takes a free one.
        token: bearer token of requests; required unless the host is a loopback address.
        store: SQLite file that keeps answers and feedback; without one, feedback is refused.
        pictures: folder with a picture of each item, named by its id; unless given, the images of
            the retriever's data set, if it is available.
        capacity: queries that may wait for the model.
        most_bytes: of a request; all requests in progress may have eight times as many.
        most_pixels: of a picture; all pictures of a request may have eight times as many.
        decode_seconds: maximum time to decode the pictures of a request.
        header_seconds: maximum time for the headers of a request to arrive.
        body_seconds: maximum time for the body of a request to arrive.
        client_connections: connections of one address, such as that of a reverse proxy; further
            ones are closed. Its requests in progress may have half of the bytes that all may have.
        poll: seconds between two checks for a new version; 0 disables them.
        feedback_days: days after which a monitored query without feedback counts as a miss; later
            queries with feedback wait for it until then.

    Raises:
        InvalidConfig: a value is out of range, or an address of the network has no token.

    Example:
        >>> Settings(host="0.0.0.0")
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: 0.0.0.0 can be reached from other machines: set RCIR_TOKEN to ...
    """

    host: str = LOOPBACK
    port: int = 8000
    token: str | None = None
    store: Path | None = None
    pictures: Path | None = None
    capacity: int = 1024
    most_bytes: int = 32 * 2**20
    most_pixels: int = 50_000_000
    decode_seconds: float = 10.0
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    client_connections: int = 256
    poll: float = 5.0
    feedback_days: float = 7.0

    def __post_init__(self) -> None:
        require_at_least(self, port=0, poll=0, capacity=1, most_bytes=1, most_pixels=1)
        require_at_least(self, client_connections=1)
        for name in ("decode_seconds", "header_seconds", "body_seconds", "feedback_days"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise InvalidConfig(f"{name} is {value}; it must be a finite number above 0")
        if self.pictures is not None and not self.pictures.is_dir():
            raise InvalidConfig(f"pictures is {self.pictures}: there is no such folder")
        if self.token is not None and not re.fullmatch("[!-~]{16,}", self.token):
            raise InvalidConfig(
                f"{TOKEN_VARIABLE} has {len(self.token)} characters; it must have at least 16 "
                "ASCII characters without spaces, such as the output of `openssl rand -hex 16`"
            )
        if not self.local and self.token is None:
            raise InvalidConfig(
                f"{self.host} can be reached from other machines: set {TOKEN_VARIABLE} to a "
                f"token that requests must send, or listen on {LOOPBACK}"
            )

    @property
    def local(self) -> bool:
        """True if only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
