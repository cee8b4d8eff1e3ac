"""What a worker announces reaches the conductor as it was, over a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.cluster.rpc import serve_one
from megloom.compute.graph.seeds import canonical_json
from megloom.compute.rollout.client import connect_worker
from megloom.compute.rollout.dataset import load_tasks
from megloom.compute.rollout.protocol import CallOpened, CallPrompt, WorkloadError
from megloom.compute.rollout.worker import _call_handlers, _ChannelEvents

from .builders import RecordedEvents

MESSAGES = tuple(
    canonical_json(message)
    for message in (
        {"role": "system", "content": "näh \ud800"},
        {"role": "user", "content": "x" * 1_000_000, "tool_calls": [{"id": 2**70}]},
    )
)
OPENED = CallOpened(
    invocation_id="g1-m000-a0-i000",
    episode_id="g1-m000",
    agent="planner",
    index=0,
    parents=(("g1-m000-a0-i001", "data"),),
    prompt_ids=(1, 2),
    messages=MESSAGES,
)
WAITING = CallOpened(
    invocation_id="g1-m000-a0-i001",
    episode_id="g1-m000",
    agent="planner",
    index=1,
    parents=(),
    prompt_ids=None,
)
PROMPT = CallPrompt(invocation_id="g1-m000-a0-i001", prompt_ids=(3,), messages=MESSAGES[:1])


class Announcing:
    """A worker's host that announces its calls when it is asked for tasks."""

    def __init__(self, events: _ChannelEvents, source: str) -> None:
        self._events, self._source = events, source

    async def tasks(self, split: str) -> list[Any]:
        self._events.call_opened(OPENED)
        self._events.call_opened(WAITING)
        self._events.call_prompt(PROMPT)
        return [record for record, _ in load_tasks(self._source, split=split, cache=Path("unused"))]


def test_messages_and_rows_cross_the_wire_unchanged(tmp_path: Path) -> None:
    source = tmp_path / "d.jsonl"
    source.write_text('{"prompt": "a \\ud800", "answer": "\\udfff", "big": 123456789012345678901234567890}\n')

    async def body() -> tuple[RecordedEvents, list[Any]]:
        events = RecordedEvents()
        socket = tmp_path / "w.sock"

        def calls(channel: Any) -> Any:
            host: Any = Announcing(_ChannelEvents(channel), str(source))
            return _call_handlers(lambda: host)

        serving = asyncio.create_task(serve_one(socket, calls=calls))
        client = await connect_worker("w", socket, events, timeout_s=10)
        records = await client.tasks("train")
        await client.close()
        await serving
        return events, records

    events, records = asyncio.run(body())
    assert events.opened == [OPENED, WAITING] and events.prompts == [PROMPT]
    assert records == [record for record, _ in load_tasks(str(source), split="train", cache=Path("unused"))]
    assert '"big":123456789012345678901234567890' in records[0].row and "\\ud800" in records[0].row


class Large:
    """A host whose split does not fit into one message, and whose refusal quotes a lone surrogate."""

    def __init__(self, records: list[Any]) -> None:
        self._records = records
        self.num_loads = 0

    async def tasks(self, split: str) -> list[Any]:
        if split == "eval":
            raise WorkloadError("row 3: \ud800 is no prompt")
        self.num_loads += 1
        return self._records


def test_a_split_larger_than_a_message_comes_in_pages_and_a_refusal_with_a_surrogate_arrives(
    tmp_path: Path,
) -> None:
    source = tmp_path / "d.jsonl"
    source.write_text("".join(f'{{"prompt": "{n}{"x" * 3_000_000}", "answer": "1"}}\n' for n in range(9)))
    records = [record for record, _ in load_tasks(str(source), split="train", cache=Path("unused"))]
    host: Any = Large(records)

    async def body() -> list[Any]:
        socket = tmp_path / "w.sock"
        serving = asyncio.create_task(serve_one(socket, calls=lambda channel: _call_handlers(lambda: host)))
        client = await connect_worker("w", socket, RecordedEvents(), timeout_s=10)
        arrived = await client.tasks("train")
        with pytest.raises(WorkloadError, match="row 3: \ud800 is no prompt"):
            await client.tasks("eval")
        await client.close()
        await serving
        return arrived

    assert asyncio.run(body()) == records and host.num_loads == 1
