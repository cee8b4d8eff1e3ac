"""A call's life: engines that go away, clients that go away, ends told exactly once, records that add up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import openai
import pytest

from megloom.compute.engines.protocol import EngineProtocolError, EngineUnavailable
from megloom.compute.gateway.protocol import NoPlace, NotAdmitted, Sampled
from megloom.compute.gateway.sampling import MAX_PLACES
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.rollout.protocol import Endpoint
from tests.compute.gateway.fakes import EngineAsk, Script, Served, Step, pieces, says, served

HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG = "The parrot 🦜 says naïve things to hello people, again and again."


def saying(text: str) -> Callable[[ChatTemplate], Script]:
    return lambda chat: says(text, chat)


async def text_of(stream: AsyncIterator[Any]) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what other tasks bring about."""
    while not condition():  # noqa: ASYNC110 - what is waited for is a fact, not an event
        await asyncio.sleep(0.001)


def dying(chat: ChatTemplate, *, after: tuple[int, ...], death: Callable[[int], Step]) -> Script:
    """Tells the whole text over several engines: place number i dies after `after[i]` more tokens."""
    whole = (*chat.encode(LONG), chat.stop_ids[0])
    prompts: list[int] = []

    def script(ask: EngineAsk) -> Iterable[Step]:
        place = len(prompts)
        prompts.append(len(ask.prompt_ids))
        at = len(ask.prompt_ids) - prompts[0]  # tokens that earlier engines have told
        assert ask.prompt_ids[len(ask.prompt_ids) - at :] == whole[:at]
        count = after[place] if place < len(after) else len(whole)
        rest = whole[at : at + count]
        is_last = at + count >= len(whole)
        told = pieces(rest, "stop" if is_last else None, size=1, version=place + 1)
        for position, (sampled, finish) in enumerate(told):
            spans = ((place + 1, position, position + 1),)  # each engine counts its own request's tokens
            yield (
                Sampled(token_ids=sampled.token_ids, logprobs=(-float(at + position),), version_spans=spans),
                finish,
            )
        if not is_last:
            yield death(place)

    return script


DEATHS: dict[str, Callable[[int], Step]] = {
    "unreachable": lambda place: EngineUnavailable(f"engine {place} is gone"),
    "aborted": lambda place: (Sampled(), "abort"),
}


async def chat_text(world: Served, endpoint: Endpoint, *, stream: bool) -> str:
    """What a chat completion says; of a stream, all that its chunks do."""
    client = world.openai(endpoint)
    answer: Any = await client.chat.completions.create(model="coder", messages=HI, stream=stream)
    return await text_of(answer) if stream else answer.choices[0].message.content


async def message_text(world: Served, endpoint: Endpoint, *, stream: bool) -> str:
    """What an Anthropic message says."""
    client = world.anthropic(endpoint)
    answer: Any = await client.messages.create(model="coder", messages=HI, max_tokens=256, stream=stream)
    if not stream:
        return "".join(block.text for block in answer.content)
    events = [event async for event in answer]
    assert events[-1].type == "message_stop"
    return "".join(event.delta.text for event in events if event.type == "content_block_delta")


async def response_text(world: Served, endpoint: Endpoint, *, stream: bool) -> str:
    """What a response says; the end of a stream repeats its deltas."""
    answer: Any = await world.openai(endpoint).responses.create(model="coder", input="hi", stream=stream)
    if not stream:
        return str(answer.output_text)
    events = [event async for event in answer]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.completed" and events[-1].response.output_text == text
    return text


