"""What our HTTP services share: a token on every route, and a server that leaves signals to its process."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterator

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class TokenGuard:
    """ASGI middleware: 401 to every HTTP request without the bearer token, before any routing.

    Deny by default: a route that is added later is guarded too.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        if not token:
            raise ValueError("the service needs a token, got an empty one")
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if scope["type"] == "http" and hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        body = {"error": {"message": "missing or wrong token", "code": 401}}
        await JSONResponse(body, status_code=401)(scope, receive, send)


class QuietServer(uvicorn.Server):
    """Uvicorn without its own signal handling: that one raises the signal again, before any clean-up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
