"""A desk, engines driven by a plain function, and a gateway that serves them on a real loopback port."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import uvicorn

from megloom.compute.cluster.http import OneWriteProtocol, QuietServer
from megloom.compute.gateway.app import GatewayApp
from megloom.compute.gateway.protocol import (
    Admission,
    AgentRoute,
    CallEnd,
    CallRequest,
    Placement,
    Sampled,
)
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.rollout.protocol import Endpoint
from tests.compute.gateway.toys import toy

DEADLINE_S = 60.0  # of a whole test: a hung connection fails by its name, not by the runner's


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAsk:
    """What an engine was asked."""

    rid: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    incremental: bool


# A piece and its finish reason, an error to raise, or something to wait for.
Step = tuple[Sampled, str | None] | Exception | asyncio.Event
Script = Callable[[EngineAsk], Iterable[Step]]


class FakeEngine:
    """`StreamingEngine` that does what a function of the request says."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asks: list[EngineAsk] = []
        self.num_open = 0
        self.num_left_early = 0

    async def stream(self, *, prompt_ids: Any, stop_token_ids: Any, **rest: Any) -> AsyncIterator[Any]:
        ask = EngineAsk(prompt_ids=tuple(prompt_ids), stop_token_ids=tuple(stop_token_ids), **rest)
        self.asks.append(ask)
        self.num_open += 1
        is_whole = False
        try:
            for step in self._script(ask):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    is_whole = True
                    raise step
                else:
                    await asyncio.sleep(0)
                    is_whole = step[1] is not None
                    yield step
        finally:
            self.num_open -= 1
            self.num_left_early += not is_whole


class FakeDesk:
    """`CallDesk` with one engine per place, named in the order in which they are given."""

    def __init__(self, *, stop_token_ids: tuple[int, ...], context_length: int | None = None) -> None:
        self.stop_token_ids, self.context_length = stop_token_ids, context_length
        self.calls: dict[str, CallRequest] = {}
        self.causes: list[str] = []
        self.ends: list[CallEnd] = []
        self.refusal: Exception | None = None
        self.replace_refusal: Exception | None = None
        self.room: asyncio.Event | None = None  # places wait for it
        self.end_gate: asyncio.Event | None = None
        self._num_places = 0

    async def place(self, call: CallRequest) -> Placement:
        if self.refusal is not None:
            raise self.refusal
        assert call.invocation_id not in self.calls
        self.calls[call.invocation_id] = call
        if self.room is not None:
            await self.room.wait()
        return self._placement(call.invocation_id)

    async def replace(self, invocation_id: str, rid: str, cause: str) -> Placement:
        self.causes.append(cause)
        if self.replace_refusal is not None:
            raise self.replace_refusal
        return self._placement(invocation_id)

    async def end(self, end: CallEnd) -> None:
        if self.end_gate is not None:
            await self.end_gate.wait()
        self.ends.append(end)

    def end_of(self, invocation_id: str) -> CallEnd:
        """The only end that was told of a call."""
        (end,) = [end for end in self.ends if end.invocation_id == invocation_id]
        return end

    def assert_each_call_ended_once(self) -> None:
        told = Counter(end.invocation_id for end in self.ends)
        assert told == dict.fromkeys(self.calls, 1)

    def _placement(self, invocation_id: str) -> Placement:
        self._num_places += 1
        return Placement(
            invocation_id=invocation_id,
            rid=f"{self._num_places:032x}",
            policy="p",
            url="",
            token="",
            engine=f"cell-{self._num_places}",
            seed=self._num_places,
            stop_token_ids=self.stop_token_ids,
            context_length=self.context_length,
        )


