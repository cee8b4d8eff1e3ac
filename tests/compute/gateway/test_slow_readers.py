"""Clients that read a stream slowly, or not at all: the flow waits for them, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megloom.compute.gateway.protocol import AgentRoute
from megloom.compute.gateway.streams import GATHER_S
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.rollout.protocol import Endpoint
from tests.compute.gateway.fakes import EngineAsk, RawClient, Script, Served, Step, pieces, served

HI: list[Any] = [{"role": "user", "content": "hi"}]


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what other tasks bring about."""
    while not condition():  # noqa: ASYNC110 - what is waited for is a fact, not an event
        await asyncio.sleep(0.001)


async def open_stream(world: Served, endpoint: Endpoint, *, rcvbuf: int) -> RawClient:
    """A streaming request on a connection that takes in little at a time."""
    host, port = world.base_url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    client = RawClient(*await asyncio.open_connection(sock=raw, limit=1024))
    body = json.dumps({"model": "coder", "messages": HI, "stream": True, "logprobs": True}).encode()
    path = endpoint.openai_url.removeprefix(world.base_url) + "/chat/completions"
    client.send("POST", path, body, headers={"authorization": f"Bearer {endpoint.token}"})
    return client


def test_a_client_that_reads_nothing_stops_the_flow_and_fails_at_its_deadline(tmp_path: Path) -> None:
    told = 0

    def script(chat: ChatTemplate) -> Script:
        def answer(ask: EngineAsk) -> Iterable[Step]:
            nonlocal told
            for number in range(10_000):
                told += 1
                yield next(iter(pieces(chat.encode("abcdefgh") * 64, None, first=number * 512)))

        return answer

    async def scenario() -> None:
        async with served(tmp_path, script, stall_timeout_s=0.2) as world:
            endpoint = await world.admit()
            client = await open_stream(world, endpoint, rcvbuf=4096)
            await until(lambda: bool(world.desk.ends))
            assert world.desk.ends[0].failure == "client read nothing for 0.2 s"
            assert world.engine.num_left_early == 1
            assert told < 1_000  # some megabytes of sockets' buffers; the rest was never asked for
            client.close()

    asyncio.run(scenario())


def unchunked(raw: bytes) -> bytes:
    """A body that came in HTTP's chunks, whole."""
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        body, raw = body + raw[:length], raw[length + 2 :]
        if not length:
            return body
    raise AssertionError("the stream has no end")


def test_a_slow_reader_gets_the_whole_stream_as_it_is_recorded(tmp_path: Path) -> None:
    told, num_pieces, per_piece = 0, 20, 512

    def soon() -> asyncio.Event:
        """What comes sooner after a write is held for the next, whoever reads it."""
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(GATHER_S, event.set)
        return event

    def script(chat: ChatTemplate) -> Script:
        ids = chat.encode("The quick parrot says hello. ")

        def answer(ask: EngineAsk) -> Iterable[Step]:
            nonlocal told
            for number in range(num_pieces):
                yield soon()
                told += 1
                own = [ids[(number + at) % len(ids)] for at in range(per_piece)]
                is_last = number == num_pieces - 1
                yield next(iter(pieces(own, "length" if is_last else None, first=number * per_piece)))

        return answer

    async def scenario() -> None:
        async with served(tmp_path, script, send_buffer_bytes=4096) as world:
            route = AgentRoute(policy="p", max_tokens=num_pieces * per_piece, temperature=0.7)
            client = await open_stream(world, await world.admit(agents={"coder": route}), rcvbuf=4096)
            status, _ = await client.read_head()
            assert status == 200
            seen = -1
            while seen < told < num_pieces:  # until the flow has stopped, for nothing is read
                seen = told
                await asyncio.sleep(10 * GATHER_S)
            assert told < num_pieces, "the engine was asked for what nobody reads"
            raw = b""
            while not raw.endswith(b"\r\n0\r\n\r\n"):
                raw += await client.read(2048)
                await asyncio.sleep(0.001)
            client.close()
            lines = [line for line in unchunked(raw).decode().split("\n\n") if line]
            assert lines.pop() == "data: [DONE]"
            choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
            (end,) = world.desk.ends
            assert "".join(choice["delta"].get("content") or "" for choice in choices) == end.text
            entries = [e for c in choices if c.get("logprobs") for e in c["logprobs"]["content"]]
            assert tuple(entry["logprob"] for entry in entries) == end.sampled.logprobs
            spelled = [world.chat.decode_all((token_id,)) for token_id in end.sampled.token_ids]
            assert [entry["token"] for entry in entries] == spelled
            assert len(end.sampled.token_ids) == num_pieces * per_piece and end.unusable is None

    asyncio.run(scenario())
