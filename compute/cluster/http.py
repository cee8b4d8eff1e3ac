"""What our HTTP services share: a token on every route, a server without signals, one write per answer."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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


class _OneWriteTransport:
    """A transport that sends all that is written in one turn of the loop by one system call.

    Uvicorn writes head and body apart; for short answers the second call costs as much as the rest.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._chunks: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends the data in the next turn of the loop."""
        if not self._chunks:
            self._loop.call_soon(self.flush)
        self._chunks.append(data)

    def close(self) -> None:
        """Sends what is left, then closes."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Sends what is left."""
        if self._chunks:
            self._transport.write(b"".join(self._chunks))
            self._chunks.clear()


class OneWriteProtocol(HttpToolsProtocol):
    """Uvicorn's protocol over a `_OneWriteTransport`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._one_write = _OneWriteTransport(transport)
        super().connection_made(self._one_write)  # type: ignore[arg-type]

    def eof_received(self) -> None:
        """The client sends no more: asyncio closes its transport when this returns."""
        self._one_write.flush()
