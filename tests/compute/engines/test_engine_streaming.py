"""Streamed answers, through the client and on the wire: what a real engine must do too (see conftest)."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from megloom.compute.engines.protocol import EngineRefused, PauseMode

pytestmark = pytest.mark.filterwarnings("error")
LONG = 3000  # tokens: samples far longer than any test waits
MEDIUM = 1500  # tokens: long enough to be caught in the middle, short enough to be waited for


def needs(capability):
    return pytest.mark.needs(capability)


def stream(client, request, *, incremental=True):
    return client.stream(
        rid=request.rid,
        prompt_ids=request.token_ids,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        incremental=incremental,
    )


async def joined(pieces):
    """All pieces as one: (ids, logprobs, spans, finish reasons, number of pieces)."""
    ids, logprobs, spans, reasons = [], [], [], []
    async for sampled, reason in pieces:
        ids += sampled.token_ids
        logprobs += sampled.logprobs
        spans += sampled.version_spans
        reasons.append(reason)
        assert len(ids) == len(logprobs) == (spans[-1][2] if spans else 0)
    return ids, logprobs, spans, reasons


def merged(spans):
    out = []
    for version, start, end in spans:
        assert start == (out[-1][2] if out else 0)
        if out and out[-1][0] == version:
            out[-1] = (version, out[-1][1], end)
        else:
            out.append((version, start, end))
    return out


def test_the_pieces_of_a_stream_are_the_whole_answer_and_only_the_last_has_a_reason(
    with_engine, make_request
):
    async def scenario(client, raw):
        request = make_request(1, max_tokens=200, temperature=0.0)
        whole = await client.generate(request)
        ids, logprobs, spans, reasons = await joined(
            stream(client, make_request(2, max_tokens=200, temperature=0.0))
        )
        assert tuple(ids) == whole.token_ids
        assert logprobs == pytest.approx(whole.logprobs, abs=1e-5)
        assert merged(spans) == [(3, 0, 200)]
        assert len(reasons) > 1 and reasons[-1] == "length" and set(reasons[:-1]) == {None}

    with_engine(scenario)


def test_each_piece_says_how_much_of_its_prompt_was_cached(with_engine, make_request):
    async def scenario(client, raw):
        for incremental in (True, False):
            async for sampled, _ in stream(client, make_request(max_tokens=3), incremental=incremental):
                assert 0 <= sampled.num_cached_tokens < len(make_request().token_ids)

    with_engine(scenario)


def test_without_increments_there_is_one_piece(with_engine, make_request):
    async def scenario(client, raw):
        ids, _, spans, reasons = await joined(stream(client, make_request(max_tokens=30), incremental=False))
        assert (len(ids), spans, reasons) == (30, [(3, 0, 30)], ["length"])

    with_engine(scenario)


def test_a_sampled_stop_token_ends_the_stream_and_belongs_to_it(with_engine, make_request):
    async def scenario(client, raw):
        greedy = await client.generate(make_request(1, max_tokens=6, temperature=0.0))
        stop = greedy.token_ids[2]
        request = make_request(2, max_tokens=6, temperature=0.0, stop_token_ids=(stop,))
        ids, _, _, reasons = await joined(stream(client, request))
        assert (ids[-1], reasons[-1]) == (stop, "stop")

    with_engine(scenario)


def test_an_aborted_stream_ends_with_what_it_has(with_engine, make_request):
    async def scenario(client, raw):
        request = make_request(max_tokens=LONG)
        reading = asyncio.create_task(joined(stream(client, request)))
        await raw.wait_until("generation_tokens_total", lambda tokens: tokens >= 3)
        await client.abort(request.rid)
        ids, _, _, reasons = await reading
        assert reasons[-1] == "abort" and 3 <= len(ids) < LONG

    with_engine(scenario)


def test_a_stream_that_is_left_early_ends_at_the_engine(with_engine, make_request):
    async def scenario(client, raw):
        async with aclosing(stream(client, make_request(max_tokens=LONG))) as pieces:
            async for _ in pieces:
                break
        await raw.wait_until("num_running_reqs", lambda running: running == 0)

    with_engine(scenario)


def test_a_cancelled_reader_takes_its_stream_with_it(with_engine, make_request):
    async def scenario(client, raw):
        reading = asyncio.create_task(joined(stream(client, make_request(max_tokens=LONG))))
        await raw.wait_until("num_running_reqs", lambda running: running == 1)
        reading.cancel()
        await raw.wait_until("num_running_reqs", lambda running: running == 0)

    with_engine(scenario)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_an_update_under_a_pause_shows_in_the_spans_of_a_running_stream(
    mode, with_engine, make_request, engine_under_test
):
    async def scenario(client, raw):
        reading = asyncio.create_task(joined(stream(client, make_request(max_tokens=MEDIUM))))
        await raw.wait_until("generation_tokens_total", lambda tokens: tokens >= 5)
        await client.pause(mode)
        await client.load_version(engine_under_test.other_model_dir, 4, None)
        await client.resume()
        ids, _, spans, reasons = await reading
        (old, first, change), (new, again, end) = merged(spans)
        assert (old, first, new, again, end) == (3, 0, 4, change, MEDIUM)
        assert (len(ids), reasons[-1]) == (MEDIUM, "length")

    with_engine(scenario)


def test_many_streams_at_once_get_each_their_own_tokens(with_engine, make_request):
    async def scenario(client, raw):
        requests = [
            make_request(n, token_ids=(n, n + 1), max_tokens=20 + n, temperature=0.0) for n in range(1, 17)
        ]
        wholes = [await client.generate(request) for request in requests]
        streams = [
            make_request(100 + n, token_ids=(n, n + 1), max_tokens=20 + n, temperature=0.0)
            for n in range(1, 17)
        ]
        answers = await asyncio.gather(*(joined(stream(client, request)) for request in streams))
        for whole, (ids, *_) in zip(wholes, answers, strict=True):
            assert tuple(ids) == whole.token_ids

    with_engine(scenario)


def test_events_are_cumulative_and_the_last_says_done(with_engine):
    async def scenario(client, raw):
        body = {
            "rid": "c" * 32,
            "input_ids": [3, 1, 4],
            "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
        status, text = await raw.post("/generate", body)
        events = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
        assert (status, events.pop()) == (200, "[DONE]")
        parsed = [json.loads(event) for event in events]
        for event in parsed:
            meta = event["meta_info"]
            assert len(event["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
        assert [event["meta_info"]["finish_reason"] for event in parsed[:-1]] == [None] * (len(parsed) - 1)
        last = parsed[-1]
        assert last["meta_info"]["finish_reason"]["type"] == "length" and len(last["output_ids"]) == 40
        for event in parsed:
            assert last["output_ids"][: len(event["output_ids"])] == event["output_ids"]

    with_engine(scenario)


def test_an_error_of_a_streamed_request_is_refused_for_the_client(with_engine, make_request):
    async def scenario(client, raw):
        body = {"input_ids": [1], "stream": True, "sampling_params": {"top_p": 1.5}}
        _, text = await raw.post("/generate", body)
        assert "top_p must be in" in str(text)
        first = make_request(max_tokens=LONG)
        running = asyncio.create_task(client.generate(first))
        await raw.wait_until("num_running_reqs", lambda running: running == 1)
        with pytest.raises(EngineRefused, match="Duplicate request ID"):
            await joined(stream(client, first))
        await client.abort(first.rid)
        await running

    with_engine(scenario)
