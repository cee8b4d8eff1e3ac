"""The engine contract suite against real SGLang; docs/sglang.md lists what it cannot do on a CPU."""

from __future__ import annotations

import asyncio

import pytest

from megloom.compute.engines.protocol import PauseMode
from tests.compute.engines.test_engine_contract import *  # noqa: F403 - each test, by its name

pytestmark = [
    pytest.mark.usefixtures("sglang_python"),  # first of all: without SGLang nothing else is set up
    pytest.mark.filterwarnings("error"),
    pytest.mark.timeout(900),  # the first test starts the server
]

NUM_LOOKS = 20  # at a request that must still wait; each is a round trip to the server


def test_paused_engine_is_not_ready_and_lets_new_requests_wait(with_engine, make_request):
    """In the place of the suite's test of this name: SGLang holds such a request back before its queue."""

    async def scenario(client, raw):
        assert await client.ready()
        await client.pause(PauseMode.RETRACT)
        assert not await client.ready()
        waiting = asyncio.create_task(client.generate(make_request()))
        for _ in range(NUM_LOOKS):
            assert not await client.ready()
            assert not waiting.done()
        await client.resume()
        assert len((await waiting).token_ids) == 8
        assert await client.ready()

    with_engine(scenario)