DIALECTS = {"chat": chat_text, "messages": message_text, "responses": response_text}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("after", [(0, 0), (1, 5), (17, 3), (20, 0)])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_whose_engine_dies_twice_loses_and_repeats_no_token(
    tmp_path: Path, dialect: str, death: str, after: tuple[int, ...], stream: bool
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, lambda chat: dying(chat, after=after, death=DEATHS[death])) as world:
            assert await DIALECTS[dialect](world, await world.admit(), stream=stream) == LONG
            whole = (*world.chat.encode(LONG), world.chat.stop_ids[0])
            (end,) = world.desk.ends
            assert end.sampled.token_ids == whole and end.unusable is None
            assert end.sampled.logprobs == tuple(-float(at) for at in range(len(whole)))
            bounds = [0, after[0], after[0] + after[1], len(whole)]
            spans = [(place + 1, bounds[place], bounds[place + 1]) for place in range(3)]
            assert end.sampled.version_spans == tuple(span for span in spans if span[1] < span[2])
            assert len({ask.rid for ask in world.engine.asks}) == 3
            assert end.rid == world.engine.asks[-1].rid
            assert len(world.desk.causes) == 2
            # What may still be sampled shrinks by what was.
            assert [256 - ask.max_tokens for ask in world.engine.asks] == [0, *bounds[1:3]]

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_dies_after_the_last_token_is_not_asked_again(tmp_path: Path, stream: bool) -> None:
    def script(chat: ChatTemplate) -> Script:
        whole = (*chat.encode("hello"), chat.stop_ids[0])

        def answer(ask: EngineAsk) -> Iterable[Step]:
            yield from pieces(whole, None)
            yield EngineUnavailable("gone before it said stop")

        return answer

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            client = world.openai(await world.admit())
            answer: Any = await client.chat.completions.create(model="coder", messages=HI, stream=stream)
            text = await text_of(answer) if stream else answer.choices[0].message.content
            assert text == "hello" and len(world.engine.asks) == 1 and not world.desk.causes
            assert world.desk.ends[0].finish_reason == "stop"

    asyncio.run(scenario())


def test_a_call_that_no_engine_survives_fails_in_the_end(tmp_path: Path) -> None:
    def script(chat: ChatTemplate) -> Script:
        return lambda ask: [EngineUnavailable("gone")]

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            client = world.openai(await world.admit())
            with pytest.raises(openai.InternalServerError, match=f"{MAX_PLACES} engines went away"):
                await client.chat.completions.create(model="coder", messages=HI)
            assert len(world.engine.asks) == MAX_PLACES
            assert "engines went away" in (world.desk.ends[0].failure or "")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("refusal", "status"), [(NoPlace("no engine of p within 5 s"), 503), (NotAdmitted("it is over"), 410)]
)
def test_a_call_that_finds_no_second_place_ends_as_failed(
    tmp_path: Path, refusal: Exception, status: int
) -> None:
    def script(chat: ChatTemplate) -> Script:
        return lambda ask: [EngineUnavailable("gone")]

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            world.desk.replace_refusal = refusal
            client = world.openai(await world.admit())
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="coder", messages=HI)
            assert caught.value.status_code == status and str(refusal) in caught.value.message
            assert world.desk.ends[0].failure == str(refusal)

    asyncio.run(scenario())


def test_a_call_that_is_refused_a_place_has_no_end_to_tell(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            world.desk.refusal = NoPlace("no engine of p within 5 s")
            client = world.openai(await world.admit())
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="coder", messages=HI)
            assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"
            assert world.desk.ends == []
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert (counts.num_calls, counts.num_failed) == (1, 1)

    asyncio.run(scenario())


def test_the_official_client_tries_again_after_an_engines_failure_by_itself(tmp_path: Path) -> None:
    def script(chat: ChatTemplate) -> Script:
        return lambda ask: (
            [EngineProtocolError("ids and logprobs differ")] if ask.seed == 1 else says("hello", chat)(ask)
        )

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            client = world.openai(await world.admit(), max_retries=1)
            answer = await client.chat.completions.create(model="coder", messages=HI)
            assert answer.choices[0].message.content == "hello"
            first, second = world.desk.ends
            assert first.failure == "ids and logprobs differ" and second.failure is None

    asyncio.run(scenario())


