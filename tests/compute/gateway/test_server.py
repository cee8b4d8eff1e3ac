"""A gateway in its own process, between a real client, a real desk and engines that break when told to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
from aiohttp import web

from megloom.compute.cluster.local import LocalCluster
from megloom.compute.cluster.protocol import ProcessSpec
from megloom.compute.conductor.dispatch import Dispatcher
from megloom.compute.conductor.events import EventLog
from megloom.compute.conductor.gateway_desk import GatewayDesk
from megloom.compute.engines.client import HttpEngine
from megloom.compute.gateway.protocol import Admission, AgentRoute, GatewayLost
from megloom.compute.gateway.remote import RemoteGateway, connect_gateway
from megloom.compute.graph.meg import ExecutionGraph, Vertex
from megloom.compute.graph.states import InvocationState
from megloom.compute.rollout.protocol import AgentPlan
from tests.compute.gateway.toys import write

pytestmark = pytest.mark.timeout(120)
EPISODE = "g000001-0000-m000"
START_TIMEOUT_S = 60.0


class Engine:
    """An engine on a port that answers with `ids`; it dies after `breaks_after` of them."""

    def __init__(self, ids: list[int], breaks_after: int | None = None) -> None:
        self.ids, self.breaks_after, self.asked = ids, breaks_after, list[dict[str, Any]]()
        self.url = ""

    async def start(self) -> Engine:
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/generate":
            info = {"served_model_name": "p", "weight_version": "3", "vocab_size": 5000}
            return web.json_response({**info, "context_length": 4096, "incarnation": "x", "paused": False})
        body = await request.json()
        self.asked.append(body)
        if not body.get("stream"):
            return web.json_response(self._answer(body["rid"], len(self.ids)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for end in range(1, len(self.ids) + 1):
            if self.breaks_after is not None and end > self.breaks_after:
                for site in list(self._runner.sites):
                    await site.stop()  # nothing listens any more …
                assert request.transport is not None
                request.transport.abort()  # … and what was open is reset
                return response
            await response.write(self._event(body["rid"], end))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, rid: str, end: int) -> bytes:
        return b"data: " + json.dumps(self._answer(rid, end)).encode() + b"\n\n"

    def _answer(self, rid: str, end: int) -> dict[str, Any]:
        meta = {
            "id": rid,
            "completion_tokens": end,
            "output_token_logprobs": [[-0.5, token_id, None] for token_id in self.ids[:end]],
            "weight_version": "3",
            "finish_reason": {"type": "stop"} if end == len(self.ids) else None,
        }
        return {"output_ids": self.ids[:end], "meta_info": meta}


class Conductor:
    """The real desk over the given engines, and a gateway process that asks it."""

    def __init__(self, tasks: asyncio.TaskGroup, engines: list[Engine]) -> None:
        clock = asyncio.get_running_loop().time
        self.graph, self.lost = ExecutionGraph(), list[str]()
        common: dict[str, Any] = {
            "graph": self.graph,
            "stop_ids": {"p": (1,)},
            "call_timeout_s": 30.0,
            "clock": clock,
            "events": EventLog(clock),
        }
        self.dispatcher = Dispatcher(run="r", tasks=tasks, **common)
        self.dispatcher.lost_engine = self._lost
        agents = {"coder": AgentPlan(policy="p", max_tokens=64, temperature=0.7)}
        self.desk = GatewayDesk(agents=agents, dispatcher=self.dispatcher, **common)
        self.clients = {f"engine/p/{n}": HttpEngine(engine.url, "t") for n, engine in enumerate(engines)}
        for cell, client in self.clients.items():
            self.dispatcher.add_engine(cell, policy="p", capacity=4)
            self.dispatcher.engine_up(cell, client)
        self.desk.open_attempt(EPISODE, 0, ends_s=clock() + 60.0, seed_of=lambda agent, index: index)

    async def _lost(self, cell: str, cause: str) -> None:
        self.lost.append(cell)

    def the_call(self) -> Vertex:
        (vertex,) = self.graph.of_episode(EPISODE)
        return vertex


@asynccontextmanager
async def gateway_process(place: Path, conductor: Conductor) -> AsyncIterator[tuple[RemoteGateway, int]]:
    """The gateway's near end and its pid."""
    cluster = LocalCluster(place / "logs", preload=("megloom.compute.gateway.server",))
    try:
        spec = ProcessSpec(
            name="gateway/0",
            entry="megloom.compute.gateway.server:serve",
            args={"socket": str(place / "s"), "address_file": str(place / "address")},
        )
        pid = await cluster.start(spec)
        gateway = await connect_gateway("gateway/0", place / "s", conductor.desk, timeout_s=START_TIMEOUT_S)
        yield gateway, pid
        await gateway.close()
    finally:
        await cluster.close()
        for client in conductor.clients.values():
            await client.close()


