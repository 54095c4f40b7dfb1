"""Whom a server answers, and how much it takes of one request."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rcir.errors import RcirError

OPEN = ("/", "/health", "/ready")  # that hold nothing which a token protects
OPEN_BELOW = "/page/"
UNAUTHORIZED = "give the token of this server: Authorization: Bearer TOKEN"


class TooLarge(RcirError):
    """A body or a picture is larger than this server takes."""


class Bounded:
    """An ASGI application that reads no more of a body than so many bytes."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        taken = int(declared) if declared.isdecimal() else 0

        async def bounded() -> Message:
            nonlocal taken
            if taken <= self.most:
                message = await receive()
                taken += 0 if declared else len(message.get("body", b""))
            if taken > self.most:
                raise TooLarge(f"the body is larger than {self.most:,} bytes: send less at a time")
            return message

        await self.app(scope, bounded, send)


class Bearer:
    """An ASGI application behind a bearer token (RFC 6750)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may(scope):
            body = {"error": "unauthorized", "message": UNAUTHORIZED}
            refused = JSONResponse(body, 401, {"www-authenticate": "Bearer"})
            await refused(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path in OPEN or path.startswith(OPEN_BELOW):
            return True
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode(), self._expected)
