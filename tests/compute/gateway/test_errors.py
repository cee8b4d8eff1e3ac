"""What cannot be answered is refused in the caller's dialect, by name, and leaves no call behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from megloom.compute.engines.protocol import EngineRefused
from megloom.compute.gateway.bodies import MAX_BODY_BYTES
from megloom.compute.gateway.dialects.errors import CallError, ErrorKind, anthropic_error, openai_error
from megloom.compute.gateway.protocol import AgentRoute
from tests.compute.gateway.fakes import RawClient, Served, says, served
from tests.compute.gateway.toys import CHATML, write

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT, LEGACY, RESPONSES = "chat/completions", "completions", "responses"
MESSAGES, TOKENS = "messages", "tokens"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "coder", "messages": HI},
    LEGACY: {"model": "coder", "prompt": "x"},
    RESPONSES: {"model": "coder", "input": "hi"},
    MESSAGES: {"model": "coder", "messages": HI, "max_tokens": 9},
    TOKENS: {"model": "coder", "input_ids": [1, 2]},
}
DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"properties": {"x": DEEP}}


def hello(chat: Any) -> Any:
    return says("hello", chat)


async def post(
    world: Served, route: str, body: Any, *, headers: dict[str, str] | None = None, **admitted: Any
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The status, error and headers of an answer to a body, which may be no JSON at all."""
    status, answer, answered = await post_whole(world, route, body, headers=headers, **admitted)
    return status, answer.get("error", {}), answered


