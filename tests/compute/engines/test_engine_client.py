"""What the client checks by itself, against a scripted server where a sound engine would never answer so."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from megloom.compute.engines.client import HttpEngine, decode_completion, error_message
from megloom.compute.engines.protocol import (
    EngineInfo,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    PauseMode,
    VersionSpan,
)

INFO = EngineInfo(
    policy="solver", version=0, vocab_size=61, context_length=100, incarnation="x", paused=False
)


def answer(**changes):
    meta = {
        "id": f"{1:032x}",
        "finish_reason": {"type": "length", "length": 2},
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
        "weight_version": "4",
        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
    }
    output_ids = changes.pop("output_ids", [7, 8])
    return json.dumps({"output_ids": output_ids, "meta_info": meta | changes}).encode()


@pytest.fixture
def with_server():
    """Returns a runner of (handler of every request, coroutine that takes a client)."""

    def run(handler, scenario):
        async def main():
            runner = web.ServerRunner(web.Server(handler))
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            engine = HttpEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", "secret", assumed=INFO)
            try:
                await scenario(engine)
            finally:
                await engine.close()
                await runner.cleanup()

        asyncio.run(main())

    return run


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "too long"}}',
        b'{"error": "too long"}',
        b'{"object": "error", "message": "too long", "code": 400}',
        b'{"success": false, "message": "too long"}',
        b"too long",
    ],
)
def test_all_error_shapes_give_the_same_message(body):
    assert error_message(body) == "too long"


def test_sound_answer_is_read(make_request):
    completion = decode_completion(answer(), make_request())
    assert completion.token_ids == (7, 8)
    assert completion.logprobs == (-0.5, -1.5)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.version_spans == (VersionSpan(version=4, start=0, end=2),)


def test_answer_without_spans_takes_its_only_version_and_an_empty_one_has_none(make_request):
    assert decode_completion(answer(weight_versions=None), make_request()).version_spans[0].end == 2
    empty = answer(output_ids=[], completion_tokens=0, weight_versions=[], finish_reason={"type": "abort"})
    assert decode_completion(empty, make_request()).version_spans == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"output_ids": [7]},
        {"output_ids": [7, 9]},
        {"completion_tokens": 3},
        {"output_token_logprobs": [[-0.5, 7, None]]},
        {"output_token_logprobs": None},
        {"id": "somebody else"},
        {"finish_reason": {"type": "tired"}},
        {"finish_reason": None},
        {"weight_versions": [{"version": "4", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "4", "start": 1, "end": 2}]},
        {"weight_versions": None, "weight_version": "default"},
    ],
)
def test_answer_whose_parts_disagree_is_refused(changes, make_request):
    with pytest.raises(EngineProtocolError, match=f"{1:032x}"):
        decode_completion(answer(**changes), make_request())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"token_ids": ()}, "empty prompt"),
        ({"token_ids": (1, 61)}, "61 is outside the vocabulary"),
        ({"token_ids": (-1,)}, "-1 is outside the vocabulary"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 96}, "do not fit"),
        ({"top_p": 0.9}, "truncated sampling"),
        ({"top_k": 3}, "truncated sampling"),
    ],
)
def test_request_that_cannot_succeed_is_never_sent(overrides, message, with_server, make_request):
    sent = []

    async def handler(request):
        sent.append(request.path)
        return web.json_response({"served_model_name": "solver", "weight_version": "0"})

    async def scenario(engine):
        with pytest.raises(EngineRefused, match=message):
            await engine.generate(make_request(**overrides))
        assert "/generate" not in sent

    with_server(handler, scenario)


@pytest.mark.parametrize(("status", "error"), [(400, EngineRefused), (503, EngineUnavailable)])
def test_failed_generate_is_sent_once(status, error, with_server, make_request):
    sent = []

    async def handler(request):
        if request.path != "/generate":
            return web.json_response({"served_model_name": "solver", "weight_version": "0"})
        sent.append(await request.json())
        return web.json_response({"error": "no"}, status=status)

    async def scenario(engine):
        with pytest.raises(error, match=f"{1:032x}"):
            await engine.generate(make_request(stop_token_ids=(3,)))
        (body,) = sent
        assert body["sampling_params"]["sampling_seed"] == 1
        assert body["sampling_params"]["stop_token_ids"] == [3]

    with_server(handler, scenario)


def test_connection_that_breaks_is_unavailable_and_not_retried(with_server, make_request):
    sent = []

    async def handler(request):
        if request.path != "/generate":
            return web.json_response({"served_model_name": "solver", "weight_version": "0"})
        sent.append(request.path)
        request.transport.abort()
        return web.Response()

    async def scenario(engine):
        with pytest.raises(EngineUnavailable):
            await engine.generate(make_request())
        assert sent == ["/generate"]

    with_server(handler, scenario)


def test_dead_address_is_unavailable_and_not_ready(make_request):
    async def scenario():
        engine = HttpEngine("http://127.0.0.1:1", "secret", assumed=INFO)
        with pytest.raises(EngineUnavailable):
            await engine.generate(make_request())
        assert not await engine.ready()
        await engine.close()

    asyncio.run(scenario())


def test_update_flushes_the_cache_unless_requests_are_paused_in_place(with_server):
    bodies = []

    async def handler(request):
        if request.path == "/update_weights_from_disk":
            bodies.append(await request.json())
        return web.json_response({"success": True})

    async def scenario(engine):
        await engine.load_version("/weights", 7, None)
        await engine.pause(PauseMode.IN_PLACE)
        await engine.load_version("/weights", 8, "ab")
        await engine.resume()
        await engine.load_version("/weights", 9, None)
        assert [body["flush_cache"] for body in bodies] == [True, False, True]
        assert [body["weight_version"] for body in bodies] == ["7", "8", "9"]
        assert [body.get("digest") for body in bodies] == [None, "ab", None]

    with_server(handler, scenario)


def test_update_that_reports_no_success_is_refused(with_server):
    async def handler(request):
        return web.json_response({"success": False, "message": "shapes"})

    async def scenario(engine):
        with pytest.raises(EngineRefused, match="shapes"):
            await engine.load_version("/weights", 7, None)

    with_server(handler, scenario)


def test_real_sglang_info_is_completed_by_what_the_caller_knows(with_server):
    async def handler(request):
        if request.path == "/ready":
            return web.Response(status=503)
        return web.json_response({"served_model_name": "/weights/v7", "weight_version": "7"})

    async def scenario(engine):
        info = await engine.info()
        assert (info.policy, info.version, info.vocab_size, info.paused) == ("solver", 7, 61, True)

    with_server(handler, scenario)
