"""A streamed answer on its way to its client, event by event.

It begins with the first delta, so that what fails before that has a status of its own. A write costs as much
as a piece's parsing, so deltas that follow a write too soon wait, at most `GATHER_S`, and go out together.
Waiting for the client to read is what bounds the buffer: meanwhile no more is asked of the engine. Called by
`app.py`, and by `calls.py` as a `Sink`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from starlette.types import Send

from megloom.compute.gateway.bodies import client_gone
from megloom.compute.gateway.dialects.dialect import EventStream
from megloom.compute.gateway.dialects.errors import CallError
from megloom.compute.gateway.protocol import Delta, Reply

STALL_TIMEOUT_S = 30.0  # a client that reads nothing for so long has hung; its call holds an engine's place
GATHER_S = 0.02  # a reader sees no difference; an engine makes several pieces in that time
_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class Timers(Protocol):
    """The event loop's clock and its timers."""

    def time(self) -> float: ...
    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle: ...


class SentStream:
    """A `Sink` that writes a dialect's events. Every wait for the client ends after `stall_timeout_s`."""

    def __init__(self, events: EventStream, send: Send, *, stall_timeout_s: float, timers: Timers) -> None:
        self._events, self._raw_send, self._stall_timeout_s = events, send, stall_timeout_s
        self._timers = timers
        self.is_open = False
        self._has_head = False
        self._held = b""  # events that go out with the next ones
        self._grown: dict[int, Callable[[], Sequence[Delta]]] = {}  # by choice: where more deltas wait
        self._sent_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    async def grow(self, choice: int, deltas: Callable[[], Sequence[Delta]]) -> None:
        """See `Sink.grow`. Raises: CallError if the client has stalled."""
        self._grown[choice] = deltas
        await self._write_when_due()

    async def add(self, choice: int, deltas: Sequence[Delta]) -> None:
        """See `Sink.add`. Raises: CallError if the client has stalled."""
        self._grown.pop(choice, None)
        self._hold(choice, deltas)
        await self._write_when_due()

    async def end(self, choice: int, reply: Reply) -> None:
        """See `Sink.end`. It waits for the stream's close, or another choice's deltas."""
        self._grown.pop(choice, None)
        self._begin()
        self._held += self._events.end(choice, reply)
        self._flush_in(GATHER_S)

    async def close(self, replies: Sequence[Reply]) -> None:
        """All is said. Raises: CallError if the client has stalled."""
        await self._send(self._events.close(replies), is_last=True)

    async def fail(self, error: CallError) -> None:
        """The answer breaks off, with an event that says why. Raises: CallError if the client has stalled."""
        await self._send(self._events.fail(error), is_last=True)

    @contextmanager
    def lifetime(self) -> Iterator[None]:
        """Within it held deltas go out by themselves; after it no timer is left."""
        try:
            yield
        finally:
            self._stop_timer()

    def _begin(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._held = self._events.open()

    def _hold(self, choice: int, deltas: Sequence[Delta]) -> None:
        if deltas:
            self._begin()
            self._held += b"".join([self._events.add(choice, delta) for delta in deltas])

    async def _write_when_due(self) -> None:
        wait_s = self._sent_s + GATHER_S - self._timers.time()
        if wait_s <= 0:
            await self._write()
        else:
            self._flush_in(wait_s)

    def _flush_in(self, wait_s: float) -> None:
        if self._timer is None:
            self._timer = self._timers.call_later(wait_s, self._start_flush)

    def _start_flush(self) -> None:
        self._timer = None
        self._flushing = asyncio.ensure_future(self._write())
        # Its failure is raised by the next write; where none follows, nobody has to hear of it.
        self._flushing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _write(self) -> None:
        grown, self._grown = self._grown, {}
        for choice, deltas in grown.items():
            self._hold(choice, deltas())
        if self._held:
            await self._send(b"")

    async def _send(self, data: bytes, *, is_last: bool = False) -> None:
        self._stop_timer()
        if is_last:
            self._grown.clear()  # a flush that has only just begun must find nothing to say
        data, self._held = self._held + data, b""
        try:
            async with asyncio.timeout(self._stall_timeout_s), self._writing:
                if self._flushing is not None and self._flushing.done():
                    flushed, self._flushing = self._flushing, None
                    flushed.result()
                if not self._has_head:
                    self._has_head = True
                    await self._raw_send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await self._raw_send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except TimeoutError:
            raise client_gone(f"client read nothing for {self._stall_timeout_s:g} s") from None
        self._sent_s = self._timers.time()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
