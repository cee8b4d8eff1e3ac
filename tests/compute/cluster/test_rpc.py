"""The message channel between our processes."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.cluster.rpc import Channel, PeerGone, RemoteError, connect, serve_one


async def fail(_: Any) -> Any:
    raise ValueError("bad input")


async def echo(payload: Any) -> Any:
    return payload


async def hang(_: Any) -> Any:
    await asyncio.Event().wait()


def with_peer(
    tmp_path: Path, body: Callable[[Channel, asyncio.Task[None]], Awaitable[None]], **calls: Any
) -> None:
    """Runs `body` with a channel to a server that has the given handlers."""

    async def main() -> None:
        path = tmp_path / "s"
        server = asyncio.create_task(serve_one(path, calls=lambda _: calls))
        channel, reading = await connect(path, timeout_s=5)
        try:
            await body(channel, reading)
        finally:
            channel.close()
            await asyncio.wait([reading, server])
            assert server.exception() is None

    asyncio.run(main())


def test_a_call_returns_the_answer_with_bytes_and_nested_data(tmp_path: Path) -> None:
    async def body(channel: Channel, _: Any) -> None:
        payload = {"ids": [1, 2, 3], "raw": b"\x00\xff", "none": None, "text": "é"}
        assert await channel.call("echo", payload) == payload

    with_peer(tmp_path, body, echo=echo)


def test_many_calls_run_at_once_and_get_their_own_answers(tmp_path: Path) -> None:
    async def body(channel: Channel, _: Any) -> None:
        answers = await asyncio.gather(*(channel.call("echo", n) for n in range(500)))
        assert answers == list(range(500))

    with_peer(tmp_path, body, echo=echo)


def test_a_handlers_exception_reaches_the_caller_with_type_text_and_traceback(tmp_path: Path) -> None:
    async def body(channel: Channel, _: Any) -> None:
        with pytest.raises(RemoteError, match="ValueError: bad input") as caught:
            await channel.call("fail")
        assert "in fail" in caught.value.remote_traceback

    with_peer(tmp_path, body, fail=fail)


def test_an_unknown_method_names_the_known_ones(tmp_path: Path) -> None:
    async def body(channel: Channel, _: Any) -> None:
        with pytest.raises(RemoteError, match=r"no method 'ech' here .known: echo"):
            await channel.call("ech")

    with_peer(tmp_path, body, echo=echo)


def test_calls_in_flight_fail_when_the_connection_ends(tmp_path: Path) -> None:
    async def body(channel: Channel, _: Any) -> None:
        waiting = asyncio.create_task(channel.call("hang"))
        await channel.call("echo")
        channel.close()
        with pytest.raises(PeerGone):
            await waiting
        with pytest.raises(PeerGone):
            await channel.call("echo")

    with_peer(tmp_path, body, echo=echo, hang=hang)


def test_a_frame_larger_than_the_bound_ends_the_connection(tmp_path: Path) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def broken(reader: Any, writer: asyncio.StreamWriter) -> None:
            writer.write(struct.pack("<I", 0xFFFFFFFF))
            await reader.read()
            writer.close()
            await writer.wait_closed()
            ended.set()

        server = await asyncio.start_unix_server(broken, path=str(tmp_path / "s"))
        _, reading = await connect(tmp_path / "s", timeout_s=5)
        with pytest.raises(PeerGone, match="exceeds"):
            await reading
        await ended.wait()
        server.close()

    asyncio.run(main())


def test_connecting_to_nothing_ends_at_its_deadline_and_names_the_socket(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="nothing listens on .*nobody"):
        asyncio.run(connect(tmp_path / "nobody", timeout_s=0.05))


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "boom"),)

    import pickle

    async def body(channel: Channel, _: Any) -> None:
        assert await channel.call("echo", pickle.dumps(Bomb())) == pickle.dumps(Bomb())
        assert not (tmp_path / "boom").exists()

    with_peer(tmp_path, body, echo=echo)
