"""A streamed answer to `/generate`: one request's tokens as server-sent events, as SGLang sends them.

Each event is the whole answer so far, or holds only the new tokens where the body asked for that; the last is
`[DONE]`. An error is an event too, since the status has been sent. A client that leaves aborts the request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from megloom.compute.engines.service import EngineService, EngineStopped
from megloom.compute.engines.wire import BadRequest, GenerateBody, format_completion

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class EventStream:
    """An ASGI answer over one parsed body."""

    def __init__(self, service: EngineService, body: GenerateBody) -> None:
        (self._request,) = body.requests
        self._service, self._body = service, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.current_task()
        assert sending is not None
        watcher = asyncio.ensure_future(cancel_on_disconnect(receive, sending))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async with aclosing(self._events()) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": _framed(event), "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        except asyncio.CancelledError:
            if not watcher.done() or watcher.cancelled():
                raise
            sending.uncancel()  # the client has gone; there is nobody to answer
        finally:
            watcher.cancel()

    async def _events(self) -> AsyncGenerator[Any, None]:
        num_sent = 0
        try:
            async with aclosing(self._service.stream(self._request)) as looks:
                async for request in looks:
                    if not math.isfinite(sum(request.logprobs[num_sent:])):  # JSON has no NaN
                        yield error_event(500, f"non-finite logprobs for {request.rid}")
                        return
                    yield format_completion(
                        request,
                        version=self._service.version,
                        return_logprob=self._body.return_logprob,
                        since=num_sent if self._body.is_incremental else 0,
                    )
                    num_sent = len(request.output_ids)
        except BadRequest as error:
            yield error_event(400, str(error))
        except EngineStopped as error:
            yield error_event(503, str(error))


class RefusedStream:
    """The answer to a streamed request that breaks a rule: status 200 and the error as an event."""

    def __init__(self, message: str) -> None:
        self._message = message

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _framed(error_event(400, self._message)) + b"data: [DONE]\n\n"
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": body})


def error_event(code: int, message: str) -> dict[str, Any]:
    """Returns SGLang's error event."""
    kind = "invalid_request_error" if code < 500 else "internal_server_error"
    return {"error": {"message": message, "type": kind, "code": code, "retryable": code >= 500}}


async def cancel_on_disconnect(receive: Receive, task: asyncio.Task[Any]) -> None:
    """Cancels the task when the client goes. Waits for: the disconnect message."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _framed(event: Any) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