Scenario = Callable[[Conductor, RemoteGateway, int, openai.AsyncOpenAI], Awaitable[None]]


def with_gateway(tmp_path: Path, engines: list[Engine], scenario: Scenario) -> None:
    chats = tmp_path / "chat"

    async def main() -> None:
        for engine in engines:
            await engine.start()
        async with asyncio.TaskGroup() as tasks:
            conductor = Conductor(tasks, engines)
            async with gateway_process(tmp_path, conductor) as (gateway, pid):
                await gateway.load_chats({"p": str(chats)})
                admission = Admission(
                    run="r",
                    episode_id=EPISODE,
                    attempt=0,
                    token="episode-secret",
                    agents={"coder": AgentRoute(policy="p", max_tokens=64, temperature=0.7)},
                    lifetime_s=60.0,
                )
                place = await gateway.admit(admission)
                async with openai.AsyncOpenAI(
                    base_url=place.openai_url, api_key=place.token, max_retries=0, timeout=30.0
                ) as client:
                    await scenario(conductor, gateway, pid, client)
        for engine in engines:
            await engine.stop()

    asyncio.run(main())


def ids_of(tmp_path: Path, text: str) -> list[int]:
    """The tokens of a text, by the toy that the gateway of this test loads."""
    (directory := tmp_path / "chat").mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(write(directory) / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]


def test_a_stream_whose_engine_dies_goes_on_at_another_one_without_a_seam(tmp_path: Path) -> None:
    whole = ids_of(tmp_path, "hello to all of you, wherever you are")
    dying, other = Engine(whole, breaks_after=6), Engine(whole[6:])

    async def scenario(
        conductor: Conductor, gateway: RemoteGateway, pid: int, client: openai.AsyncOpenAI
    ) -> None:
        chunks = await client.chat.completions.create(model="coder", messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        assert text == "hello to all of you, wherever you are"
        counts = await gateway.close_episode(EPISODE, 0)
        assert (counts.num_calls, counts.num_failed) == (1, 0)
        (first,), (second,) = dying.asked, other.asked
        assert second["input_ids"] == first["input_ids"] + whole[:6]
        assert second["rid"] != first["rid"]
        assert second["sampling_params"]["sampling_seed"] != first["sampling_params"]["sampling_seed"]
        call = conductor.the_call()
        assert (call.state, call.num_reentries) == (InvocationState.DONE, 1)
        assert (list(call.token_ids), list(call.prompt_ids or ())) == (whole, first["input_ids"])
        assert len(call.logprobs) == call.version_spans[-1][2] == len(whole)
        assert conductor.lost == ["engine/p/0"]  # it answered nobody any more
        assert (conductor.desk.num_open, conductor.dispatcher.num_lent) == (0, 0)

    with_gateway(tmp_path, [dying, other], scenario)


def test_a_gateway_that_is_killed_is_noticed_and_its_places_are_taken_back(tmp_path: Path) -> None:
    endless = Engine(ids_of(tmp_path, "hello") * 12)

    async def scenario(
        conductor: Conductor, gateway: RemoteGateway, pid: int, client: openai.AsyncOpenAI
    ) -> None:
        os.kill(pid, signal.SIGSTOP)  # the request is in its socket when it dies
        asking = asyncio.create_task(client.chat.completions.create(model="coder", messages=MESSAGES))
        closing = asyncio.create_task(gateway.close_episode(EPISODE, 0))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GatewayLost, match="gateway/0: gone during close_episode"):
            await closing
        with pytest.raises(openai.APIConnectionError):
            await asking
        conductor.desk.close_attempt(EPISODE)
        assert (conductor.desk.num_open, conductor.dispatcher.num_lent) == (0, 0)

    with_gateway(tmp_path, [endless], scenario)


def test_an_unknown_token_gets_nothing_and_a_closed_episode_no_more_calls(tmp_path: Path) -> None:
    engine = Engine(ids_of(tmp_path, "hello"))

    async def scenario(
        conductor: Conductor, gateway: RemoteGateway, pid: int, client: openai.AsyncOpenAI
    ) -> None:
        stranger = client.with_options(api_key="another")
        with pytest.raises(openai.APIStatusError):
            await stranger.chat.completions.create(model="coder", messages=MESSAGES)
        answer = await client.chat.completions.create(model="coder", messages=MESSAGES)
        assert answer.choices[0].message.content == "hello"
        await gateway.close_episode(EPISODE, 0)
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="coder", messages=MESSAGES)
        assert (await gateway.close_episode(EPISODE, 0)).late == 1
        assert len(engine.asked) == 1 and len(conductor.graph) == 1

    with_gateway(tmp_path, [engine], scenario)
