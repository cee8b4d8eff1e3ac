"""A streamed answer is written in few writes, in order, and always to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megloom.compute.gateway.dialects.errors import CallError, ErrorKind, invalid
from megloom.compute.gateway.protocol import Delta, Reply
from megloom.compute.gateway.streams import GATHER_S, HOLD_S, LOOK_S, SentStream, StreamWatch, Timers

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
        self.now = 0.0
        self.waiting: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def call_later(
        self, delay: float, callback: Callable[[Timers], None], timers: Timers, /
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay, callback, (timers,), asyncio.get_running_loop())
        self.waiting.append(handle)
        return handle

    async def pass_s(self, seconds: float) -> None:
        self.now += seconds
        for handle in [handle for handle in self.waiting if handle.when() <= self.now]:
            self.waiting.remove(handle)
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
        self.stopped: list[CallError] = []
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
        self.watch = StreamWatch(stall_timeout_s=stall_timeout_s, timers=self.timers)
        return self.watch.open(PlainEvents(), self.send, self.stopped.append)


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

    asyncio.run(scenario())


def test_a_held_delta_goes_out_by_itself() -> None:
    async def scenario() -> None:
        client, answer = Client(), Answer()
        stream = client.stream()
        for letter in "abc":
            answer.text += letter
            await stream.grow(0, answer.deltas)
            await client.timers.pass_s(GATHER_S / 4)
        await client.timers.pass_s(LOOK_S)
        assert client.writes == [b"<a"]
        await client.timers.pass_s(HOLD_S - LOOK_S)  # since the write, not since the last delta
        assert client.writes == [b"<a", b"bc"]
        await stream.add(0, [Delta(text="d")])  # also what is told, not asked for
        for _ in range(3):
            await client.timers.pass_s(LOOK_S)
        assert client.writes == [b"<a", b"bc", b"d"]

    asyncio.run(scenario())


def test_the_end_of_a_choice_does_not_wait_for_the_other_choices() -> None:
    async def scenario() -> None:
        client = Client()
        stream = client.stream()
        await stream.add(0, [Delta(text="a")])
        await stream.end(0, REPLY)
        assert client.writes == [b"<a"]  # the close of an only choice would be in the same write
        await client.timers.pass_s(HOLD_S)
        assert client.writes == [b"<a", b"."]

    asyncio.run(scenario())


def test_one_timer_looks_at_all_streams_and_none_outlives_them() -> None:
    async def scenario() -> None:
        client, answer = Client(), Answer()
        stream = client.stream()
        others = [client.watch.open(PlainEvents(), client.send, client.stopped.append) for _ in range(3)]
        for answer.text in ("a", "b"):
            await stream.grow(0, answer.deltas)
        assert len(client.timers.waiting) == 1
        await client.timers.pass_s(LOOK_S)
        assert len(client.timers.waiting) == 1
        for closed in (stream, *others):
            client.watch.close(closed)
        await client.timers.pass_s(HOLD_S)
        assert client.timers.waiting == [] and client.writes == [b"<a"]  # nobody would read the rest
        client.watch.open(PlainEvents(), client.send, client.stopped.append)
        assert len(client.timers.waiting) == 1

    asyncio.run(scenario())


def test_a_write_waits_for_the_flush_before_it() -> None:
    async def scenario() -> None:
        client, answer = Client(hangs_at=1), Answer()
        stream = client.stream()
        for answer.text in ("a", "b"):
            await stream.grow(0, answer.deltas)
        await client.timers.pass_s(HOLD_S)  # the flush hangs in the client
        closing = asyncio.ensure_future(stream.close([REPLY]))
        await client.timers.pass_s(HOLD_S)
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
        client.timers.now += HOLD_S
        stream.look()
        await stream.close([REPLY])
        assert stream._flushing is not None
        await stream._flushing
        assert client.writes == [b"<a", b">"] and client.is_ended

    asyncio.run(scenario())


@pytest.mark.parametrize("is_flush", [True, False])
def test_a_client_that_does_not_take_a_write_stops_its_call_once(is_flush: bool) -> None:
    async def scenario() -> None:
        client = Client(hangs_at=1 if is_flush else 0)
        stream = client.stream(stall_timeout_s=30.0)
        writing = asyncio.ensure_future(stream.add(0, [Delta(text="a")]))
        await client.timers.pass_s(0.0)
        if is_flush:
            await stream.add(0, [Delta(text="b")])
            await client.timers.pass_s(HOLD_S)
            assert stream._flushing is not None
        await client.timers.pass_s(29.9)
        assert not client.stopped
        await client.timers.pass_s(0.2)
        for _ in range(3):
            await client.timers.pass_s(LOOK_S)
        (error,) = client.stopped
        assert (error.kind, str(error)) == (ErrorKind.CLIENT_GONE, "client read nothing for 30 s")
        if is_flush:
            assert stream._flushing.cancelled()
        writing.cancel()

    asyncio.run(scenario())


def test_a_client_that_reads_slowly_is_not_one_that_hangs() -> None:
    async def scenario() -> None:
        client = Client(hangs_at=0)
        stream = client.stream(stall_timeout_s=30.0)
        for letter in "abcde":
            writing = asyncio.ensure_future(stream.add(0, [Delta(text=letter)]))
            await client.timers.pass_s(0.0)
            await client.timers.pass_s(20.0)
            assert not writing.done()
            client.resumed.set()
            await writing
            client.resumed.clear()
            await client.timers.pass_s(2 * GATHER_S)
        assert client.writes == [b"<a", b"b", b"c", b"d", b"e"] and not client.stopped  # after 100 s

    asyncio.run(scenario())


@pytest.mark.parametrize("is_flushing", [True, False])
def test_an_error_that_the_client_does_not_read_is_given_up(is_flushing: bool) -> None:
    async def scenario() -> None:
        client = Client(hangs_at=1)
        stream = client.stream(stall_timeout_s=0.01)
        await stream.add(0, [Delta(text="a")])
        if is_flushing:
            await stream.add(0, [Delta(text="b")])
            client.timers.now += HOLD_S
            stream.look()
            await asyncio.sleep(0)
        client.watch.close(stream)
        await stream.fail(invalid("why"))
        await asyncio.sleep(0)
        assert client.writes == [b"<a"] and not client.stopped
        assert stream._flushing is None or stream._flushing.cancelled()

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
