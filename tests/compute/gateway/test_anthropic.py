"""Messages, streamed and not, and their counting, asked by Anthropic's own client over a real port."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.compute.gateway.fakes import Served, says, served
from tests.compute.gateway.toys import THINKING

HI: list[Any] = [{"role": "user", "content": "hi"}]
READ = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "name": "read",
        "description": "Reads <a> file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
]


def saying(text: str, finish: str = "stop") -> Any:
    return lambda chat: says(text, chat, finish=finish)


async def create(world: Served, **body: Any) -> Any:
    client = world.anthropic(await world.admit())
    return await client.messages.create(**{"model": "coder", "messages": HI, "max_tokens": 50, **body})


def test_a_message_has_its_text_usage_and_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            message = await create(world, system="be kind")
            assert [(block.type, block.text) for block in message.content] == [("text", "hello")]
            assert (message.stop_reason, message.model, message.role) == ("end_turn", "coder", "assistant")
            (request,) = world.desk.calls.values()
            rendered = world.chat.render([{"role": "system", "content": "be kind"}, *HI])
            assert request.prompt_ids == world.chat.encode(rendered)
            assert message.usage.input_tokens == len(request.prompt_ids)
            assert message.usage.output_tokens == 2
            assert request.max_tokens == 50

    asyncio.run(scenario())


def test_a_tool_use_and_its_result_go_on_from_the_sampled_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying(f"I look.\n{READ}{READ}")) as world:
            client = world.anthropic(await world.admit())
            ask: dict[str, Any] = {"model": "coder", "max_tokens": 50, "tools": TOOLS}
            first = await client.messages.create(messages=HI, **ask)
            assert first.stop_reason == "tool_use"
            text, one, two = first.content
            assert text.type == "text" and text.text == "I look."
            assert one.type == two.type == "tool_use" and one.input == {"path": "a.txt"} and one.id != two.id
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": "data"},
                {
                    "type": "tool_result",
                    "tool_use_id": two.id,
                    "content": [{"type": "text", "text": "data"}],
                },
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ]
            echoed: Any = [block.model_dump(exclude_none=True) for block in first.content]
            more: list[Any] = [
                *HI,
                {"role": "assistant", "content": echoed},
                {"role": "user", "content": results},
            ]
            await client.messages.create(messages=more, **ask)
            before, after = world.desk.calls.values()
            assert after.parents == ((before.invocation_id, "extends"),)
            sampled = world.desk.ends[0].sampled.token_ids
            path = before.prompt_ids + sampled
            assert after.prompt_ids[: len(path)] == path
            new = world.chat.decode_all(after.prompt_ids[len(path) :])
            assert new.count("<tool_response>") == 2 and "go on" in new

    asyncio.run(scenario())


def test_a_stream_builds_the_message_that_the_client_would_have_got_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying(f"I 🦜 look.\n{READ}{READ}")) as world:
            client = world.anthropic(await world.admit())
            ask: dict[str, Any] = {"model": "coder", "max_tokens": 50, "tools": TOOLS, "messages": HI}
            async with client.messages.stream(**ask) as stream:
                texts = [text async for text in stream.text_stream]
                message = await stream.get_final_message()
            whole = await client.messages.create(**ask)
            assert "".join(texts) == "I 🦜 look." and len(texts) > 1
            assert [block.type for block in message.content] == [block.type for block in whole.content]
            uses = [block for block in message.content if block.type == "tool_use"]
            assert [use.input for use in uses] == [{"path": "a.txt"}] * 2
            assert (message.stop_reason, message.usage.output_tokens) == (
                whole.stop_reason,
                whole.usage.output_tokens,
            )
            assert message.usage.input_tokens == whole.usage.input_tokens

    asyncio.run(scenario())


def test_thinking_is_a_block_of_its_own_whole_and_streamed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("let me\n</think>\n\nyes"), template=THINKING) as world:
            client = world.anthropic(await world.admit())
            ask: dict[str, Any] = {"model": "coder", "max_tokens": 50, "messages": HI}
            whole = await client.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 1024})
            thought, text = whole.content
            assert thought.type == "thinking" and thought.thinking == "let me"
            assert text.type == "text" and text.text == "yes"
            async with client.messages.stream(**ask) as stream:
                message = await stream.get_final_message()
            assert [block.type for block in message.content] == ["thinking", "text"]
            assert message.content[0].type == "thinking" and message.content[0].thinking == "let me"
            echoed: Any = [block.model_dump(exclude_none=True) for block in whole.content]
            more: Any = [*HI, {"role": "assistant", "content": echoed}, {"role": "user", "content": "ok"}]
            await client.messages.create(model="coder", max_tokens=50, messages=more)
            *_, last = world.desk.calls.values()
            assert last.parents and last.parents[0][1] == "extends"

    asyncio.run(scenario())


def test_stop_sequences_and_length_are_named_as_reasons(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("one two three", finish="length")) as world:
            client = world.anthropic(await world.admit())
            ask: dict[str, Any] = {"model": "coder", "max_tokens": 50, "messages": HI}
            stopped = await client.messages.create(**ask, stop_sequences=["two"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
            assert stopped.content[0].type == "text" and stopped.content[0].text == "one "
            cut = await client.messages.create(**ask)
            assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)

    asyncio.run(scenario())


def test_an_empty_answer_is_a_message_with_an_empty_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("")) as world:
            client = world.anthropic(await world.admit())
            ask: dict[str, Any] = {"model": "coder", "max_tokens": 50, "messages": HI}
            whole = await client.messages.create(**ask)
            async with client.messages.stream(**ask) as stream:
                message = await stream.get_final_message()
            for answer in (whole, message):
                (block,) = answer.content
                assert block.type == "text" and block.text == ""

    asyncio.run(scenario())


def test_tokens_are_counted_without_a_call(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            client = world.anthropic(await world.admit())
            counted = await client.messages.count_tokens(model="coder", messages=HI, tools=TOOLS)
            message = await client.messages.create(model="coder", messages=HI, tools=TOOLS, max_tokens=9)
            assert counted.input_tokens == message.usage.input_tokens
            assert len(world.desk.calls) == 1

    asyncio.run(scenario())


def test_the_providers_own_tools_are_left_out_and_noted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            search: Any = {"type": "web_search_20250305", "name": "web_search"}
            await create(world, tools=[search], tool_choice={"type": "any"})
            (request,) = world.desk.calls.values()
            assert request.prompt_ids == world.chat.encode(world.chat.render(HI))
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert any("web_search_20250305" in problem for problem in counts.problems)
            assert any("tool_choice" in problem for problem in counts.problems)

    asyncio.run(scenario())
