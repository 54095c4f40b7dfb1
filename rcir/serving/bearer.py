"""Whom a server answers: those who bear its token."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/", "/health", "/ready")  # that hold nothing which a token protects
OPEN_BELOW = "/page/"
WORDS = "give the token of this server: Authorization: Bearer TOKEN"


class Bearer:
    """An ASGI application behind a bearer token (RFC 6750)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may(scope):
            body = {"error": "unauthorized", "message": WORDS}
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
