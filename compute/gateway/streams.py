"""A streamed answer on its way to its client, event by event.

It begins with the first delta, so that what fails before that has a status of its own. Waiting for the
client to read is what bounds the buffer: meanwhile no more is asked of the engine. Called by `app.py`, and
by `calls.py` as a `Sink`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from starlette.types import Send

from megloom.compute.gateway.bodies import client_gone
from megloom.compute.gateway.dialects.dialect import EventStream
from megloom.compute.gateway.dialects.errors import CallError
from megloom.compute.gateway.protocol import Delta, Reply

STALL_TIMEOUT_S = 30.0  # a client that reads nothing for so long has hung; its call holds an engine's place
GATHER_S = 0.02  # events that follow so soon wait for the next: each write costs as much as a piece's parsing
_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class SentStream:
    """A `Sink` that writes a dialect's events. Every wait for the client ends after `stall_timeout_s`.

    `clock` is the event loop's.
    """

    def __init__(
        self, events: EventStream, send: Send, *, stall_timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._events, self._raw_send, self._stall_timeout_s = events, send, stall_timeout_s
        self._clock = clock
        self.is_open = False
        self._held = b""  # events that go out with the next ones
        self._sent_s = -math.inf

    def is_due(self) -> bool:
        """See `Sink.is_due`."""
        return self._clock() - self._sent_s >= GATHER_S

    async def add(self, choice: int, deltas: Sequence[Delta]) -> None:
        """See `Sink.add`. Raises: CallError if the client has stalled."""
        await self._open()
        self._held += b"".join([self._events.add(choice, delta) for delta in deltas])
        if self._held and self.is_due():
            await self._send(b"")

    async def end(self, choice: int, reply: Reply) -> None:
        """See `Sink.end`."""
        await self._open()
        self._held += self._events.end(choice, reply)

    async def close(self, replies: Sequence[Reply]) -> None:
        """All is said. Raises: CallError if the client has stalled."""
        await self._send(self._events.close(replies), is_last=True)

    async def fail(self, error: CallError) -> None:
        """The answer breaks off, with an event that says why. Raises: CallError if the client has stalled."""
        await self._send(self._events.fail(error), is_last=True)

    async def _open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._held = self._events.open()
            await self._raw_send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def _send(self, data: bytes, *, is_last: bool = False) -> None:
        data, self._held = self._held + data, b""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._raw_send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except TimeoutError:
            raise client_gone(f"client read nothing for {self._stall_timeout_s:g} s") from None
        self._sent_s = self._clock()
