"""What an answer says of its prompt's cached tokens: what the engine said, nothing where it said nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.engines.protocol import EngineUnavailable
from tests.compute.gateway.fakes import EngineAsk, Script, Step, pieces, served

HI: list[Any] = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "stream_options": {"include_usage": True}},
    "completions": {"prompt": "hello", "stream_options": {"include_usage": True}},
    "responses": {"input": "hello"},
    "messages": {"messages": HI, "max_tokens": 9},
}


def telling(num_cached: int | None) -> Script:
    """An engine whose every piece says how much of the prompt it had."""

    def script(ask: EngineAsk) -> Iterator[Step]:
        for sampled, finish in pieces((1, 2, 3), "length", size=1 if ask.incremental else None):
            yield replace(sampled, num_cached_tokens=num_cached), finish

    return script


async def last_usage(base_url: str, url: str, token: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage at the end of an answer, streamed or not."""
    host, port = base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps({"model": "coder", **body}).encode()
    path = url.removeprefix(base_url)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 200 "), answer
    bodies = [json.loads(line[line.index("{") :]) for line in answer.splitlines() if '"usage":{' in line]
    usage: dict[str, Any] = (bodies[-1].get("response") or bodies[-1])["usage"]
    return usage


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_cached", [None, 0, 4, 10_000])
@pytest.mark.parametrize("route", BODIES)
def test_usage_says_of_the_cache_what_the_engine_said(
    tmp_path: Path, route: str, num_cached: int | None, is_stream: bool
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, lambda _: telling(num_cached)) as world:
            endpoint = await world.admit()
            body = {**BODIES[route], "stream": is_stream}
            usage = await last_usage(world.base_url, f"{endpoint.openai_url}/{route}", endpoint.token, body)
            (request,) = world.desk.calls.values()
            num_prompt = len(request.prompt_ids)
            told = None if num_cached is None else min(num_cached, num_prompt)  # never more than there are
            if route == "messages":
                assert usage.get("cache_read_input_tokens") == told
                assert usage["input_tokens"] == num_prompt - (told or 0)
            elif route == "responses":  # its clients want a number
                assert usage["input_tokens"] == num_prompt
                assert usage["input_tokens_details"]["cached_tokens"] == (told or 0)
            else:
                assert usage["prompt_tokens"] == num_prompt
                details = None if told is None else {"cached_tokens": told}
                assert usage.get("prompt_tokens_details") == details

    asyncio.run(scenario())


def test_an_engine_that_goes_on_does_not_count_the_answer_as_cached_prompt(tmp_path: Path) -> None:
    def script(ask: EngineAsk) -> Iterator[Step]:
        is_first = ask.rid.endswith("1")
        (begun,) = pieces((1, 2), None)
        yield replace(begun[0], num_cached_tokens=3 if is_first else len(ask.prompt_ids)), None
        if is_first:
            yield EngineUnavailable("it died")
        yield next(pieces((3,), "length", first=2))

    async def scenario() -> None:
        async with served(tmp_path, lambda _: script) as world:
            endpoint = await world.admit()
            body = {**BODIES["chat/completions"], "stream": True}
            usage = await last_usage(
                world.base_url, f"{endpoint.openai_url}/chat/completions", endpoint.token, body
            )
            assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
            assert len(world.engine.asks) == 2

    asyncio.run(scenario())