MISFITS: dict[str, Sampled] = {
    "3 token ids came with 2 log-probabilities": Sampled(
        token_ids=(1, 2, 3), logprobs=(-1.0, -1.0), version_spans=((1, 0, 3),)
    ),
    "a log-probability is not a finite number": Sampled(
        token_ids=(1,), logprobs=(float("nan"),), version_spans=((1, 0, 1),)
    ),
    "version spans [(1, 0, 1)] do not cover 2 tokens in order": Sampled(
        token_ids=(1, 2), logprobs=(-1.0, -1.0), version_spans=((1, 0, 1),)
    ),
    "version spans [(1, 0, 1), (2, 2, 3)] do not cover 3 tokens in order": Sampled(
        token_ids=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0), version_spans=((1, 0, 1), (2, 2, 3))
    ),
    "the engine sampled no token": Sampled(),
}


@pytest.mark.parametrize("why", MISFITS)
@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_add_up_is_answered_and_marked_unusable(tmp_path: Path, why: str, stream: bool) -> None:
    async def scenario() -> None:
        async with served(tmp_path, lambda chat: lambda ask: [(MISFITS[why], "stop")]) as world:
            client = world.openai(await world.admit())
            answer: Any = await client.chat.completions.create(
                model="coder", messages=HI, stream=stream, logprobs=True
            )
            if stream:
                assert [chunk async for chunk in answer]
            (end,) = world.desk.ends
            assert end.unusable == why and end.failure is None
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert counts.num_unusable == 1 and counts.problems == (f"coder: {why}",)

    asyncio.run(scenario())


def hanging(chat: ChatTemplate) -> Script:
    """Tells five tokens, then nothing ever."""

    def script(ask: EngineAsk) -> Iterable[Step]:
        yield from pieces(chat.encode("abcde"), None, size=1)
        yield asyncio.Event()

    return script


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_aborts_its_engine_request_and_fails_its_call(
    tmp_path: Path, stream: bool
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hanging) as world:
            client = world.openai(await world.admit())
            asking: Any = client.chat.completions.create(model="coder", messages=HI, stream=stream)
            if stream:
                answer = await asking
                assert (await anext(aiter(answer))).choices
                await answer.close()
            else:
                task = asyncio.ensure_future(asking)
                await until(lambda: world.engine.num_open == 1)
                task.cancel()
            await until(lambda: bool(world.desk.ends))
            (end,) = world.desk.ends
            assert end.failure == "client went away" and end.sampled == Sampled()
            assert world.engine.num_left_early == 1

    asyncio.run(scenario())


def test_a_reader_has_all_that_was_sampled_though_nothing_follows(tmp_path: Path) -> None:
    more = asyncio.Event()

    def script(chat: ChatTemplate) -> Script:
        def steps(ask: EngineAsk) -> Iterable[Step]:
            yield from pieces(chat.encode("abc"), None, size=1)
            yield more  # long after the last piece
            yield from pieces(chat.encode("d"), "length", first=3)

        return steps

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            client = world.openai(await world.admit())
            stream = await client.chat.completions.create(model="coder", messages=HI, stream=True)
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text == "abc":
                    more.set()
            assert text == "abcd"

    asyncio.run(scenario())


def test_a_client_that_goes_away_before_its_call_has_a_place_withdraws_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            world.desk.room = asyncio.Event()
            client = world.openai(await world.admit())
            task = asyncio.ensure_future(client.chat.completions.create(model="coder", messages=HI))
            await until(lambda: bool(world.desk.calls))
            task.cancel()
            await until(lambda: bool(world.desk.ends))
            assert (world.desk.ends[0].rid, world.desk.ends[0].failure) == (None, "client went away")
            assert not world.engine.asks

    asyncio.run(scenario())


