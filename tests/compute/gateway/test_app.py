"""The gateway as its conductor uses it: endpoints, chats, counts, memory of what is over."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import openai
import pytest

from megloom.compute.gateway.app import GatewayApp
from megloom.compute.gateway.protocol import AgentRoute, Gateway
from tests.compute.gateway.fakes import FakeDesk, FakeEngine, admission, says, served
from tests.compute.gateway.toys import tool, write

HI: list[Any] = [{"role": "user", "content": "hi"}]


def hello(chat: Any) -> Any:
    return says("hello", chat)


def idle_gateway(**options: Any) -> GatewayApp:
    desk = FakeDesk(stop_token_ids=())
    return GatewayApp(desk=desk, engines=lambda _: FakeEngine(lambda _: ()), **options)


def test_an_endpoint_names_run_episode_and_attempt_for_both_kinds_of_client() -> None:
    async def scenario() -> None:
        app = idle_gateway(base_url="http://127.0.0.1:1")
        gateway: Gateway = app  # it is one
        endpoint = await gateway.admit(admission("e000001-a/b", run="my run", attempt=2))
        assert endpoint.anthropic_url == "http://127.0.0.1:1/r/my%20run/e/e000001-a%2Fb/a/2"
        assert endpoint.openai_url == endpoint.anthropic_url + "/v1"
        assert endpoint.token == "secret-of-e000001-a/b"
        await gateway.close_episode("e000001-a/b", 2)

    asyncio.run(scenario())


def test_a_missing_tokenizer_is_told_to_who_wants_it_loaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(FileNotFoundError):
            await idle_gateway().load_chats({"p": str(tmp_path / "nowhere")})

    asyncio.run(scenario())


def test_a_closed_episode_leaves_no_history_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            endpoint = await world.admit()
            client = world.openai(endpoint)
            for _ in range(3):
                await client.chat.completions.create(model="coder", messages=HI)
            episode = world.gateway.episodes.find("r", "g000000-0000-m000", 0, endpoint.token.encode())
            assert episode is not None and len(episode.histories["p"]) == 3
            gone = weakref.ref(episode.histories["p"])
            del episode
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert (counts.num_calls, counts.num_failed, counts.num_unusable) == (3, 0, 0)
            for _ in range(50):  # the server lets go of its last request a moment later
                gc.collect()
                if gone() is None:
                    break
                await asyncio.sleep(0.01)
            assert gone() is None

    asyncio.run(scenario())


def test_agents_of_one_policy_share_a_history_and_others_do_not(tmp_path: Path) -> None:
    agents = {
        "a": AgentRoute(policy="p", max_tokens=9, temperature=1.0),
        "b": AgentRoute(policy="p", max_tokens=9, temperature=1.0),
        "c": AgentRoute(policy="q", max_tokens=9, temperature=1.0),
    }

    async def scenario() -> None:
        async with served(tmp_path / "p", hello) as world:
            (tmp_path / "q").mkdir()
            await world.gateway.load_chats({"q": str(write(tmp_path / "q"))})
            client = world.openai(await world.admit(agents=agents))
            await client.chat.completions.create(model="a", messages=HI)
            more: list[Any] = [
                *HI,
                {"role": "assistant", "content": "hello"},
                {"role": "user", "content": "x"},
            ]
            for agent in ("b", "c"):
                await client.chat.completions.create(model=agent, messages=more)
            first, same, other = world.desk.calls.values()
            assert same.parents == ((first.invocation_id, "extends"),)
            assert other.parents == ()

    asyncio.run(scenario())


def test_leaf_classes_come_from_the_classifier_that_the_admission_names(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            client = world.openai(await world.admit(leaf_classes="coding_harness"))
            main: list[Any] = [{"role": "system", "content": "You code."}, *HI]
            helper: list[Any] = [{"role": "system", "content": "You search."}, *HI]
            for messages in (main, helper, main):
                await client.chat.completions.create(model="coder", messages=messages, tools=[tool("read")])
            assert [end.leaf_class for end in world.desk.ends] == ["main", "sub-agent", "main"]

    asyncio.run(scenario())


def test_a_long_prompt_is_encoded_off_the_loop_in_the_order_of_its_episode(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            client = world.openai(await world.admit())
            long: list[Any] = [{"role": "user", "content": "word " * 20_000}]
            await client.chat.completions.create(model="coder", messages=long)
            more: list[Any] = [*long, {"role": "assistant", "content": "hello"}, *HI]
            answers = await asyncio.gather(
                *(client.chat.completions.create(model="coder", messages=more) for _ in range(4))
            )
            assert [answer.choices[0].message.content for answer in answers] == ["hello"] * 4
            first, *others = world.desk.calls.values()
            assert {call.parents for call in others} == {((first.invocation_id, "extends"),)}

    asyncio.run(scenario())


def test_requests_of_an_episode_whose_lifetime_is_over_are_late(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            client = world.openai(await world.admit(lifetime_s=0.0))
            await asyncio.sleep(0.01)
            for _ in range(2):
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(model="coder", messages=HI)
                assert caught.value.status_code == 410 and caught.value.code == "episode_over"
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert (counts.num_calls, counts.late) == (0, 2)

    asyncio.run(scenario())