@dataclass(kw_only=True, slots=True)
class Served:
    """A gateway on a port, with its fakes."""

    gateway: GatewayApp
    desk: FakeDesk
    engine: FakeEngine
    chat: ChatTemplate
    base_url: str
    clients: list[Any]

    async def admit(self, episode_id: str = "g000000-0000-m000", **overrides: Any) -> Endpoint:
        return await self.gateway.admit(admission(episode_id, **overrides))

    def openai(self, endpoint: Endpoint, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": DEADLINE_S, **options}
        client = openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, **options)
        self.clients.append(client)
        return client

    def anthropic(self, endpoint: Endpoint, **options: Any) -> anthropic.AsyncAnthropic:
        options = {"max_retries": 0, "timeout": DEADLINE_S, **options}
        client = anthropic.AsyncAnthropic(base_url=endpoint.anthropic_url, api_key=endpoint.token, **options)
        self.clients.append(client)
        return client

    async def assert_idle(self) -> None:
        """No request, engine stream or untold end is left. Requests end a moment after their answer."""
        for _ in range(200):
            if self.gateway.episodes.num_live == 0 and self.engine.num_open == 0:
                break
            await asyncio.sleep(0.01)
        assert self.gateway.episodes.num_live == 0
        assert self.engine.num_open == 0
        self.desk.assert_each_call_ended_once()


def admission(episode_id: str = "g000000-0000-m000", **overrides: Any) -> Admission:
    values: dict[str, Any] = {
        "run": "r",
        "episode_id": episode_id,
        "attempt": 0,
        "token": f"secret-of-{episode_id}",
        "agents": {
            "coder": AgentRoute(policy="p", max_tokens=256, temperature=0.7),
            "judge": AgentRoute(policy="p", max_tokens=16, temperature=1.0),
        },
        "lifetime_s": 60.0,
    }
    return Admission(**{**values, **overrides})


def pieces(
    ids: Iterable[int],
    finish: str | None = "stop",
    *,
    size: int | None = None,
    version: int = 3,
    first: int = 0,
) -> Iterator[tuple[Sampled, str | None]]:
    """An answer in pieces of `size` tokens, the last with its finish. `first` counts earlier tokens."""
    ids = tuple(ids)
    size = size or max(len(ids), 1)
    for start in range(0, max(len(ids), 1), size):
        part = ids[start : start + size]
        at = first + start
        sampled = Sampled(
            token_ids=part,
            logprobs=tuple(-0.25 - 0.001 * (at + position) for position in range(len(part))),
            version_spans=((version, at, at + len(part)),) if part else (),
        )
        yield sampled, finish if start + size >= len(ids) else None


def says(text: str, chat: ChatTemplate, *, finish: str = "stop") -> Script:
    """A script that answers with a text: in one piece, or token by token for a stream."""
    ids = chat.encode(text) + ((chat.stop_ids[0],) if finish == "stop" else ())
    return lambda ask: pieces(ids, finish, size=1 if ask.incremental else None)


@asynccontextmanager
async def served(
    directory: Path,
    script: Callable[[ChatTemplate], Script],
    *,
    template: str | None = None,
    context_length: int | None = None,
    send_buffer_bytes: int | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """A gateway with a toy chat for policy `p`, served until the block ends; it must be idle then.

    `send_buffer_bytes` bounds what the kernel takes of an answer before its client reads.
    """
    directory.mkdir(exist_ok=True)
    chat = toy(directory) if template is None else toy(directory, template)
    desk = FakeDesk(stop_token_ids=chat.stop_ids, context_length=context_length)
    engine = FakeEngine(script(chat))
    gateway = GatewayApp(desk=desk, engines=lambda _: engine, clock=lambda: 1_700_000_000.5, **options)
    await gateway.load_chats({"p": str(directory)})
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        if send_buffer_bytes is not None:  # connections have it from their listener
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        server = QuietServer(
            uvicorn.Config(
                gateway.app,
                http=OneWriteProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gateway.set_base_url(base_url)
        world = Served(gateway=gateway, desk=desk, engine=engine, chat=chat, base_url=base_url, clients=[])
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield world
                await world.assert_idle()
        finally:
            for client in world.clients:
                await client.close()
            server.should_exit = True
            await serving


class RawClient:
    """One connection spoken by hand: for what official clients never send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, base_url: str) -> RawClient:
        host, port = base_url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 26))

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and body of an answer that is not streamed."""
        self.send(method, path, body, headers=headers)
        await self.writer.drain()
        status, answered = await self.read_head()
        return status, answered, await self._reader.readexactly(int(answered.get("content-length", "0")))

    def send(
        self, method: str, path: str, body: bytes = b"", *, headers: dict[str, str] | None = None
    ) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), {name.lower(): value for name, value in headers.items()}

    async def read(self, size: int) -> bytes:
        return await self._reader.read(size)

    def close(self) -> None:
        self.writer.transport.abort()