async def post_whole(
    world: Served, route: str, body: Any, *, headers: dict[str, str] | None = None, **admitted: Any
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The status, body and headers of an answer."""
    endpoint = await world.admit(**admitted)
    client = await RawClient.connect(world.base_url)
    path = f"{endpoint.openai_url.removeprefix(world.base_url)}/{route}"
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    bearer = {"authorization": f"Bearer {endpoint.token}", **(headers or {})}
    status, answered, answer = await client.ask("POST", path, raw, headers=bearer)
    client.close()
    return status, json.loads(answer), answered


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"model": None}, "model: expected the name of an agent"),
    (CHAT, {"model": 7}, "model: expected a string, got a number"),
    (CHAT, {"messages": None}, "messages: expected at least one message"),
    (CHAT, {"messages": "hi"}, "messages: expected a list, got a string"),
    (CHAT, {"messages": ["hi"]}, "messages[0]: expected an object, got a string"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role: expected one of"),
    (CHAT, {"messages": [{"role": [], "content": "x"}]}, "messages[0].role: expected one of"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected a string"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text parts are read"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text: expected"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id: expected a string"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls: expected a list"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [5]}]}, "tool_calls[0]: expected a function"),
    (CHAT, {"tools": [{"type": "web"}]}, "tools[0]: only functions are offered"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function: expected a function with a name"),
    (CHAT, {"tools": [{"function": {"name": "x", "parameters": DEEP}}]}, "nested deeper than 64 levels"),
    (CHAT, {"max_tokens": 0}, "max_tokens: expected a whole number of at least 1, got 0"),
    (CHAT, {"max_completion_tokens": 2.5}, "max_completion_tokens: expected a whole number"),
    (CHAT, {"temperature": "hot"}, "temperature: expected a number, got a string"),
    (CHAT, {"temperature": -1}, "temperature: expected a number of at least 0"),
    (CHAT, {"top_p": "x"}, "top_p: expected a number, got a string"),
    (CHAT, {"n": 1000}, "n: expected at most 128, got 1000"),
    (CHAT, {"n": True}, "n: expected a whole number of at least 1, got True"),
    (CHAT, {"n": 10**40}, "n: expected a whole number of at least 1, got 1e+40"),
    (CHAT, {"max_tokens": -(10**18)}, "max_tokens: expected a whole number of at least 1, got -1000000"),
    (CHAT, {"stop": 5}, "stop: expected a string or a list of strings, got 5"),
    (CHAT, {"stop": ["x"] * 65}, "stop: expected at most 64 texts, got 65"),
    (CHAT, {"stream": "yes"}, "stream: expected a boolean, got a string"),
    (CHAT, {"stream_options": 5}, "stream_options: expected an object, got a number"),
    (CHAT, {"stream_options": {"include_usage": "no"}}, "include_usage: expected a boolean, got a string"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format: only text is offered"),
    (CHAT, {"functions": [{}]}, "functions: use tools and tool_choice"),
    (LEGACY, {"prompt": None}, "prompt: expected a string or token ids, got None"),
    (LEGACY, {"prompt": ""}, "prompt: expected some text or token ids"),
    (LEGACY, {"prompt": []}, "prompt: expected some token ids, got none"),
    (LEGACY, {"prompt": ["a", "b"]}, "prompt: one prompt per request, got 2"),
    (LEGACY, {"prompt": [1, -5]}, "prompt[1]: expected a token id, got -5"),
    (LEGACY, {"prompt": [1, True]}, "prompt[1]: expected a token id, got True"),
    (LEGACY, {"echo": True}, "echo: is not offered"),
    (LEGACY, {"logprobs": {}}, "logprobs: expected a whole number, got an object"),
    (LEGACY, {"best_of": 3}, "best_of: is not offered"),
    (RESPONSES, {"input": None}, "input: expected a string or a list of items, got None"),
    (RESPONSES, {"input": []}, "input: expected a string or a list of items, got []"),
    (RESPONSES, {"input": [5]}, "input[0]: expected an object, got a number"),
    (RESPONSES, {"input": [{"type": "function_call"}]}, "input[0].call_id: expected a string, got null"),
    (RESPONSES, {"input": [{"type": "function_call_output"}]}, "input[0].call_id: expected a string"),
    (MESSAGES, {"messages": []}, "messages: expected at least one message"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: expected user or assist"),
    (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "messages.0.content: expected a string or"),
    (MESSAGES, {"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0: expected an object"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages.0.content.0: only text blocks are read, got type 'image'",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages.0.content.0.tool_use_id: expected a string",
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": {}}]}
            ]
        },
        "messages.0.content.0.content: expected a string or a list of blocks, got {}",
    ),
    (MESSAGES, {"system": {}}, "system: expected a string or a list of blocks, got {}"),
    (
        MESSAGES,
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y"}]}]},
        "messages.1.content.0.input: expected an object, got null",
    ),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": "I"}]}, "the last one is the assistant's"),
    (MESSAGES, {"tool_choice": "any"}, "tool_choice: expected an object, got a string"),
    (MESSAGES, {"tools": [{"input_schema": {}}]}, "tools.0: expected a function with a name"),
    (TOKENS, {"input_ids": "x"}, "input_ids: expected a list of token ids, got a string"),
    (TOKENS, {"input_ids": [2**31]}, "input_ids[0]: expected a token id, got 2147483648"),
    (TOKENS, {"stream": True}, "stream: token requests are not streamed"),
]


@pytest.mark.parametrize(("route", "change", "told"), BAD_FIELDS)
def test_a_wrong_field_is_named_with_what_was_expected(
    tmp_path: Path, route: str, change: dict[str, Any], told: str
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            status, error, _ = await post(world, route, {**GOOD[route], **change})
            assert (status, error["type"]) == (400, "invalid_request_error")
            assert told in error["message"]
            assert not world.desk.calls

    asyncio.run(scenario())


@pytest.mark.parametrize("route", GOOD)
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b'{"a": NaN}', "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b'{"model": "\\ud800', "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"\\ud800": ' + b"[" * 100_000, "the body is not JSON"),
        (b"[1]", "the body: expected a JSON object, got a list"),
        (b"null", "the body: expected a JSON object, got null"),
    ],
)
def test_a_body_that_is_no_object_is_refused(tmp_path: Path, route: str, body: bytes, told: str) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            status, error, _ = await post(world, route, body)
            assert status == 400 and told in error["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("route", GOOD)
def test_an_unknown_agent_is_not_found_among_the_known(tmp_path: Path, route: str) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            status, error, _ = await post(world, route, {**GOOD[route], "model": "gpt"})
            assert status == 404 and "has the agents coder, judge" in error["message"]
            assert error["type"] == ("not_found_error" if route == MESSAGES else "invalid_request_error")
            assert error.get("code") == (None if route == MESSAGES else "model_not_found")

    asyncio.run(scenario())


@pytest.mark.parametrize("route", GOOD)
def test_a_finished_episode_is_gone_in_every_dialect_and_its_latecomers_are_counted(
    tmp_path: Path, route: str
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            endpoint = await world.admit()
            await world.gateway.close_episode("g000000-0000-m000", 0)
            client = await RawClient.connect(world.base_url)
            path = f"{endpoint.openai_url.removeprefix(world.base_url)}/{route}"
            bearer = {"authorization": f"Bearer {endpoint.token}"}
            raw = json.dumps(GOOD[route]).encode()
            status, _, answer = await client.ask("POST", path, raw, headers=bearer)
            client.close()
            body = json.loads(answer)
            assert status == 410 and "it is over" in body["error"]["message"]
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"].get("code") == (None if route == MESSAGES else "episode_over")
            assert body.get("type") == ("error" if route == MESSAGES else None)
            assert (await world.gateway.close_episode("g000000-0000-m000", 0)).late == 1
            assert not world.desk.calls

    asyncio.run(scenario())


TRUNCATIONS = [
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.1},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 100}},
]


@pytest.mark.parametrize("route", GOOD)
@pytest.mark.parametrize("change", TRUNCATIONS)
def test_truncated_sampling_is_refused_unless_the_admission_ignores_it(
    tmp_path: Path, route: str, change: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            (name,) = change
            status, error, _ = await post(world, route, {**GOOD[route], **change})
            assert status == 400 and error["message"].startswith(f"{name}: truncated or bent sampling")
            assert not world.desk.calls
            status, _, _ = await post(
                world,
                route,
                {**GOOD[route], **change},
                episode_id="g000000-0000-m001",
                ignores_truncation=True,
            )
            assert status == 200
            counts = await world.gateway.close_episode("g000000-0000-m001", 0)
            assert counts.problems == (f"request field {name} is ignored",)

    asyncio.run(scenario())


@pytest.mark.parametrize("route", GOOD)
def test_neutral_values_of_the_same_fields_pass(tmp_path: Path, route: str) -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "frequency_penalty": 0, "logit_bias": {}, "presence_penalty": None}

    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            assert (await post(world, route, {**GOOD[route], **neutral}))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("route", GOOD)
def test_unknown_fields_are_ignored_and_noted_once_per_episode(tmp_path: Path, route: str) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            endpoint = await world.admit()
            client = await RawClient.connect(world.base_url)
            path = f"{endpoint.openai_url.removeprefix(world.base_url)}/{route}"
            body = {**GOOD[route], "frobnicate": {"x": 1}, "seed": 7, "nothing": None}
            for _ in range(3):
                bearer = {"authorization": f"Bearer {endpoint.token}"}
                assert (await client.ask("POST", path, json.dumps(body).encode(), headers=bearer))[0] == 200
            client.close()
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert counts.problems == (
                "request field frobnicate is ignored",
                "request field seed is ignored",
            )

    asyncio.run(scenario())


def refusing(chat: Any) -> Any:
    """An engine that knows how long its context is, where the conductor does not."""
    refusal = "rid=1: 90 prompt tokens and max_tokens=256 do not fit a context of 64, or ask for nothing"
    return lambda ask: [EngineRefused(refusal)]


# By route: the field that its error names, and a prompt that is too long.
TOO_LONG: dict[str, tuple[str | None, dict[str, Any]]] = {
    CHAT: ("messages", {"messages": [{"role": "user", "content": "x" * 90}]}),
    LEGACY: ("prompt", {"prompt": "x" * 90}),
    RESPONSES: ("input", {"input": "x" * 90}),
    TOKENS: ("input_ids", {"input_ids": [1] * 90}),
    MESSAGES: (None, {"messages": [{"role": "user", "content": "x" * 90}]}),
}


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("route", "is_stream"),
    [
        (route, is_stream)
        for route in TOO_LONG
        for is_stream in (False, True)
        if (route, is_stream) != (TOKENS, True)
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_in_the_routes_own_form_before_any_event(
    tmp_path: Path, route: str, is_stream: bool, is_known: bool
) -> None:
    async def scenario() -> None:
        param, prompt = TOO_LONG[route]
        async with served(tmp_path, refusing, context_length=64 if is_known else None) as world:
            request = {**GOOD[route], **prompt, "stream": is_stream}
            status, body, headers = await post_whole(world, route, request)
            assert (status, headers["content-type"]) == (400, "application/json")
            message = body["error"].pop("message")
            assert "prompt is too long" in message and "maximum context length" in message
            told = {"type": "invalid_request_error"}
            if route == MESSAGES:
                assert body == {"type": "error", "error": told}
            else:
                assert body == {"error": {**told, "param": param, "code": "context_length_exceeded"}}
            (end,) = world.desk.ends
            assert end.failure == message and len(world.engine.asks) == (0 if is_known else 1)
            counts = await world.gateway.close_episode("g000000-0000-m000", 0)
            assert (counts.num_calls, counts.num_failed) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_known", [True, False])
def test_official_clients_know_a_prompt_that_leaves_no_room(tmp_path: Path, is_known: bool) -> None:
    async def scenario() -> None:
        context = 64 if is_known else None
        async with served(tmp_path, refusing, context_length=context) as world:
            endpoint = await world.admit()
            messages: list[Any] = [{"role": "user", "content": "x" * 90}]
            with pytest.raises(openai.BadRequestError) as caught:
                await world.openai(endpoint).chat.completions.create(model="coder", messages=messages)
            assert caught.value.code == "context_length_exceeded"
            assert "maximum context length" in caught.value.message
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await world.anthropic(endpoint).messages.create(
                    model="coder", messages=messages, max_tokens=9
                )
            assert all(end.failure and "too long" in end.failure for end in world.desk.ends)

    asyncio.run(scenario())


def test_an_answer_gets_no_more_tokens_than_the_context_has_room_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello, context_length=100) as world:
            endpoint = await world.admit()
            await world.openai(endpoint).chat.completions.create(model="coder", messages=HI)
            (ask,) = world.engine.asks
            assert ask.max_tokens == 100 - len(ask.prompt_ids)

    asyncio.run(scenario())


def test_what_an_engine_refuses_otherwise_is_the_requests_fault(tmp_path: Path) -> None:
    def script(chat: Any) -> Any:
        return lambda ask: [EngineRefused("token id 99999 is outside the vocabulary of 300")]

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            status, error, _ = await post(world, TOKENS, GOOD[TOKENS])
            assert status == 400 and "outside the vocabulary" in error["message"]
            assert world.desk.ends[0].failure == error["message"]

    asyncio.run(scenario())


def test_a_message_that_the_template_refuses_is_a_bad_request(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"

    async def scenario() -> None:
        directory = tmp_path / "strict"
        async with served(tmp_path / "plain", hello) as world:
            directory.mkdir()
            strict = "{% if messages | length > 1 %}" + template + "{% endif %}" + CHATML
            write(directory, strict)
            await world.gateway.load_chats({"p": str(directory)})
            status, error, _ = await post(world, CHAT, {"model": "coder", "messages": HI + HI})
            assert status == 400 and "roles must alternate" in error["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_bound_is_refused(tmp_path: Path, chunked: bool) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            endpoint = await world.admit()
            client = await RawClient.connect(world.base_url)
            path = f"{endpoint.openai_url.removeprefix(world.base_url)}/chat/completions"
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {endpoint.token}\r\n"
            if chunked:
                client.writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
                block = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
                for _ in range((MAX_BODY_BYTES >> 20) + 1):
                    client.writer.write(block)
                    await client.writer.drain()
            else:
                client.writer.write(f"{head}content-length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
            status, _ = await client.read_head()
            assert status == 413
            client.close()

    asyncio.run(scenario())


def test_a_policy_whose_chat_is_not_loaded_yet_is_tried_again_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, hello) as world:
            agents = {"coder": AgentRoute(policy="q", max_tokens=9, temperature=1.0)}
            status, error, headers = await post(world, CHAT, GOOD[CHAT], agents=agents)
            assert status == 503 and headers["retry-after"] == "1"
            assert "the chat template of policy q is not loaded yet" in error["message"]

    asyncio.run(scenario())


def test_what_breaks_inside_is_a_500_in_the_dialect_before_and_within_a_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(chat: Any) -> Any:
        def answer(ask: Any) -> Any:
            if ask.seed > 1:
                yield next(iter(says("abc", chat)(ask)))
            yield ZeroDivisionError("a bug")

        return answer

    async def scenario() -> None:
        async with served(tmp_path, script) as world:
            endpoint = await world.admit()
            client = world.openai(endpoint)
            with pytest.raises(openai.InternalServerError, match="the gateway failed"):
                await client.chat.completions.create(model="coder", messages=HI)
            stream: Any = await client.chat.completions.create(model="coder", messages=HI, stream=True)
            with pytest.raises(openai.APIError, match="the gateway failed"):
                assert [chunk async for chunk in stream]
            with pytest.raises(anthropic.APIStatusError, match="the gateway failed"):
                async with world.anthropic(endpoint).messages.stream(
                    model="coder", messages=HI, max_tokens=9
                ) as events:
                    await events.get_final_message()
            broken: Any = await client.responses.create(model="coder", input="hi", stream=True)
            with pytest.raises(openai.APIError, match="the gateway failed"):
                assert [event async for event in broken]
            assert [end.failure for end in world.desk.ends] == ["a bug"] * 4

    asyncio.run(scenario())
    assert caplog.text.count("ZeroDivisionError: a bug") == 4


def test_every_kind_of_error_has_a_form_in_both_dialects() -> None:
    for kind in ErrorKind:
        error = CallError(kind, "why", param="field")
        assert 400 <= error.status < 600
        assert openai_error(error)["error"]["message"] == "why"
        assert anthropic_error(error)["error"]["message"] == "why"
        retried = kind in (ErrorKind.ENGINE_FAILED, ErrorKind.UNAVAILABLE)
        assert error.headers == ([(b"retry-after", b"1")] if retried else [])
