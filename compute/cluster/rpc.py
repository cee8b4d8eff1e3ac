"""Messages between our own processes: length-prefixed msgpack frames over a unix socket.

Both ends may call and notify: `call` awaits an answer, `notify` does not. A handler is
`async (payload) -> payload` for a call and `(payload) -> None` for a notification; payloads are plain data
(dicts, lists, str, int, float, bytes, None). Nothing is ever unpickled. The socket's folder is private.
Frames of one connection are handled in order of arrival; calls run as tasks, notifications inline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

log = logging.getLogger(__name__)
_HEADER = struct.Struct("<I")
UNICODE_ERRORS = "surrogatepass"  # datasets and models make lone surrogates; a frame must not fail on them
MAX_FRAME_BYTES = 256 * 1024 * 1024  # one micro-batch is far below; a larger frame is a broken peer
_CALL, _ANSWER, _ERROR, _NOTIFY = 0, 1, 2, 3

CallHandler = Callable[[Any], Awaitable[Any]]
NotifyHandler = Callable[[Any], None]


class PeerGone(Exception):
    """The other process closed the connection; calls in flight have no answer."""


class RemoteError(Exception):
    """The other process's handler raised. `remote_type` is its exception class, the text its traceback."""

    def __init__(self, remote_type: str, message: str, remote_traceback: str) -> None:
        super().__init__(f"{remote_type}: {message}")
        self.remote_type = remote_type
        self.remote_message = message
        self.remote_traceback = remote_traceback


class Channel:
    """One connection. Only the event loop's thread may use it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        calls: Mapping[str, CallHandler] | None = None,
        notices: Mapping[str, NotifyHandler] | None = None,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._calls, self._notices = dict(calls or {}), dict(notices or {})
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._gone: BaseException | None = None

    async def call(self, method: str, payload: Any = None) -> Any:
        """Returns the peer's answer.

        Raises: RemoteError if the peer's handler raised; PeerGone if the connection ends first.
        """
        if self._gone:
            raise PeerGone(f"call {method}: connection closed")
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._send([_CALL, call_id, method, payload])
            return await future
        finally:
            self._waiting.pop(call_id, None)

    def notify(self, method: str, payload: Any = None) -> None:
        """Sends without waiting; a closed connection drops it (the peer's end is reported by `run`)."""
        if not self._gone:
            self._send([_NOTIFY, 0, method, payload])

    async def run(self) -> None:
        """Consumes the peer's frames. Waits for the socket. Woken by data; ends when the peer closes."""
        try:
            while True:
                (size,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                if size > MAX_FRAME_BYTES:
                    raise PeerGone(f"frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
                self._handle(_unpack(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self._gone = error
        finally:
            self._gone = self._gone or PeerGone("channel closed")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PeerGone("connection closed before the answer"))
            for task in self._running:
                task.cancel()
            self._writer.close()

    def close(self) -> None:
        """Closes the connection at once, unsent messages included; `run` then ends on both sides."""
        self._gone = self._gone or PeerGone("closed here")
        self._writer.transport.abort()  # close() would wait for a peer that no longer reads

    def _send(self, frame: list[Any]) -> None:
        data = msgpack.packb(frame, use_bin_type=True, unicode_errors=UNICODE_ERRORS)
        self._writer.write(_HEADER.pack(len(data)) + data)

    def _handle(self, frame: list[Any]) -> None:
        kind, call_id, method, payload = frame
        if kind == _NOTIFY:
            self._notices[method](payload)
        elif kind == _CALL:
            task = asyncio.get_running_loop().create_task(self._serve(call_id, method, payload))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        elif (future := self._waiting.get(call_id)) is not None and not future.done():
            if kind == _ANSWER:
                future.set_result(payload)
            else:
                future.set_exception(RemoteError(*payload))

    async def _serve(self, call_id: int, method: str, payload: Any) -> None:
        try:
            handler = self._calls.get(method)
            if handler is None:
                raise LookupError(f"no method {method!r} here (known: {', '.join(sorted(self._calls))})")
            answer = await handler(payload)
        except (
            Exception
        ) as error:  # the boundary: every failure of a handler becomes the caller's RemoteError
            text = "".join(traceback.format_exception(error))
            self._send([_ERROR, call_id, "", [type(error).__name__, str(error), text]])
        else:
            if not self._gone:
                self._send([_ANSWER, call_id, "", answer])


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, unicode_errors=UNICODE_ERRORS)


async def connect(
    socket_path: Path,
    *,
    timeout_s: float,
    calls: Mapping[str, CallHandler] | None = None,
    notices: Mapping[str, NotifyHandler] | None = None,
) -> tuple[Channel, asyncio.Task[None]]:
    """Connects to a peer that may still be starting.

    Raises: TimeoutError naming the socket, if nothing listens there within `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(str(socket_path))
            break
        except (FileNotFoundError, ConnectionRefusedError):
            if loop.time() >= deadline:
                raise TimeoutError(f"nothing listens on {socket_path} after {timeout_s:.0f} s") from None
            await asyncio.sleep(0.02)
    channel = Channel(reader, writer, calls=calls, notices=notices)
    return channel, loop.create_task(channel.run(), name=f"channel:{socket_path.name}")


async def serve_one(
    socket_path: Path,
    *,
    calls: Callable[[Callable[[], Channel]], Mapping[str, CallHandler]],
    notices: Callable[[Callable[[], Channel]], Mapping[str, NotifyHandler]] = lambda _: {},
) -> None:
    """Serves one peer at `socket_path` until it closes. Handlers get a function that returns the channel."""
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue(maxsize=1)
    holder: list[Channel] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait((reader, writer))

    server = await asyncio.start_unix_server(accept, path=str(socket_path))
    try:
        reader, writer = await accepted.get()
        server.close()
        channel = Channel(
            reader,
            writer,
            calls=calls(lambda: holder[0]),
            notices=notices(lambda: holder[0]),
        )
        holder.append(channel)
        await channel.run()
    finally:
        server.close()
        socket_path.unlink(missing_ok=True)  # noqa: ASYNC240 - one syscall on a local socket
