"""What every engine behind the client must do, whoever serves it; see conftest for running it on SGLang.

Tests that need more than the common ground name a capability and are skipped where it is missing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from megloom.compute.engines.protocol import EngineRefused, FinishReason, PauseMode, VersionSpan

pytestmark = pytest.mark.filterwarnings("error")
LONG = 3000  # tokens: samples far longer than any test waits
MEDIUM = 1500  # tokens: long enough to be caught in the middle, short enough to be waited for


def needs(capability):
    return pytest.mark.needs(capability)


def span(version, start, end):
    return VersionSpan(version=version, start=start, end=end)


def test_completion_holds_ids_logprobs_version_and_length_finish(
    with_engine, make_request, reference_logprobs, engine_under_test
):
    async def scenario(client, raw):
        request = make_request(max_tokens=9, temperature=0.7)
        completion = await client.generate(request)
        assert completion.rid == request.rid
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.version_spans == (span(3, 0, 9),)
        expected = reference_logprobs(
            engine_under_test.model_dir,
            [*request.token_ids, *completion.token_ids],
            len(request.token_ids),
            0.7,
        )
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)

    with_engine(scenario)


def test_sampled_stop_token_is_part_of_the_completion(with_engine, make_request):
    async def scenario(client, raw):
        greedy = await client.generate(make_request(1, max_tokens=6, temperature=0.0))
        stop = greedy.token_ids[2]
        first = greedy.token_ids.index(stop)
        stopped = await client.generate(
            make_request(2, max_tokens=6, temperature=0.0, stop_token_ids=(stop,))
        )
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.token_ids == greedy.token_ids[: first + 1]
        assert len(stopped.logprobs) == first + 1

    with_engine(scenario)


def test_requests_in_one_batch_get_their_own_logprobs(
    with_engine, make_request, reference_logprobs, engine_under_test
):
    async def scenario(client, raw):
        requests = [
            make_request(
                index,
                token_ids=tuple((index * k) % 61 for k in range(1, 3 + index)),
                max_tokens=3 + index % 5,
            )
            for index in range(1, 24)
        ]
        completions = await asyncio.gather(*map(client.generate, requests))
        for request, completion in zip(requests, completions, strict=True):
            expected = reference_logprobs(
                engine_under_test.model_dir,
                [*request.token_ids, *completion.token_ids],
                len(request.token_ids),
            )
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)

    with_engine(scenario)


@needs("seeds")
def test_the_same_seed_replays_the_same_tokens_alone_and_in_a_crowd(with_engine, make_request):
    async def scenario(client, raw):
        alone = await client.generate(make_request(1, seed=77, max_tokens=20))
        crowd = [make_request(index, seed=index, max_tokens=index) for index in range(2, 20)]
        again, *_ = await asyncio.gather(
            client.generate(make_request(99, seed=77, max_tokens=20)), *map(client.generate, crowd)
        )
        assert again.token_ids == alone.token_ids
        other = await client.generate(make_request(98, seed=78, max_tokens=20))
        assert other.token_ids != alone.token_ids

    with_engine(scenario)


def test_abort_returns_the_partial_output(with_engine, make_request):
    async def scenario(client, raw):
        request = make_request(max_tokens=LONG)
        running = asyncio.create_task(client.generate(request))
        await raw.wait_until("generation_tokens_total", lambda tokens: tokens >= 3)
        await client.abort(request.rid)
        completion = await running
        assert completion.finish_reason is FinishReason.ABORT
        assert 3 <= len(completion.token_ids) < LONG
        assert completion.version_spans == (span(3, 0, len(completion.token_ids)),)

    with_engine(scenario)


@needs("exact_abort")
def test_abort_of_a_rid_spares_rids_that_start_alike(with_engine):
    async def scenario(client, raw):
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": MEDIUM, "ignore_eos": True}}
        spared = asyncio.create_task(raw.post("/generate", body | {"rid": "r-10"}))
        await raw.wait_until("num_running_reqs", lambda running: running == 1)
        await client.pause(PauseMode.IN_PLACE)
        assert await raw.post("/abort_request", {"rid": "r-1"}) == (200, "")
        assert await raw.post("/abort_request", {"rid": ""}) == (200, "")
        assert await raw.metric("num_running_reqs") == 1
        await client.resume()
        _, answer = await spared
        assert answer["meta_info"]["finish_reason"]["type"] == "length"

    with_engine(scenario)


def test_client_that_leaves_takes_its_request_with_it(with_engine, make_request):
    async def scenario(client, raw):
        leaving = asyncio.create_task(client.generate(make_request(max_tokens=LONG)))
        await raw.wait_until("num_running_reqs", lambda running: running == 1)
        leaving.cancel()
        await raw.wait_until("num_running_reqs", lambda running: running == 0)

    with_engine(scenario)


def test_paused_engine_is_not_ready_and_lets_new_requests_wait(with_engine, make_request):
    async def scenario(client, raw):
        assert await client.ready()
        await client.pause(PauseMode.RETRACT)
        assert not await client.ready()
        waiting = asyncio.create_task(client.generate(make_request()))
        await raw.wait_until("num_queue_reqs", lambda queued: queued == 1)
        assert not waiting.done()
        await client.resume()
        assert len((await waiting).token_ids) == 8
        assert await client.ready()

    with_engine(scenario)


def test_pause_by_abort_ends_live_requests_with_partial_outputs(with_engine, make_request):
    async def scenario(client, raw):
        running = [asyncio.create_task(client.generate(make_request(i, max_tokens=LONG))) for i in (1, 2)]
        await raw.wait_until("num_running_reqs", lambda running: running == 2)
        await client.pause(PauseMode.ABORT)
        assert {c.finish_reason for c in await asyncio.gather(*running)} == {FinishReason.ABORT}
        await client.resume()

    with_engine(scenario)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_update_under_a_pause_splits_a_completion_into_version_spans(
    mode, with_engine, make_request, engine_under_test, reference_logprobs
):
    async def scenario(client, raw):
        request = make_request(max_tokens=MEDIUM)
        running = asyncio.create_task(client.generate(request))
        await raw.wait_until("generation_tokens_total", lambda tokens: tokens >= 5)
        await client.pause(mode)
        await client.load_version(engine_under_test.other_model_dir, 4, None)
        await client.resume()
        completion = await running
        old, new = completion.version_spans
        assert (old.version, new.version) == (3, 4)
        assert (old.start, old.end, new.end) == (0, new.start, MEDIUM)
        assert (await client.info()).version == 4
        if mode is PauseMode.RETRACT:  # the whole past was computed anew under the new weights
            tokens = [*request.token_ids, *completion.token_ids]
            expected = reference_logprobs(
                engine_under_test.other_model_dir, tokens, len(request.token_ids) + new.start
            )
            actual = torch.tensor(completion.logprobs[new.start :])
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)

    with_engine(scenario)


def test_update_without_a_pause_waits_for_live_requests(with_engine, make_request, engine_under_test):
    async def scenario(client, raw):
        live = asyncio.create_task(client.generate(make_request(1, max_tokens=MEDIUM)))
        await raw.wait_until("num_running_reqs", lambda running: running == 1)
        await client.load_version(engine_under_test.other_model_dir, 4, None)
        assert (await live).version_spans == (span(3, 0, MEDIUM),)
        assert (await client.generate(make_request(2))).version_spans == (span(4, 0, 8),)

    with_engine(scenario)


@needs("clean_refusal")
def test_update_that_would_keep_stale_cache_is_refused_and_changes_nothing(
    with_engine, make_request, engine_under_test
):
    async def scenario(client, raw):
        live = asyncio.create_task(client.generate(make_request(max_tokens=MEDIUM)))
        await raw.wait_until("generation_tokens_total", lambda tokens: tokens >= 3)
        await client.pause(PauseMode.IN_PLACE)
        body = {"model_path": engine_under_test.other_model_dir, "weight_version": "4", "flush_cache": True}
        status, answer = await raw.post("/update_weights_from_disk", body)
        assert (status, answer["success"]) == (400, False)
        await client.resume()
        assert (await live).version_spans == (span(3, 0, MEDIUM),)
        assert (await client.info()).version == 3

    with_engine(scenario)


@needs("config_check")
def test_weights_of_another_shape_are_refused_and_the_old_ones_serve_on(
    with_engine, make_request, save_model
):
    async def scenario(client, raw):
        greedy = make_request(1, temperature=0.0)
        before = await client.generate(greedy)
        wider = save_model(5, intermediate_size=64)
        for folder in (wider, wider + "-missing"):
            with pytest.raises(EngineRefused, match="not updated"):
                await client.load_version(folder, 4, None)
        assert await client.generate(greedy) == before

    with_engine(scenario)


@needs("digest")
def test_weights_with_another_digest_are_refused(with_engine, engine_under_test):
    async def scenario(client, raw):
        folder = engine_under_test.other_model_dir
        content = (Path(folder) / "model.safetensors").read_bytes()
        with pytest.raises(EngineRefused, match="digest"):
            await client.load_version(folder, 4, "00" * 64)
        assert (await client.info()).version == 3
        await client.load_version(folder, 4, blake3(content).hexdigest())
        assert (await client.info()).version == 4

    with_engine(scenario)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [1] * 4096}, "longer than the model's context"),
        ({"sampling_params": {"max_new_tokens": 4095}}, "exceeds the model's maximum context"),
        ({"sampling_params": {"foo": 1}}, "unknown field `foo`"),
        ({"sampling_params": {"top_p": 1.5}}, "top_p must be in"),
        ({"sampling_params": {"temperature": -1}}, "temperature must be"),
    ],
)
def test_request_that_breaks_a_rule_is_a_400(change, message, with_engine):
    async def scenario(client, raw):
        status, answer = await raw.post("/generate", {"input_ids": [1, 2]} | change)
        assert status == 400
        assert message in str(answer["error"])

    with_engine(scenario)


@needs("vocabulary_check")
@pytest.mark.parametrize("token_id", [-1, 61, 2**40])
def test_id_outside_the_vocabulary_is_a_400_and_harms_nobody(token_id, with_engine, make_request):
    async def scenario(client, raw):
        status, answer = await raw.post("/generate", {"input_ids": [1, token_id]})
        assert (status, str(token_id) in str(answer)) == (400, True)
        assert len((await client.generate(make_request())).token_ids) == 8

    with_engine(scenario)


@needs("training_flag")
@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}])
def test_truncated_sampling_is_refused_for_training_only(truncation, with_engine):
    async def scenario(client, raw):
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2} | truncation}
        assert (await raw.post("/generate", body | {"training": True}))[0] == 400
        assert (await raw.post("/generate", body))[0] == 200

    with_engine(scenario)


def test_duplicate_live_rid_is_a_400(with_engine, make_request):
    async def scenario(client, raw):
        request = make_request(max_tokens=LONG)
        first = asyncio.create_task(client.generate(request))
        await raw.wait_until("num_running_reqs", lambda running: running == 1)
        with pytest.raises(EngineRefused, match="Duplicate request ID"):
            await client.generate(request)
        await client.abort(request.rid)
        assert (await first).finish_reason is FinishReason.ABORT

    with_engine(scenario)


def test_list_of_inputs_gets_a_list_of_answers(with_engine):
    async def scenario(client, raw):
        body = {
            "input_ids": [[1, 2, 3], [4]],
            "rid": ["a" * 32, "b" * 32],
            "sampling_params": {"max_new_tokens": 3, "ignore_eos": True},
        }
        status, answers = await raw.post("/generate", body)
        assert status == 200
        assert [answer["meta_info"]["id"] for answer in answers] == ["a" * 32, "b" * 32]
        assert [len(answer["output_ids"]) for answer in answers] == [3, 3]

    with_engine(scenario)


def test_flush_is_refused_while_requests_run(with_engine, make_request):
    async def scenario(client, raw):
        assert (await raw.post("/flush_cache"))[0] == 200
        request = make_request(max_tokens=LONG)
        running = asyncio.create_task(client.generate(request))
        await raw.wait_until("num_running_reqs", lambda running: running == 1)
        assert (await raw.post("/flush_cache"))[0] == 400
        await client.abort(request.rid)
        await running

    with_engine(scenario)


def test_info_names_policy_version_limits_and_incarnation(with_engine):
    async def scenario(client, raw):
        info = await client.info()
        assert (info.policy, info.version, info.vocab_size, info.context_length) == ("solver", 3, 61, 4096)
        assert (info.incarnation, info.paused) == ("first", False)
        await client.pause(PauseMode.IN_PLACE)
        assert (await client.info()).paused
        await client.resume()
        assert (await raw.call("GET", "/server_info"))[0] == 200
        assert (await raw.call("GET", "/health"))[0] == 200

    with_engine(scenario)


@needs("guards_all_routes")
def test_every_route_is_shut_without_the_token(engine_url):
    import aiohttp

    paths = ["/generate", "/abort_request", "/pause_generation", "/continue_generation", "/model_info"]
    paths += ["/update_weights_from_disk", "/flush_cache", "/server_info", "/ready", "/health", "/metrics"]

    async def scenario():
        async with aiohttp.ClientSession() as session:
            for path in [*paths, "/", "/no_such_route"]:
                for method in ("GET", "POST", "PUT"):
                    for headers in ({}, {"Authorization": "Bearer wrong"}):
                        async with session.request(method, engine_url + path, headers=headers) as response:
                            assert response.status == 401, (method, path)

    asyncio.run(scenario())
