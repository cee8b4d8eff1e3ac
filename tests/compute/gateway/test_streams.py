"""A streamed answer is written in few writes, in order, and always to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
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


class ManualTimers:
    """A clock that stands still, and timers that fire when it passes them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.handles: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay, callback, (), asyncio.get_running_loop())
        self.handles.append(handle)
        return handle

    @property
    def waiting(self) -> list[asyncio.TimerHandle]:
        return [handle for handle in self.handles if not handle.cancelled()]

    async def pass_s(self, seconds: float) -> None:
        self.now += seconds
        for handle in [handle for handle in self.waiting if handle.when() <= self.now]:
            self.handles.remove(handle)
            handle._run()
        for _ in range(4):  # what a timer has started gets its turns
            await asyncio.sleep(0)


class Client:
    """Takes what is written; hangs from write `hangs_at` on until `resumed`."""

    def __init__(self, hangs_at: int | None = None) -> None:
        self.timers = ManualTimers()
        self.writes: list[bytes] = []
        self.is_ended = False
        self.resumed = asyncio.Event()
        self._hangs_at = hangs_at

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200 and self.writes == []
            return
        if self._hangs_at is not None and len(self.writes) >= self._hangs_at:
            await self.resumed.wait()
        assert not self.is_ended
        self.writes.append(message["body"])
        self.is_ended = not message["more_body"]

    def stream(self, stall_timeout_s: float = 30.0) -> SentStream:
        return SentStream(PlainEvents(), self.send, stall_timeout_s=stall_timeout_s, timers=self.timers)


class Answer:
    """An answer that grows by letters; tells each once."""

    def __init__(self) -> None:
        self.text = ""

    def deltas(self) -> list[Delta]:
        text, self.text = self.text, ""
        return [Delta(text=text)] if text else []


def test_deltas_that_follow_at_once_go_out_with_the_next_write() -> None:
    async def scenario() -> None:
        client, answer = Client(), Answer()
        stream = client.stream()
        for letter in "abcd":
            answer.text += letter
            await stream.grow(0, answer.deltas)
        assert client.writes == [b"<a"]  # the first at once; the others have not even been asked for
        assert answer.text == "bcd"
        client.timers.now += GATHER_S
        await stream.add(0, [Delta(text="bcde")])
        assert client.writes == [b"<a", b"bcde"]
        await stream.add(0, [Delta(text="f")])
        await stream.end(0, REPLY)
        await stream.close([REPLY])
        assert client.writes == [b"<a", b"bcde", b"f.>"] and client.is_ended
        assert client.timers.waiting == []

    asyncio.run(scenario())


def test_a_held_delta_goes_out_by_itself_within_the_gathering_time() -> None:
    async def scenario() -> None:
        client, answer = Client(), Answer()
        stream = client.stream()
        for text in ("a", "b"):
            answer.text = text
            await stream.grow(0, answer.deltas)
            await client.timers.pass_s(GATHER_S / 4)
        answer.text += "c"
        await stream.grow(0, answer.deltas)
        assert client.writes == [b"<a"] and len(client.timers.waiting) == 1
        await client.timers.pass_s(GATHER_S / 2)  # since the write, not since the last delta
        assert client.writes == [b"<a", b"bc"] and client.timers.waiting == []
        await stream.add(0, [Delta(text="d")])  # also what is told, not asked for
        await client.timers.pass_s(GATHER_S)
        assert client.writes == [b"<a", b"bc", b"d"]

    asyncio.run(scenario())


def test_the_end_of_a_choice_does_not_wait_for_the_other_choices() -> None:
    async def scenario() -> None:
        client = Client()
        stream = client.stream()
        await stream.add(0, [Delta(text="a")])
        client.timers.now += 1.0
        await stream.end(0, REPLY)
        assert client.writes == [b"<a"]  # the close of an only choice would be in the same write
        await client.timers.pass_s(GATHER_S)
        assert client.writes == [b"<a", b"."]

    asyncio.run(scenario())


def test_no_timer_outlives_its_stream() -> None:
    async def scenario() -> None:
        client, answer = Client(), Answer()
        stream = client.stream()
        with pytest.raises(asyncio.CancelledError), stream.lifetime():
            for answer.text in ("a", "b"):
                await stream.grow(0, answer.deltas)
            assert len(client.timers.waiting) == 1
            raise asyncio.CancelledError  # its client went away
        assert client.timers.waiting == [] and client.writes == [b"<a"]

    asyncio.run(scenario())


def test_a_write_waits_for_the_flush_before_it() -> None:
    async def scenario() -> None:
        client, answer = Client(hangs_at=1), Answer()
        stream = client.stream()
        for answer.text in ("a", "b"):
            await stream.grow(0, answer.deltas)
        await client.timers.pass_s(GATHER_S)  # the flush hangs in the client
        closing = asyncio.ensure_future(stream.close([REPLY]))
        await client.timers.pass_s(GATHER_S)
        assert client.writes == [b"<a"] and not closing.done()
        client.resumed.set()
        await closing
        assert client.writes == [b"<a", b"b", b">"] and client.is_ended

    asyncio.run(scenario())


def test_nothing_follows_the_last_event_though_a_flush_was_about_to_begin() -> None:
    async def scenario() -> None:
        client, answer = Client(), Answer()
        stream = client.stream()
        for answer.text in ("a", "b"):
            await stream.grow(0, answer.deltas)
        client.timers.waiting[0]._run()
        await stream.fail(invalid("why"))
        assert stream._flushing is not None
        await stream._flushing
        assert client.writes == [b"<a", b"!"] and client.is_ended

    asyncio.run(scenario())


def test_a_client_that_does_not_take_a_flush_is_gone_for_the_next_write() -> None:
    async def scenario() -> None:
        client, answer = Client(hangs_at=1), Answer()
        stream = client.stream(stall_timeout_s=0.05)
        for answer.text in ("a", "b"):
            await stream.grow(0, answer.deltas)
        await client.timers.pass_s(GATHER_S)
        assert stream._flushing is not None
        await asyncio.wait([stream._flushing])
        answer.text = "c"
        client.timers.now += 1.0
        client.resumed.set()
        with pytest.raises(CallError, match="client read nothing for 0.05 s") as caught:
            await stream.grow(0, answer.deltas)
        assert caught.value.kind is ErrorKind.CLIENT_GONE

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
