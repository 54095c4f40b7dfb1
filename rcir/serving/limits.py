"""Whom a server answers, and how much it takes from one request."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/", "/health", "/ready")  # that hold nothing which a token protects
OPEN_BELOW = "/page/"


class TooLarge(Exception):
    """A body is larger than bodies may be."""


class Limits:
    """An ASGI application behind a bound on bodies and, where one is set, a bearer token."""

    def __init__(self, app: ASGIApp, most: int, token: str | None) -> None:
        self.app, self.most, self.token = app, most, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._may(scope["path"], headers):
            words = "give the token of this server: Authorization: Bearer TOKEN"
            await _refuse(send, 401, "unauthorized", words, {b"www-authenticate": b"Bearer"})
            return
        words = f"the body is larger than {self.most:,} bytes: send less at a time"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most:
            await _refuse(send, 413, "too-large", words)
            return
        taken, begun = 0, False

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most:
                raise TooLarge
            return message

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, bounded, noting)
        except TooLarge:
            if not begun:
                await _refuse(send, 413, "too-large", words)

    def _may(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        if self.token is None or path in OPEN or path.startswith(OPEN_BELOW):
            return True
        given = headers.get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())


async def _refuse(
    send: Send, status: int, kind: str, words: str, further: Mapping[bytes, bytes] | None = None
) -> None:
    body = json.dumps({"error": kind, "message": words}).encode()
    headers: list[Any] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *(further or {}).items(),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
