"""Responses, streamed and not, asked by OpenAI's own client over a real port."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.compute.gateway.fakes import Served, says, served
from tests.compute.gateway.toys import THINKING

READ = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "read",
        "description": "Reads <a> file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        "strict": False,
    }
]


def saying(text: str, finish: str = "stop") -> Any:
    return lambda chat: says(text, chat, finish=finish)


async def create(world: Served, **body: Any) -> Any:
    client = world.openai(await world.admit())
    return await client.responses.create(**{"model": "coder", "input": "hi", **body})


def test_a_text_and_its_instructions_become_a_response(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            response = await create(world, instructions="be kind", max_output_tokens=40)
            assert (response.output_text, response.status, response.model) == ("hello", "completed", "coder")
            (request,) = world.desk.calls.values()
            rendered = world.chat.render(
                [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
            )
            assert request.prompt_ids == world.chat.encode(rendered) and request.max_tokens == 40
            assert response.usage.input_tokens == len(request.prompt_ids)
            assert response.usage.output_tokens == 2

    asyncio.run(scenario())


def test_items_of_the_last_response_sent_back_go_on_from_its_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying(f"I look.\n{READ}")) as world:
            client = world.openai(await world.admit())
            first = await client.responses.create(model="coder", input="hi", tools=TOOLS)
            text, call = first.output
            assert text.type == "message" and call.type == "function_call"
            assert call.name == "read" and json.loads(call.arguments) == {"path": "a.txt"}
            items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
            items += [item.model_dump(exclude_none=True) for item in first.output]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "data"})
            await client.responses.create(model="coder", input=items, tools=TOOLS)
            before, after = world.desk.calls.values()
            assert after.parents == ((before.invocation_id, "extends"),)

    asyncio.run(scenario())


def test_a_stream_ends_with_the_response_that_its_events_have_built(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying(f"I 🦜 look.\n{READ}")) as world:
            stream = await create(world, stream=True, tools=TOOLS)
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert "".join(deltas) == "I 🦜 look." and len(deltas) > 1
            final = events[-1]
            assert final.type == "response.completed"
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert done == final.response.output
            assert [item.type for item in done] == ["message", "function_call"]
            assert final.response.output_text == "I 🦜 look."
            assert final.response.usage.output_tokens == len(world.desk.ends[0].sampled.token_ids)

    asyncio.run(scenario())


def test_the_official_stream_helper_reads_the_events(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying(f"I look.\n{READ}")) as world:
            client = world.openai(await world.admit())
            async with client.responses.stream(model="coder", input="hi", tools=TOOLS) as stream:
                response = await stream.get_final_response()
            assert response.output_text == "I look."
            assert [item.type for item in response.output] == ["message", "function_call"]

    asyncio.run(scenario())


def test_reasoning_is_an_item_of_its_own_whole_and_streamed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("let me\n</think>\n\nyes"), template=THINKING) as world:
            client = world.openai(await world.admit())
            whole = await client.responses.create(model="coder", input="hi")
            assert [item.type for item in whole.output] == ["reasoning", "message"]
            stream = await client.responses.create(model="coder", input="hi", stream=True)
            events = [event async for event in stream]
            thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
            assert "".join(thoughts) == "let me" and whole.output_text == "yes"
            items: list[Any] = [{"role": "user", "content": "hi"}]
            items += [item.model_dump(exclude_none=True) for item in whole.output]
            items.append({"role": "user", "content": "ok"})
            await client.responses.create(model="coder", input=items)
            *_, last = world.desk.calls.values()
            assert last.parents and last.parents[0][1] == "extends"

    asyncio.run(scenario())


def test_a_response_cut_by_length_is_incomplete(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello", finish="length")) as world:
            client = world.openai(await world.admit())
            response = await client.responses.create(model="coder", input="hi")
            assert response.status == "incomplete" and response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"
            stream = await client.responses.create(model="coder", input="hi", stream=True)
            assert [event.type async for event in stream][-1] == "response.incomplete"

    asyncio.run(scenario())


def test_an_empty_answer_is_a_response_with_an_empty_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("")) as world:
            client = world.openai(await world.admit())
            response = await client.responses.create(model="coder", input="hi")
            stream = await client.responses.create(model="coder", input="hi", stream=True)
            final: Any = [event async for event in stream][-1]
            for answer in (response, final.response):
                assert [item.type for item in answer.output] == ["message"] and answer.output_text == ""

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "says_what"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: responses are not kept here"),
        ({"conversation": "c"}, "conversation: responses are not kept here"),
        ({"background": True}, "background: responses are not kept here"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: only functions are offered"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: items of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "only text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format: only text"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, body: dict[str, Any], says_what: str
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            with pytest.raises(openai.BadRequestError) as caught:
                await create(world, **body)
            assert says_what in caught.value.message and caught.value.code == "unsupported_parameter"
            assert not world.desk.calls

    asyncio.run(scenario())
