"""A gateway on a loopback port in a thread of its own, so that plain blocking clients can ask it.

The desk and the engine are the suite's fakes. An engine's answer is set before a request is sent; a session
is one episode, at whose end nothing may be left of it.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megloom.compute.gateway.app import GatewayApp
from megloom.compute.gateway.protocol import EpisodeCounts
from megloom.compute.gateway.server import http_server
from megloom.compute.rollout.protocol import Endpoint
from tests.compute.gateway.fakes import EngineAsk, FakeDesk, FakeEngine, Step, admission
from tests.compute.gateway.toys import toy

T = TypeVar("T")
CONTEXT_LENGTH = 4096
IDLE_S = 20.0  # within which what a request leaves must be gone
LIFETIME_S = 3600.0  # of an episode, longer than any run of the fuzzer


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """An admitted episode. `base` is the path before `/v1`."""

    episode_id: str
    base: str
    token: str


class GatewayService:
    """The gateway, its loop and its fakes. `steps` is what the engine does when it is asked next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names = itertools.count()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.steps: list[Step] = []
        self.address = ("", 0)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(timeout=60), "the gateway did not start"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "the gateway did not stop"

    @contextmanager
    def session(self) -> Iterator[Session]:
        """An episode for the block. Afterwards: nothing is live, and each call that was placed ended once."""
        name = f"fuzz-{next(self._names)}"
        endpoint: Endpoint = self._await(self._gateway.admit(admission(name, lifetime_s=LIFETIME_S)))
        counts: EpisodeCounts | None = None
        try:
            base = urlsplit(endpoint.anthropic_url).path
            yield Session(episode_id=name, base=base, token=endpoint.token)
            self._await(self._becomes_idle())
            counts = self._await(self._gateway.close_episode(name, 0))
            # Only now: a request whose client left at once may have come after the look at what is live.
            self.desk.assert_each_call_ended_once()
            assert (counts.num_calls, len(self._gateway.episodes)) == (len(self.desk.calls), 0)
        finally:  # the next example must not meet what this one left
            if counts is None:
                self._await(self._gateway.close_episode(name, 0))
            self.desk.calls.clear()
            self.desk.ends.clear()
            self.engine.asks.clear()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=IDLE_S + 10)

    async def _becomes_idle(self) -> None:
        async with asyncio.timeout(IDLE_S):
            while self._gateway.episodes.num_live or self.engine.num_open:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.001)

    def _script(self, ask: EngineAsk) -> Iterable[Step]:
        return iter(self.steps)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self.chat = toy(self._directory)
        self.desk = FakeDesk(stop_token_ids=self.chat.stop_ids, context_length=CONTEXT_LENGTH)
        self.engine = FakeEngine(self._script)
        self._gateway = GatewayApp(desk=self.desk, engines=lambda _: self.engine)
        await self._gateway.load_chats({"p": str(self._directory)})
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            self.address = listener.getsockname()[:2]
            self._server = http_server(self._gateway)
            self._started.set()
            await self._server.serve(sockets=[listener])

    def _stop(self) -> None:
        self._server.should_exit = True
