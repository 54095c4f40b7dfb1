"""Settings of a server."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rcir.errors import InvalidConfig

TOKEN = "RCIR_TOKEN"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Args:
        host, port: where it listens; port 0 takes a free one.
        token: what requests must bear; needed unless the host is a loopback address.
        store: SQLite file of answers and feedback; None keeps none, and takes no feedback.
        pictures: folder with a picture of each item, under its id; without one they are taken from
            the data set that the retriever was made of, where it is at hand.
        capacity: queries that may wait.
        most_bytes: of a request; of all that are under way together, eight times as much.
        most_pixels: of a picture, known before it is decoded; of all pictures of a request
            together, eight times as many.
        decode_seconds: for the pictures of a request; what takes longer is refused.
        header_seconds: for the headers of a request; a connection without them is closed.
        body_seconds: for the body of a request.
        client_connections: of one address, such as that of a reverse proxy; more are closed. Its
            bodies under way may have half of the bytes that all together may have.
        poll: seconds between two looks for a new version; 0 looks never.
        feedback_days: days after which a monitored query without feedback counts as a miss; later
            queries with feedback wait for it until then.

    Raises:
        InvalidConfig: of a value, or no token guards an address that others reach.

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
        for name in ("port", "capacity", "most_bytes", "most_pixels", "client_connections"):
            value, least = getattr(self, name), int(name != "port")
            if value < least:
                raise InvalidConfig(f"{name} is {value}; it must be at least {least}")
        if not 0 <= self.poll < float("inf"):
            raise InvalidConfig(f"poll is {self.poll}; it must be a number of seconds, at least 0")
        for name in ("decode_seconds", "header_seconds", "body_seconds"):
            if not 0 < (seconds := getattr(self, name)) < float("inf"):
                raise InvalidConfig(f"{name} is {seconds}; it must be a finite number above 0")
        if not 0 < self.feedback_days < float("inf"):
            raise InvalidConfig(
                f"feedback_days is {self.feedback_days}; it must be a finite number of days above 0"
            )
        if self.pictures is not None and not self.pictures.is_dir():
            raise InvalidConfig(f"pictures is {self.pictures}: there is no such folder")
        if self.token is not None and not re.fullmatch("[!-~]{16,}", self.token):
            raise InvalidConfig(
                f"{TOKEN} must be 16 or more letters, digits and signs of ASCII, without spaces "
                f"({len(self.token)} characters were given), for instance those of `openssl rand "
                "-hex 16`"
            )
        if not self.local and self.token is None:
            raise InvalidConfig(
                f"{self.host} can be reached from other machines: set {TOKEN} to what their "
                f"requests must bear, or listen on {LOOPBACK}"
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

    @staticmethod
    def token_of_environment() -> str | None:
        """The token that `RCIR_TOKEN` holds, if it does."""
        return os.environ.get(TOKEN) or None
