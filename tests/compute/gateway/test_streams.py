"""A streamed answer is written in few writes, in order, and always to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from megloom.compute.gateway.dialects.errors import CallError, ErrorKind, invalid
from megloom.compute.gateway.protocol import Delta, Reply
from megloom.compute.gateway.streams import GATHER_S, SentStream

REPLY = Reply(
    invocation_id="i",
    text="",
    reasoning="",
    tool_calls=(),
    finish_reason="stop",
    prompt_ids=(1,),
    token_ids=(),
    logprobs=(),
)


class PlainEvents:
    """`EventStream` whose events are single letters."""

    def open(self) -> bytes:
        return b"<"

    def add(self, choice: int, delta: Delta) -> bytes:
        return delta.text.encode()

    def end(self, choice: int, reply: Reply) -> bytes:
        return b"."

    def close(self, replies: Sequence[Reply]) -> bytes:
        return b">"

    def fail(self, error: CallError) -> bytes:
        return b"!"


class Client:
    """Takes what is written; hangs from write `hangs_at` on."""

    def __init__(self, hangs_at: int | None = None) -> None:
        self.now = 100.0
        self.writes: list[bytes] = []
        self.is_ended = False
        self._hangs_at = hangs_at

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200 and self.writes == []
            return
        if self._hangs_at is not None and len(self.writes) >= self._hangs_at:
            await asyncio.Event().wait()
        assert not self.is_ended
        self.writes.append(message["body"])
        self.is_ended = not message["more_body"]

    def stream(self, stall_timeout_s: float = 30.0) -> SentStream:
        return SentStream(PlainEvents(), self.send, stall_timeout_s=stall_timeout_s, clock=lambda: self.now)


def test_events_that_follow_at_once_go_out_with_the_next_write() -> None:
    async def scenario() -> None:
        client = Client()
        stream = client.stream()
        await stream.add(0, [Delta(text="a")])
        assert client.writes == [b"<a"]  # the first at once
        await stream.add(0, [Delta(text="b"), Delta(text="c")])
        client.now += GATHER_S / 2
        await stream.add(0, [Delta(text="d")])
        assert client.writes == [b"<a"]
        client.now += GATHER_S
        await stream.add(0, [Delta(text="e")])
        assert client.writes == [b"<a", b"bcde"]
        await stream.add(0, [Delta(text="f")])
        await stream.end(0, REPLY)
        await stream.close([REPLY])
        assert client.writes == [b"<a", b"bcde", b"f.>"] and client.is_ended

    asyncio.run(scenario())


def test_an_answer_without_text_is_opened_and_closed() -> None:
    async def scenario() -> None:
        client = Client()
        stream = client.stream()
        assert not stream.is_open
        await stream.end(0, REPLY)
        await stream.close([REPLY])
        assert client.writes == [b"<.>"] and client.is_ended

    asyncio.run(scenario())


def test_what_was_held_goes_out_before_the_error_that_breaks_an_answer_off() -> None:
    async def scenario() -> None:
        client = Client()
        stream = client.stream()
        for text in "ab":
            await stream.add(0, [Delta(text=text)])
        await stream.fail(invalid("why"))
        assert client.writes == [b"<a", b"b!"] and client.is_ended

    asyncio.run(scenario())


def test_a_client_that_does_not_take_a_write_is_gone() -> None:
    async def scenario() -> None:
        stream = Client(hangs_at=0).stream(stall_timeout_s=0.0)
        with pytest.raises(CallError, match="client read nothing for 0 s") as caught:
            await stream.add(0, [Delta(text="a")])
        assert caught.value.kind is ErrorKind.CLIENT_GONE

    asyncio.run(scenario())
