"""Chat completions, completions, models and tokens, asked by OpenAI's own client over a real port."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.gateway.protocol import Sampled
from megloom.compute.gateway.template import ChatTemplate
from tests.compute.gateway.fakes import EngineAsk, RawClient, Script, Served, pieces, says, served
from tests.compute.gateway.toys import CHATML, THINKING, tool

HI = [{"role": "user", "content": "hi"}]
READ = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt"}}\n</tool_call>'


def saying(text: str, finish: str = "stop") -> Any:
    return lambda chat: says(text, chat, finish=finish)


async def create(world: Served, **body: Any) -> Any:
    client = world.openai(await world.admit())
    return await client.chat.completions.create(**{"model": "coder", "messages": HI, **body})


def test_an_answer_ends_in_a_record_of_the_very_tokens_that_were_sampled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            answer = await create(world, max_tokens=20, temperature=0.1)
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason) == ("hello", "stop")
            (request,), (end,), (ask,) = world.desk.calls.values(), world.desk.ends, world.engine.asks
            assert request.invocation_id == end.invocation_id == "g000000-0000-m000-a0-g000"
            assert request.prompt_ids == world.chat.encode(world.chat.render(HI)) == ask.prompt_ids
            assert request.messages == ('{"content":"hi","role":"user"}',)
            assert (request.agent, request.index, request.parents) == ("coder", 0, ())
            assert end.sampled == Sampled(
                token_ids=(*world.chat.encode("hello"), world.chat.stop_ids[0]),
                logprobs=(-0.25, -0.251),
                version_spans=((3, 0, 2),),
            )
            assert (end.finish_reason, end.text, end.failure, end.unusable) == ("stop", "hello", None, None)
            assert end.rid == ask.rid
            assert answer.usage.prompt_tokens == len(request.prompt_ids)
            assert answer.usage.completion_tokens == 2
            # The agent's temperature counts, not the request's; fewer tokens may be asked for.
            assert (ask.temperature, request.temperature, ask.max_tokens) == (0.7, 0.7, 20)

    asyncio.run(scenario())


def test_a_request_cannot_ask_for_more_tokens_than_its_agent_may_sample(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            await create(world, max_completion_tokens=100_000)
            assert world.engine.asks[0].max_tokens == 256

    asyncio.run(scenario())


def test_the_next_turn_extends_the_sampled_ids_although_they_would_encode_otherwise(tmp_path: Path) -> None:
    def script(chat: ChatTemplate) -> Script:
        split = (*chat.encode("he"), *chat.encode("llo"), chat.stop_ids[0])  # an encoder writes one token
        return lambda ask: pieces(split)

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            client = world.openai(await world.admit())
            first = await client.chat.completions.create(model="coder", messages=HI)
            said = first.choices[0].message.model_dump()
            more = [*HI, said, {"role": "user", "content": "more"}]
            await client.chat.completions.create(model="coder", messages=more)
            one, two = world.desk.calls.values()
            sampled = world.desk.ends[0].sampled.token_ids
            assert two.prompt_ids[: len(one.prompt_ids) + len(sampled)] == one.prompt_ids + sampled
            assert two.parents == ((one.invocation_id, "extends"),)
            assert world.chat.decode_all(two.prompt_ids) == world.chat.render(more)

    asyncio.run(scenario())


def test_a_tool_call_comes_back_reformatted_and_still_extends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying(f"I look.\n{READ}")) as world:
            client = world.openai(await world.admit())
            tools: Any = [tool("read")]
            first = await client.chat.completions.create(model="coder", messages=HI, tools=tools)
            choice = first.choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
            (call,) = choice.message.tool_calls or ()
            assert call.function.name == "read" and json.loads(call.function.arguments) == {"path": "a.txt"}
            echoed = choice.message.model_dump(exclude_none=True)
            echoed["tool_calls"][0]["function"]["arguments"] = '{ "path":\n"a.txt" }'
            result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "data"}]}
            await client.chat.completions.create(model="coder", messages=[*HI, echoed, result], tools=tools)
            one, two = world.desk.calls.values()
            assert two.parents == ((one.invocation_id, "extends"),)
            assert world.desk.ends[0].finish_reason == "stop" and READ in world.desk.ends[0].text

    asyncio.run(scenario())


def test_with_tool_choice_none_the_model_is_not_shown_the_tools(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying(READ)) as world:
            answer = await create(world, tools=[tool("read")], tool_choice="none")
            assert answer.choices[0].message.content == READ and not answer.choices[0].message.tool_calls
            (request,) = world.desk.calls.values()
            assert request.prompt_ids == world.chat.encode(world.chat.render(HI))

    asyncio.run(scenario())


def test_each_of_n_choices_is_a_call_of_its_own_and_any_of_them_can_be_continued(tmp_path: Path) -> None:
    def script(chat: ChatTemplate) -> Script:
        return lambda ask: says(f"answer {ask.seed}", chat)(ask)

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            client = world.openai(await world.admit())
            answer = await client.chat.completions.create(model="coder", messages=HI, n=3)
            texts = [choice.message.content for choice in answer.choices]
            assert sorted(str(text) for text in texts) == ["answer 1", "answer 2", "answer 3"]
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            calls = list(world.desk.calls.values())
            assert answer.usage is not None and answer.usage.prompt_tokens == len(calls[0].prompt_ids)
            assert answer.usage.completion_tokens == sum(len(e.sampled.token_ids) for e in world.desk.ends)
            said: Any = {"role": "assistant", "content": texts[1]}
            more: Any = [*HI, said, {"role": "user", "content": "go on"}]
            await client.chat.completions.create(model="coder", messages=more)
            *_, last = world.desk.calls.values()
            assert last.parents == ((calls[1].invocation_id, "extends"),)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_the_record_at_the_token_that_completes_it(
    tmp_path: Path, stream: bool
) -> None:
    def script(chat: ChatTemplate) -> Script:
        ids = chat.encode("one\n\nOBSERVATION: never seen")
        return lambda ask: pieces(ids, "length", size=4)

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            answer = await create(world, stop=["OBS", "zzz"], stream=stream)
            if stream:
                chunks = [chunk.choices[0] async for chunk in answer]
                text = "".join(chunk.delta.content or "" for chunk in chunks)
                finish = chunks[-1].finish_reason
            else:
                text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert (text.strip(), finish) == ("one", "stop")
            (end,) = world.desk.ends
            kept = world.chat.decode(end.sampled.token_ids)
            assert kept == "one\n\nOBS" and end.unusable is None
            assert end.sampled.version_spans == ((3, 0, len(end.sampled.token_ids)),)
            assert len(end.sampled.logprobs) == len(end.sampled.token_ids)
            assert world.engine.num_left_early == 1  # it was told to stop

    asyncio.run(scenario())


def test_a_stream_says_what_the_whole_answer_would_and_ends_with_its_usage(tmp_path: Path) -> None:
    text = f"So: naïve 🦜 hello\n{READ}"

    async def scenario() -> None:
        async with served(tmp_path, saying(text)) as world:
            tools = [tool("read")]
            stream = await create(
                world, tools=tools, stream=True, logprobs=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
            assert "".join(choice.delta.content or "" for choice in choices) == "So: naïve 🦜 hello"
            (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
            assert call.function.name == "read" and json.loads(call.function.arguments) == {"path": "a.txt"}
            assert choices[0].delta.role == "assistant"
            assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]
            (end,) = world.desk.ends
            told = [t for c in choices if c.logprobs for t in c.logprobs.content or ()]
            # None is lost, also of the text that is held back.
            assert [t.logprob for t in told] == list(end.sampled.logprobs)
            assert chunks[-1].usage.completion_tokens == len(end.sampled.token_ids)
            assert {chunk.id for chunk in chunks} == {"chatcmpl-g000000-0000-m000-a0-g000"}

    asyncio.run(scenario())


def test_a_stream_of_several_choices_keeps_them_apart(tmp_path: Path) -> None:
    def script(chat: ChatTemplate) -> Script:
        return lambda ask: says(f"answer {ask.seed}", chat)(ask)

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            texts = {0: "", 1: ""}
            async for chunk in await create(world, n=2, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            assert sorted(texts.values()) == ["answer 1", "answer 2"]

    asyncio.run(scenario())


def test_log_probabilities_name_each_token_with_its_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            answer = await create(world, logprobs=True)
            content = answer.choices[0].logprobs.content
            assert [(token.token, token.logprob) for token in content] == [
                ("hello", -0.25),
                ("<|im_end|>", -0.251),
            ]

    asyncio.run(scenario())


def test_thinking_is_told_apart_and_the_turn_after_it_extends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("let me\n</think>\n\nyes"), template=THINKING) as world:
            client = world.openai(await world.admit())
            first: Any = await client.chat.completions.create(model="coder", messages=HI)
            message = first.choices[0].message
            assert (message.content, message.reasoning_content) == ("yes", "let me")
            more: Any = [*HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "ok"}]
            await client.chat.completions.create(model="coder", messages=more)
            one, two = world.desk.calls.values()
            assert two.parents == ((one.invocation_id, "extends"),)

    asyncio.run(scenario())


def test_an_answer_cut_by_length_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello", finish="length")) as world:
            answer = await create(world)
            assert answer.choices[0].finish_reason == "length"
            assert world.desk.ends[0].finish_reason == "length"

    asyncio.run(scenario())


@pytest.mark.parametrize("prompt", ["once upon", ["once upon"], "ids", "nested ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_continues_a_text_or_ids_without_a_template(
    tmp_path: Path, prompt: Any, stream: bool
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying(" a <think> time", finish="length")) as world:
            client = world.openai(await world.admit())
            ids = list(world.chat.encode("once upon"))
            asked = {"ids": ids, "nested ids": [ids]}.get(str(prompt), prompt)
            answer: Any = await client.completions.create(
                model="coder", prompt=asked, stream=stream, logprobs=1
            )
            chunks = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
            assert "".join(chunk.text for chunk in chunks) == " a <think> time"  # nothing is parsed out of it
            assert chunks[-1].finish_reason == "length"
            told = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs]
            (request,), (end,) = world.desk.calls.values(), world.desk.ends
            assert tuple(told) == end.sampled.logprobs
            assert request.prompt_ids == tuple(ids) and request.messages == ()

    asyncio.run(scenario())


def test_the_token_route_gives_ids_logprobs_and_versions(tmp_path: Path) -> None:
    def script(chat: ChatTemplate) -> Script:
        return lambda ask: pieces((5, 6, 7), "length", version=9)

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            endpoint = await world.admit()
            client = world.openai(endpoint)
            answer: Any = await client.post(
                "/tokens", cast_to=object, body={"model": "coder", "input_ids": [1, 2], "max_tokens": 3}
            )
            (choice,) = answer["choices"]
            assert choice["output_ids"] == [5, 6, 7]
            assert choice["logprobs"] == list(world.desk.ends[0].sampled.logprobs)
            assert choice["version_spans"] == [[9, 0, 3]]
            assert choice["finish_reason"] == "length"
            assert world.engine.asks[0].prompt_ids == (1, 2)

    asyncio.run(scenario())


def test_the_models_are_the_episodes_agents(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            client = world.openai(await world.admit())
            assert [model.id async for model in client.models.list()] == ["coder", "judge"]

    asyncio.run(scenario())


def test_a_lone_surrogate_in_a_message_is_answered_and_recorded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            endpoint = await world.admit()
            body = json.dumps({"model": "coder", "messages": [{"role": "user", "content": "a\ud800b"}]})
            client = await RawClient.connect(world.base_url)
            path = endpoint.openai_url.removeprefix(world.base_url) + "/chat/completions"
            bearer = {"authorization": f"Bearer {endpoint.token}"}
            status, _, answer = await client.ask("POST", path, body.encode(), headers=bearer)
            assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == "hello"
            (request,) = world.desk.calls.values()
            assert request.messages == ('{"content":"a\\ud800b","role":"user"}',)
            unknown = json.dumps({"model": "\ud800", "messages": [{"role": "user", "content": "a"}]})
            status, _, answer = await client.ask("POST", path, unknown.encode(), headers=bearer)
            assert status == 404 and "does not exist" in json.loads(answer)["error"]["message"]
            client.close()

    asyncio.run(scenario())


def test_a_prompt_of_ten_megabytes_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            long = "<|im_end|>" * (1 << 20)  # special tokens are quick to encode
            answer = await create(world, messages=[{"role": "user", "content": long}])
            assert answer.choices[0].message.content == "hello"
            assert answer.usage.prompt_tokens > 1 << 20

    asyncio.run(scenario())


def test_developer_messages_parts_and_dressing_are_the_same_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello"), template=CHATML) as world:
            plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb"}]
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            dressed = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
            client = world.openai(await world.admit())
            for messages in (plain, dressed):
                await client.chat.completions.create(model="coder", messages=messages)
            one, two = world.desk.calls.values()
            assert one.prompt_ids == two.prompt_ids

    asyncio.run(scenario())


def test_the_engine_is_asked_for_single_tokens_only_where_somebody_reads_along(tmp_path: Path) -> None:
    asked: list[EngineAsk] = []

    def script(chat: ChatTemplate) -> Script:
        def answer(ask: EngineAsk) -> Any:
            asked.append(ask)
            return says("hello", chat)(ask)

        return answer

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            client = world.openai(await world.admit())
            await client.chat.completions.create(model="coder", messages=HI)
            await client.chat.completions.create(model="coder", messages=HI, stop=["x"])
            stream: Any = await client.chat.completions.create(model="coder", messages=HI, stream=True)
            assert [chunk async for chunk in stream]
            assert [ask.incremental for ask in asked] == [False, True, True]

    asyncio.run(scenario())
