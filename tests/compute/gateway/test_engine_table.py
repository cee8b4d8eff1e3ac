"""The gateway process's own clients: of engines that report their limits, and of SGLang, which does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from megloom.compute.engines.client import HttpEngine
from megloom.compute.engines.protocol import EngineProtocolError, EngineRefused
from megloom.compute.gateway.protocol import Placement, Sampled
from megloom.compute.gateway.server import EngineTable

SGLANG_KEEP_ALIVE_S = 5  # of its server: a connection that rested so long may close under a request


def placement(url: str, **limits: int) -> Placement:
    return Placement(
        invocation_id="i",
        rid="0" * 32,
        policy="p",
        url=url,
        token="t",
        engine="engine/p/0#1",
        seed=1,
        stop_token_ids=(),
        **limits,
    )


async def ask(engine: Any, token_id: int) -> list[Sampled]:
    pieces = engine.stream(
        rid="0" * 32,
        prompt_ids=(token_id,),
        max_tokens=4,
        temperature=1.0,
        seed=1,
        stop_token_ids=(),
        incremental=False,
    )
    return [sampled async for sampled, _ in pieces]


def keep_alive_s(engine: Any) -> float:
    assert isinstance(engine, HttpEngine)
    return engine._session.connector._keepalive_timeout


def test_an_engine_that_tells_no_limits_is_asked_with_those_of_the_place() -> None:
    """Its `/model_info` is what real SGLang says after an update."""
    asked = list[list[int]]()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/ready":
            return web.Response()
        if request.path == "/model_info":
            return web.json_response({"served_model_name": "/weights/v7", "weight_version": "7"})
        body = await request.json()
        asked.append(body["input_ids"])
        meta = {
            "id": body["rid"],
            "completion_tokens": 1,
            "output_token_logprobs": [[-0.5, 9, None]],
            "weight_version": "7",
            "finish_reason": {"type": "stop"},
        }
        return web.json_response({"output_ids": [9], "meta_info": meta})

    async def main() -> None:
        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        table, blind = EngineTable(), EngineTable()
        try:
            engine = table(placement(url, vocab_size=61, context_length=64))
            (sampled,) = await ask(engine, 60)
            assert (sampled.token_ids, sampled.version_spans) == ((9,), ((7, 0, 1),))
            with pytest.raises(EngineRefused, match="61 is outside the vocabulary"):
                await ask(engine, 61)
            assert asked == [[60]]
            assert keep_alive_s(engine) < SGLANG_KEEP_ALIVE_S
            with pytest.raises(EngineProtocolError, match="does not report its limits"):
                await ask(blind(placement(url, context_length=64)), 60)
        finally:
            await table.close()
            await blind.close()
            await runner.cleanup()

    asyncio.run(main())


def test_an_engine_of_ours_keeps_its_connections_and_its_client() -> None:
    async def main() -> None:
        table = EngineTable()
        place = placement("http://127.0.0.1:1", context_length=64)
        engine = table(place)
        assert keep_alive_s(engine) > 60
        assert table(place) is engine
        await table.close()

    asyncio.run(main())