def test_a_client_that_goes_away_while_its_end_is_told_has_it_told_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            gate = world.desk.end_gate = asyncio.Event()
            client = world.openai(await world.admit())
            task = asyncio.ensure_future(client.chat.completions.create(model="coder", messages=HI))
            await until(lambda: bool(world.engine.asks) and world.engine.num_open == 0)
            task.cancel()
            await until(lambda: world.gateway.episodes.num_live == 0)
            gate.set()
            await until(lambda: bool(world.desk.ends))
            assert world.desk.ends[0].failure is None  # it was answered, whoever reads it

    asyncio.run(scenario())


def test_closing_an_episode_breaks_a_stream_off_with_an_error_and_an_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hanging) as world:
            endpoint = await world.admit()
            client = world.openai(endpoint)
            stream = await client.chat.completions.create(model="coder", messages=HI, stream=True)
            task = asyncio.create_task(text_of(stream))
            await until(lambda: world.engine.num_open == 1)
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert (counts.num_calls, counts.num_failed) == (1, 1)
            with pytest.raises(openai.APIError, match="it was closed"):
                await task
            assert "it was closed" in (world.desk.ends[0].failure or "")
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="coder", messages=HI)
            assert caught.value.status_code == 410
            assert (await world.gateway.close_episode("g000000-0000-m000", 0)).late == 1

    asyncio.run(scenario())


def test_if_one_choice_fails_the_others_are_stopped_and_end_as_well(tmp_path: Path) -> None:
    def script(chat: ChatTemplate) -> Script:
        def answer(ask: EngineAsk) -> Iterable[Step]:
            if ask.seed == 2:
                yield EngineProtocolError("broken")
            yield asyncio.Event()

        return answer

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            client = world.openai(await world.admit())
            with pytest.raises(openai.InternalServerError, match="broken"):
                await client.chat.completions.create(model="coder", messages=HI, n=3)
            failures = sorted(str(end.failure) for end in world.desk.ends)
            assert failures == ["another choice failed, or the gateway stops"] * 2 + ["broken"]

    asyncio.run(scenario())


def test_a_branch_and_a_late_extension_are_told_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, saying("hello")) as world:
            client = world.openai(await world.admit())
            await client.chat.completions.create(model="coder", messages=HI)
            changed: list[Any] = [
                *HI,
                {"role": "assistant", "content": "hello"},
                {"role": "user", "content": "x"},
            ]
            tools: list[Any] = [{"type": "function", "function": {"name": "new", "parameters": {}}}]
            await client.chat.completions.create(model="coder", messages=changed, tools=tools)
            *_, branch = world.desk.calls.values()
            assert branch.parents == ()
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert counts.num_branches == 1
            assert any("tools have changed" in problem for problem in counts.problems)

    asyncio.run(scenario())


def test_two_hundred_and_fifty_six_calls_at_once_are_answered_and_recorded_once_each(tmp_path: Path) -> None:
    def script(chat: ChatTemplate) -> Script:
        return lambda ask: says(f"answer {ask.prompt_ids[3]} {ask.seed}", chat)(ask)

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            endpoints = [await world.admit(f"g000000-{number:04d}-m000") for number in range(16)]
            clients = [world.openai(endpoint) for endpoint in endpoints]

            async def ask(number: int) -> tuple[int, str]:
                messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
                answer: Any = await clients[number % 16].chat.completions.create(
                    model="coder", messages=messages, stream=bool(number % 2)
                )
                text = await text_of(answer) if number % 2 else answer.choices[0].message.content
                return number, text

            answers = await asyncio.gather(*(ask(number) for number in range(256)))
            assert len({text for _, text in answers}) == 256
            by_call = {end.invocation_id: end for end in world.desk.ends}
            for number, text in answers:
                question = f"question {number}"
                (call,) = [
                    request
                    for request in world.desk.calls.values()
                    if json.loads(request.messages[0])["content"] == question
                ]
                assert by_call[call.invocation_id].text == text
                assert call.episode_id == f"g000000-{number % 16:04d}-m000"
            assert {call.index for call in world.desk.calls.values()} == set(range(16))

    asyncio.run(scenario())
