"""A streamed answer on its way to its client, event by event.

It begins with the first delta, so that what fails before that has a status of its own. A write costs as much
as a piece's parsing, so deltas that follow a write within `GATHER_S` wait for the next ones, for `HOLD_S` or
one look of the watch longer. Waiting for the client to read is what bounds the buffer: meanwhile no more is
asked of the engine. Called by `app.py`, and by `calls.py` as a `Sink`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from starlette.types import Send

from megloom.compute.gateway.bodies import client_gone
from megloom.compute.gateway.dialects.dialect import EventStream
from megloom.compute.gateway.dialects.errors import CallError
from megloom.compute.gateway.protocol import Delta, Reply

STALL_TIMEOUT_S = 30.0  # a client that reads nothing for so long has hung; its call holds an engine's place
GATHER_S = 0.02  # an engine makes several pieces in that time
HOLD_S = 0.1  # a reader hardly sees it; a shorter one splits the last write of a gateway with much to do
LOOK_S = 0.05
Stop = Callable[[CallError], None]
_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class Timers(Protocol):
    """The event loop's clock and its timers."""

    def time(self) -> float: ...
    def call_later(
        self, delay: float, callback: Callable[[Timers], None], timers: Timers, /
    ) -> asyncio.TimerHandle: ...


class StreamWatch:
    """Looks at a gateway's open streams every `LOOK_S`: one timer, where two for each stream would cost a
    twentieth of its call. `timers` is the event loop if None.
    """

    def __init__(self, *, stall_timeout_s: float = STALL_TIMEOUT_S, timers: Timers | None = None) -> None:
        self._stall_timeout_s, self._timers = stall_timeout_s, timers
        self._streams: set[SentStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, events: EventStream, send: Send, stop: Stop) -> SentStream:
        """A stream that is watched until `close`. `stop` ends the call whose client hangs."""
        timers = self._timers or asyncio.get_running_loop()
        stream = SentStream(events, send, stop, stall_timeout_s=self._stall_timeout_s, clock=timers.time)
        self._streams.add(stream)
        if self._timer is None:
            self._timer = timers.call_later(LOOK_S, self._look, timers)
        return stream

    def close(self, stream: SentStream) -> None:
        """Looks at it no more."""
        self._streams.discard(stream)

    def _look(self, timers: Timers) -> None:
        for stream in self._streams:
            stream.look()
        self._timer = timers.call_later(LOOK_S, self._look, timers) if self._streams else None


class SentStream:
    """A `Sink` that writes a dialect's events, and in the watch's `look` what has been held for too long."""

    def __init__(
        self,
        events: EventStream,
        send: Send,
        stop: Stop,
        *,
        stall_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._events, self._raw_send, self._stop = events, send, stop
        self._stall_timeout_s, self._clock = stall_timeout_s, clock
        self.is_open = False
        self._has_head = False
        self._held = b""  # events that go out with the next ones
        self._grown: dict[int, Callable[[], Sequence[Delta]]] = {}  # by choice: where more deltas wait
        self._sent_s = -math.inf
        self._flushing: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._began_s: float | None = None  # when the write that is under way did

    async def grow(self, choice: int, deltas: Callable[[], Sequence[Delta]]) -> None:
        """See `Sink.grow`."""
        self._grown[choice] = deltas
        await self._write_when_due()

    async def add(self, choice: int, deltas: Sequence[Delta]) -> None:
        """See `Sink.add`."""
        self._grown.pop(choice, None)
        self._hold(choice, deltas)
        await self._write_when_due()

    async def end(self, choice: int, reply: Reply) -> None:
        """See `Sink.end`. It waits for the stream's close, or another choice's deltas."""
        self._grown.pop(choice, None)
        self._begin()
        self._held += self._events.end(choice, reply)

    async def close(self, replies: Sequence[Reply]) -> None:
        """All is said."""
        await self._send(self._events.close(replies), is_last=True)

    async def fail(self, error: CallError) -> None:
        """The answer breaks off with an event that says why. Not watched: a client that hangs is left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send(self._events.fail(error), is_last=True)
        if self._flushing is not None:
            self._flushing.cancel()

    def look(self) -> None:
        """Writes what has been held for too long, and stops the call if a write hangs."""
        now = self._clock()
        if self._began_s is not None:
            if now - self._began_s >= self._stall_timeout_s:
                self._began_s = math.inf  # says it once
                if self._flushing is not None:
                    self._flushing.cancel()
                self._stop(client_gone(f"client read nothing for {self._stall_timeout_s:g} s"))
        elif (self._held or self._grown) and now - self._sent_s >= HOLD_S:
            self._flushing = asyncio.ensure_future(self._write())
            # Its failure is raised by the next write; where none follows, nobody has to hear of it.
            self._flushing.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _begin(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._held = self._events.open()

    def _hold(self, choice: int, deltas: Sequence[Delta]) -> None:
        if deltas:
            self._begin()
            self._held += b"".join([self._events.add(choice, delta) for delta in deltas])

    async def _write_when_due(self) -> None:
        if self._clock() - self._sent_s >= GATHER_S:
            await self._write()

    async def _write(self) -> None:
        grown, self._grown = self._grown, {}
        for choice, deltas in grown.items():
            self._hold(choice, deltas())
        if self._held:
            await self._send(b"")

    async def _send(self, data: bytes, *, is_last: bool = False) -> None:
        if is_last:
            self._grown.clear()  # a flush that has only just begun must find nothing to say
        data, self._held = self._held + data, b""
        async with self._writing:
            if self._flushing is not None and self._flushing.done():
                flushed, self._flushing = self._flushing, None
                if not flushed.cancelled():
                    flushed.result()
            self._began_s = self._clock()
            if not self._has_head:
                self._has_head = True
                await self._raw_send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._raw_send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._began_s, self._sent_s = None, self._clock()
