"""Who may call: a request belongs to the episode attempt that its path names and whose token it carries.

Deny by default: the path `/r/<run>/e/<episode>/a/<attempt>/…` and the token are checked before any routing,
so that a route added later is guarded too. An unknown episode and a wrong token get the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from megloom.compute.gateway.dialects import sse
from megloom.compute.gateway.dialects.dialect import error_form
from megloom.compute.gateway.dialects.errors import CallError, ErrorKind
from megloom.compute.gateway.episodes import Episodes

EPISODE = "megloom.episode"  # where the scope holds the admitted episode
_PREFIX = re.compile(r"/r/([^/]+)/e/([^/]+)/a/([0-9]{1,9})(?=/)")


class EpisodeGuard:
    """ASGI middleware in front of the routes; they see the path below the episode's."""

    def __init__(self, app: ASGIApp, episodes: Episodes) -> None:
        self._app, self._episodes = app, episodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing here speaks websockets: the server closes the connection
        path = scope["path"]
        prefix = _PREFIX.match(path)
        below = path[prefix.end() :] if prefix else path
        try:
            if prefix is None:
                raise _denied()
            run, episode_id, attempt = prefix.groups()
            token = _token(scope["headers"])
            episode = self._episodes.find(run, episode_id, int(attempt), token)
            if episode is None:
                raise _denied()
        except CallError as error:
            await send_error(send, below, error)
            return
        inner = dict(scope)
        inner["root_path"] = prefix.group()
        inner[EPISODE] = episode
        await self._app(inner, receive, send)


def _denied() -> CallError:
    return CallError(
        ErrorKind.DENIED,
        "the path names no episode with this token; expected /r/<run>/e/<episode>/a/<attempt>/v1/… "
        "and its token as bearer token or x-api-key",
    )


def _token(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The token of a request; empty where it has none."""
    key = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:]
        if name == b"x-api-key":
            key = value
    return key


async def send_error(send: Send, below: str, error: CallError) -> None:
    """Answers with an error in the form of the path's dialect."""
    body = sse.encode(error_form(below)(error))
    await send_body(send, error.status, body, error.headers)


async def send_body(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Answers with a JSON body."""
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
