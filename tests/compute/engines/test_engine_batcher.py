"""Continuous batching keeps every request's tokens its own, whoever joins, leaves or changes the weights."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megloom.compute.engines.protocol import FinishReason, VersionSpan


def drain(batcher, requests=()):
    for request in requests:
        batcher.submit(request)
    finished = []
    while batcher.busy:
        finished += batcher.step()
    return finished


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), max_slots=st.integers(1, 9), budget=st.integers(1, 90))
def test_random_arrivals_and_aborts_change_nobody_elses_tokens(
    model_dir, make_batcher, make_live, seed, max_slots, budget
):
    rng = random.Random(seed)
    shared = [rng.randrange(61) for _ in range(40)]
    prompts = [
        shared[: rng.choice([0, 17, 40])] + [rng.randrange(61) for _ in range(rng.randint(1, 20))]
        for _ in range(14)
    ]
    lengths = [rng.randint(1, 12) for _ in prompts]

    def build(index):
        return make_live(index, prompts[index], max_tokens=lengths[index])

    alone = make_batcher(model_dir, max_slots=1, prefill_budget_tokens=1000)
    expected = {}
    for index in range(len(prompts)):
        (request,) = drain(alone, [build(index)])
        expected[request.rid] = request.output_ids

    batcher = make_batcher(model_dir, max_slots=max_slots, prefill_budget_tokens=budget)
    arrivals = [build(index) for index in range(len(prompts))]
    rng.shuffle(arrivals)
    doomed = {request.rid for request in rng.sample(arrivals, 3)}
    finished, live = [], []
    while arrivals or batcher.busy:
        for _ in range(rng.randint(0, 4)):
            if arrivals:
                live.append(arrivals.pop())
                batcher.submit(live[-1])
        if doomed and rng.random() < 0.2:
            aborted = batcher.abort(rng.choice(sorted(doomed)))
            if aborted is not None:
                finished.append(aborted)
        finished += batcher.step()
        assert len(batcher.running) <= max_slots
    assert sorted(request.rid for request in finished) == sorted(expected)
    for request in finished:
        if request.finish_reason is FinishReason.ABORT:
            assert request.output_ids == expected[request.rid][: len(request.output_ids)]
        else:
            assert request.output_ids == expected[request.rid]


def test_request_that_is_sent_again_with_its_partial_output_goes_on_as_if_never_stopped(
    model_dir, make_batcher, make_live
):
    (whole,) = drain(make_batcher(model_dir), [make_live(1, [1, 2, 3], seed=9, max_tokens=20)])
    resumed = make_live(2, [1, 2, 3, *whole.output_ids[:7]], seed=9, max_tokens=13)
    drain(make_batcher(model_dir), [resumed])
    assert resumed.output_ids == whole.output_ids[7:]


def test_one_prompt_sampled_many_times_is_computed_once(model_dir, make_batcher, make_live):
    prompt = [index % 61 for index in range(48)]
    batcher = make_batcher(model_dir, prefill_budget_tokens=400)
    finished = drain(batcher, [make_live(index, prompt) for index in range(8)])
    assert sorted(request.cached_tokens for request in finished) == [0] + [47] * 7
    assert len({tuple(request.output_ids) for request in finished}) > 1


def test_prompt_that_extends_a_finished_request_starts_from_its_cache(model_dir, make_batcher, make_live):
    batcher = make_batcher(model_dir)
    (first,) = drain(batcher, [make_live(1, list(range(20)), max_tokens=10)])
    (second,) = drain(batcher, [make_live(2, [*first.token_ids, 5, 6], max_tokens=4)])
    assert second.cached_tokens == 29  # all but the last sampled token, which was never computed
    (fresh,) = drain(make_batcher(model_dir), [make_live(2, [*first.token_ids, 5, 6], max_tokens=4)])
    assert second.output_ids == fresh.output_ids
    assert second.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


@pytest.mark.parametrize("in_place", [False, True])
def test_cache_of_one_version_never_serves_another(
    in_place, model_dir, other_model_dir, make_batcher, make_live, weights_of
):
    prompt = list(range(40))
    batcher = make_batcher(model_dir)
    drain(batcher, [make_live(1, prompt)])
    survivor = make_live(2, prompt, max_tokens=30)
    batcher.submit(survivor)
    batcher.step()
    if not in_place:
        batcher.retract()
    batcher.load(weights_of(other_model_dir), 1)
    during = make_live(3, prompt)
    batcher.submit(during)
    while during.finish_reason is None:
        batcher.step()
    drain(batcher)
    after = make_live(4, [*survivor.token_ids[:-1], 7])
    drain(batcher, [after])
    fresh = make_batcher(other_model_dir)
    for request in (during, after):
        (expected,) = drain(fresh, [make_live(5, request.prompt_ids, seed=request.seed)])
        assert request.output_ids == expected.output_ids
        assert request.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_token_is_labelled_with_the_version_that_sampled_it(
    model_dir, other_model_dir, make_batcher, make_live, weights_of
):
    batcher = make_batcher(model_dir, version=4)
    request = make_live(1, [1, 2], max_tokens=9)
    batcher.submit(request)
    batcher.step()  # prefill and one decode: two tokens
    batcher.load(weights_of(other_model_dir), 5)
    batcher.load(weights_of(model_dir), 6)
    batcher.step()
    batcher.load(weights_of(other_model_dir), 9)
    drain(batcher)
    assert request.version_spans() == [
        VersionSpan(version=4, start=0, end=2),
        VersionSpan(version=6, start=2, end=3),
        VersionSpan(version=9, start=3, end=9),
    ]


def test_retracted_requests_are_admitted_before_those_that_never_ran(model_dir, make_batcher, make_live):
    batcher = make_batcher(model_dir, max_slots=2)
    requests = [make_live(index, [index], max_tokens=4) for index in range(4)]
    for request in requests:
        batcher.submit(request)
    batcher.step()
    batcher.retract()
    assert [request.rid for request in batcher.waiting] == [request.rid for request in requests]
    assert [len(request.output_ids) for request in requests] == [2, 2, 0, 0]


def test_prefill_budget_lets_running_requests_decode_between_prefills(model_dir, make_batcher, make_live):
    batcher = make_batcher(model_dir, max_slots=20, prefill_budget_tokens=30)
    first = make_live(0, [1, 2], max_tokens=50)
    batcher.submit(first)
    batcher.step()
    crowd = [make_live(index, [index] * 14 + [index]) for index in range(1, 9)]
    for request in crowd:
        batcher.submit(request)
    for steps in range(1, 5):
        before = len(first.output_ids)
        batcher.step()
        assert len(first.output_ids) == before + 1
        assert sum(1 for request in crowd if request.output_ids) == 2 * steps


def test_abort_finds_waiting_and_running_requests_and_nothing_else(model_dir, make_batcher, make_live):
    batcher = make_batcher(model_dir, max_slots=1)
    running, waiting = make_live(1, [1], max_tokens=50), make_live(2, [2], max_tokens=50)
    batcher.submit(running)
    batcher.submit(waiting)
    batcher.step()
    assert batcher.abort("f" * 32) is None
    assert batcher.abort(waiting.rid) is waiting
    assert batcher.abort(running.rid) is running
    assert (len(waiting.output_ids), len(running.output_ids)) == (0, 2)
    assert waiting.version_spans() == []
    assert not batcher.busy
