"""The gateway's benchmark: its generator reads answers right, its desk notices what no sound run shows."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.engines.answers import Sampled
from megloom.compute.gateway.protocol import CallEnd, CallRequest

BENCH = Path(__file__).parents[2] / "bench"
ANSWER = (7, 8, 9)
ENGINE_VERSION = 7  # what the benchmark's engine says


@pytest.fixture(autouse=True)
def bench_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def call(index: int, prompt_ids: tuple[int, ...], **overrides: Any) -> CallRequest:
    values: dict[str, Any] = {
        "invocation_id": f"e-a1-i{index:03d}",
        "episode_id": "e",
        "attempt": 1,
        "agent": "solver",
        "index": index,
        "parents": ((f"e-a1-i{index - 1:03d}", "extends"),) if index else (),
        "prompt_ids": prompt_ids,
        "messages": (),
        "max_tokens": 3,
        "temperature": 1.0,
    }
    return CallRequest(**values | overrides)


def end(index: int, **overrides: Any) -> CallEnd:
    sampled = Sampled(token_ids=ANSWER, logprobs=(-1.0,) * 3, version_spans=((ENGINE_VERSION, 0, 3),))
    values: dict[str, Any] = {
        "invocation_id": f"e-a1-i{index:03d}",
        "rid": "0" * 32,
        "sampled": sampled,
        "finish_reason": "stop",
        "text": "x",
    }
    return CallEnd(**values | overrides)


def problems_after(*steps: CallRequest | CallEnd, expected_calls: int) -> list[str]:
    from gateway_load.fakes import CheckingDesk

    async def run() -> list[str]:
        desk = CheckingDesk(answer_ids=ANSWER)
        for step in steps:
            await (desk.place(step) if isinstance(step, CallRequest) else desk.end(step))
        desk.close("e", expected_calls)
        return desk.problems

    return asyncio.run(run())


FIRST, SECOND = call(0, (1, 2)), call(1, (1, 2, *ANSWER, 3))


def test_a_sound_conversation_is_no_problem() -> None:
    assert problems_after(FIRST, end(0), SECOND, end(1), expected_calls=2) == []


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((FIRST, end(0)), "1 calls recorded, 2 were sent"),
        ((FIRST, end(0), SECOND), "never ended"),
        ((FIRST, end(0), SECOND, end(1), end(1)), "ended without being open"),
        ((FIRST, end(0), call(1, (1, 2, 3)), end(1)), "does not begin with the turn before"),
        ((FIRST, end(0), call(1, SECOND.prompt_ids, parents=()), end(1)), "does not extend"),
        ((FIRST, end(0), call(2, SECOND.prompt_ids), end(2)), "index 2, expected 1"),
        ((FIRST, end(0), SECOND, end(1, failure="lost")), "failure='lost'"),
        ((FIRST, end(0), SECOND, end(1, sampled=Sampled(token_ids=(7, 8)))), "expected the ids"),
    ],
)
def test_what_a_sound_run_never_shows_is_told(steps: Any, expected: str) -> None:
    assert any(expected in problem for problem in problems_after(*steps, expected_calls=2))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
)
def test_an_answer_is_complete_with_its_last_byte(answer: bytes) -> None:
    from gateway_load.generator import is_complete

    assert [is_complete(answer[:size]) for size in range(len(answer) + 1)] == [False] * len(answer) + [True]


def test_the_load_sends_every_request_in_order_and_times_each() -> None:
    from gateway_load.generator import Generator, build_request

    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    received.append(data.rpartition(b"\r\n\r\n")[2])
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        server = threading.Thread(target=answer)
        server.start()
        generator = Generator(listener.getsockname(), 1)
        for rate in (None, 1000.0):
            load = generator.run([[build_request("/x", "token", b"%d" % n) for n in range(3)]], rate)
            assert len(load.latencies_s) == 3
            assert 0 < load.percentile_ms(50) <= load.percentile_ms(99) <= 1e3 * load.elapsed_s
        generator.close()
        server.join()
    assert received == [b"0", b"1", b"2"] * 2


def test_an_answer_other_than_200_ends_the_run() -> None:
    from gateway_load.generator import Generator, build_request

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")

        server = threading.Thread(target=refuse)
        server.start()
        generator = Generator(listener.getsockname(), 1)
        with pytest.raises(RuntimeError, match="503 Busy"):
            generator.run([[build_request("/x", "token", b"{}")]])
        generator.close()
        server.join()


def test_figures_say_whether_they_meet_their_targets() -> None:
    import gateway

    assert gateway.figure(600, "1/s", 500.0)["ok"] is True
    assert gateway.figure(99.96, "ms", 100.0, at_least=False)["ok"] is True
    assert gateway.figure(101, "ms", 100.0, at_least=False)["ok"] is False
    assert gateway.figure(1, "ms")["ok"] is None
