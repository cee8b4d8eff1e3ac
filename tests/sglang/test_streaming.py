"""The streaming contract suite against real SGLang, whose events are cumulative and tell versions last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from megloom.compute.engines.answers import Sampled
from megloom.compute.engines.protocol import PauseMode
from tests.compute.engines.test_engine_streaming import *  # noqa: F403 - each test, by its name
from tests.compute.engines.test_engine_streaming import stream

pytestmark = [
    pytest.mark.usefixtures("sglang_python"),  # first of all: without SGLang nothing else is set up
    pytest.mark.filterwarnings("error"),
    pytest.mark.timeout(900),  # the first test starts the server
]


async def spans_of(pieces: AsyncIterator[tuple[Sampled, str | None]]) -> list[tuple[int, int, int]]:
    """The spans of a whole answer: those that reach back replace what was told since that place."""
    known: list[tuple[int, int, int]] = []
    async for sampled, _ in pieces:
        for version, start, end in sampled.version_spans:
            known = [(old, first, min(last, start)) for old, first, last in known if first < start]
            if known and known[-1][0] == version:
                start = known.pop()[1]
            known.append((version, start, end))
    return known


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_an_update_under_a_pause_shows_in_the_spans_of_a_running_stream(
    mode, with_engine, make_request, engine_under_test
):
    """In the place of the suite's test of this name, which wants a token's first version to be its last.

    SGLang names the served version with each event and the tokens' own with the last: a token that was
    sampled before an update and sent after it gets another one then.
    """

    async def scenario(client, raw):
        reading = asyncio.create_task(spans_of(stream(client, make_request(max_tokens=600))))
        await raw.wait_until("generation_tokens_total", lambda tokens: tokens >= 5)
        await client.pause(mode)
        await client.load_version(engine_under_test.other_model_dir, 4, None)
        await client.resume()
        (old, first, change), (new, again, end) = await reading
        assert (old, first, new, again, end) == (3, 0, 4, change, 600)

    with_engine(scenario)
