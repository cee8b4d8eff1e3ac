"""The conductor and a gateway in another process say everything that they would say in one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.cluster.rpc import Channel, RemoteError, serve_one
from megloom.compute.gateway.protocol import (
    Admission,
    AgentRoute,
    CallEnd,
    CallRequest,
    EpisodeCounts,
    GatewayLost,
    NoPlace,
    NotAdmitted,
    Placement,
    Sampled,
)
from megloom.compute.gateway.remote import RemoteDesk, RemoteGateway, connect_gateway, gateway_calls
from megloom.compute.rollout.protocol import Endpoint

CALL = CallRequest(
    invocation_id="g-m0-a0-i001",
    episode_id="g-m0",
    attempt=0,
    agent="coder",
    index=1,
    parents=(("g-m0-a0-i000", "extends"),),
    prompt_ids=(1, 2, 3),
    messages=('{"content":"\ud800"}',),  # a lone surrogate crosses too
    max_tokens=8,
    temperature=0.7,
)
PLACE = Placement(
    invocation_id=CALL.invocation_id,
    rid="0" * 32,
    policy="p",
    url="http://127.0.0.1:1",
    token="secret",
    engine="engine/p/0#1",
    seed=2**61 + 1,
    stop_token_ids=(0, 5),
    context_length=64,
)
END = CallEnd(
    invocation_id=CALL.invocation_id,
    rid=PLACE.rid,
    sampled=Sampled(token_ids=(7, 8), logprobs=(-0.5, -1e-7), version_spans=((3, 0, 1), (4, 1, 2))),
    finish_reason="stop",
    text="ab",
    leaf_class="sub-agent",
    unusable="why not",
)
ADMISSION = Admission(
    run="r",
    episode_id="g-m0",
    attempt=2,
    token="episode-secret",
    agents={"coder": AgentRoute(policy="p", max_tokens=8, temperature=0.7)},
    lifetime_s=12.5,
    ignores_truncation=True,
)
COUNTS = EpisodeCounts(num_calls=5, num_failed=1, num_unusable=2, num_branches=3, late=4, problems=("a", "b"))
ENDPOINT = Endpoint(openai_url="http://h/r/v1", anthropic_url="http://h/r", token="episode-secret")


class Both:
    """A desk and a gateway that note what they get; `refusal` is raised by the desk."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.refusal: Exception | None = None
        self.room: asyncio.Event | None = None

    async def place(self, call: CallRequest) -> Placement:
        self.got.append(call)
        if self.refusal is not None:
            raise self.refusal
        if self.room is not None:
            await self.room.wait()
        return PLACE

    async def replace(self, invocation_id: str, rid: str, cause: str) -> Placement:
        self.got.append((invocation_id, rid, cause))
        return PLACE

    async def end(self, end: CallEnd) -> None:
        self.got.append(end)

    async def load_chats(self, directories: Mapping[str, str]) -> None:
        self.got.append(directories)

    async def admit(self, admission: Admission) -> Endpoint:
        self.got.append(admission)
        return ENDPOINT

    async def close_episode(self, episode_id: str, attempt: int) -> EpisodeCounts:
        self.got.append((episode_id, attempt))
        return COUNTS


Body = Callable[[RemoteGateway, RemoteDesk, Both], Awaitable[None]]


def with_both_ends(tmp_path: Path, body: Body) -> None:
    """Runs `body` with both ends of a channel."""

    async def main() -> None:
        both, channels = Both(), list[Callable[[], Channel]]()

        def calls(channel: Callable[[], Channel]) -> Any:
            channels.append(channel)
            return gateway_calls(lambda: both)

        server = asyncio.create_task(serve_one(tmp_path / "s", calls=calls))
        gateway = await connect_gateway("gateway/0", tmp_path / "s", both, timeout_s=5)
        try:
            await gateway.load_chats({"p": "/models/p"})  # the server's end is there once it has answered
            await body(gateway, RemoteDesk(lambda: channels[0]()), both)
        finally:
            await gateway.close()
            await asyncio.wait([server])

    asyncio.run(main())


def test_every_message_arrives_as_it_was_sent(tmp_path: Path) -> None:
    async def body(gateway: RemoteGateway, desk: RemoteDesk, both: Both) -> None:
        assert await gateway.admit(ADMISSION) == ENDPOINT
        assert await gateway.close_episode("g-m0", 2) == COUNTS
        assert await desk.place(CALL) == PLACE
        assert await desk.replace("a", "b", "c") == PLACE
        await desk.end(END)
        assert both.got == [{"p": "/models/p"}, ADMISSION, ("g-m0", 2), CALL, ("a", "b", "c"), END]

    with_both_ends(tmp_path, body)


@pytest.mark.parametrize("kind", [NotAdmitted, NoPlace])
def test_a_refusal_crosses_as_itself_with_its_text(tmp_path: Path, kind: type[Exception]) -> None:
    async def body(gateway: RemoteGateway, desk: RemoteDesk, both: Both) -> None:
        both.refusal = kind("because")
        with pytest.raises(kind, match="^because$"):
            await desk.place(CALL)

    with_both_ends(tmp_path, body)


def test_another_failure_of_the_conductor_is_told_as_what_it_was(tmp_path: Path) -> None:
    async def body(gateway: RemoteGateway, desk: RemoteDesk, both: Both) -> None:
        both.refusal = KeyError("a bug")
        with pytest.raises(RemoteError, match="a bug"):
            await desk.place(CALL)

    with_both_ends(tmp_path, body)


def test_the_end_of_a_call_that_stopped_waiting_arrives_behind_the_call(tmp_path: Path) -> None:
    async def body(gateway: RemoteGateway, desk: RemoteDesk, both: Both) -> None:
        both.room = asyncio.Event()
        waiting = asyncio.create_task(desk.place(CALL))
        await asyncio.sleep(0)
        waiting.cancel()
        await desk.end(END)
        assert both.got[1:] == [CALL, END]
        both.room.set()

    with_both_ends(tmp_path, body)


def test_each_end_says_that_the_other_is_gone(tmp_path: Path) -> None:
    async def body(gateway: RemoteGateway, desk: RemoteDesk, both: Both) -> None:
        both.room = asyncio.Event()
        waiting = asyncio.create_task(desk.place(CALL))
        await asyncio.sleep(0)
        await gateway.close()
        with pytest.raises(NotAdmitted, match="the conductor is gone"):
            await waiting
        with pytest.raises(GatewayLost, match="gateway/0: gone during admit"):
            await gateway.admit(ADMISSION)

    with_both_ends(tmp_path, body)
