"""The load: keep-alive HTTP/1.1 connections on raw sockets, one episode each, with bytes built beforehand.

A closed loop sends a connection's next request when the last one is answered. An open loop sends at given
times, whatever the answers do; a request that finds its connection busy waits, and its time runs all the
while. One thread, no client library: at the rates that are measured the client must not be the bottleneck.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

IDLE_S = 30.0  # without an answer for so long the run is over: the gateway hangs


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a run showed. A latency counts from when the request was due to its last byte."""

    elapsed_s: float
    latencies_s: tuple[float, ...]

    def percentile_ms(self, percent: float) -> float:
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def build_request(path: str, token: str, body: bytes) -> bytes:
    """Returns the bytes of one POST."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(kw_only=True, slots=True)
class _Connection:
    """One episode's socket. `due` are the times of requests that wait or run, `unsent` their bytes."""

    sock: socket.socket
    unsent: deque[bytes]
    due: deque[float] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)
    is_busy: bool = False


class Generator:
    """Connections to one gateway. `run` may be called again with other requests; `close` ends them."""

    def __init__(self, address: tuple[str, int], num_connections: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: list[_Connection] = []
        for _ in range(num_connections):
            sock = socket.create_connection(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(sock=sock, unsent=deque())
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._connections.append(connection)

    def close(self) -> None:
        for connection in self._connections:
            connection.sock.close()
        self._selector.close()

    def run(self, requests: Sequence[Sequence[bytes]], rate: float | None = None) -> Load:
        """Sends `requests[i]` in order on connection i, at `rate` a second in all, or as fast as it goes.

        Raises: RuntimeError for an answer other than 200, a connection that closes, and a gateway that hangs.
        """
        assert len(requests) == len(self._connections)
        for connection, own in zip(self._connections, requests, strict=True):
            connection.unsent.extend(own)
        turns = range(len(requests[0]))
        order = [connection for _ in turns for connection in self._connections]
        start = time.perf_counter()
        if rate is None:
            schedule = deque((start, connection) for connection in self._connections)
        else:
            schedule = deque((start + number / rate, connection) for number, connection in enumerate(order))
        latencies: list[float] = []
        while len(latencies) < len(order):
            now = time.perf_counter()
            while schedule and schedule[0][0] <= now:
                due, connection = schedule.popleft()
                connection.due.append(due)
                self._send_next(connection)
            wait_s = max(0.0, schedule[0][0] - now) if schedule else IDLE_S
            ready = self._selector.select(min(wait_s, IDLE_S))
            if not ready and not schedule:
                raise RuntimeError(f"no answer for {IDLE_S:.0f} s: {len(latencies)} of {len(order)} came")
            for key, _ in ready:
                if self._receive(key.data):
                    self._finish(key.data, latencies, is_closed_loop=rate is None)
        return Load(elapsed_s=time.perf_counter() - start, latencies_s=tuple(latencies))

    def _send_next(self, connection: _Connection) -> None:
        if connection.is_busy or not connection.due:
            return
        connection.is_busy = True
        connection.sock.sendall(connection.unsent.popleft())

    def _finish(self, connection: _Connection, latencies: list[float], *, is_closed_loop: bool) -> None:
        now = time.perf_counter()
        latencies.append(now - connection.due.popleft())
        connection.is_busy = False
        if is_closed_loop and connection.unsent:
            connection.due.append(now)
        self._send_next(connection)

    def _receive(self, connection: _Connection) -> bool:
        """Takes what has come; True if the answer is complete."""
        data = connection.sock.recv(1 << 16)
        received = connection.received
        received += data
        if not data:
            raise RuntimeError(f"the gateway closed the connection after {bytes(received[:300])!r}")
        if not is_complete(received):
            return False
        if not received.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"expected 200, got {bytes(received[:1000])!r}")
        received.clear()
        return True


def is_complete(received: bytes | bytearray) -> bool:
    """Whether one whole HTTP answer has come, with a length or in chunks."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(received[:end]).lower()
    at = head.find(b"content-length:")
    if at < 0:
        return received.endswith(b"\r\n0\r\n\r\n")
    length = int(head[at + len(b"content-length:") :].split(b"\r\n", 1)[0])
    return len(received) >= end + 4 + length
