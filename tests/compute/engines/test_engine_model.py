"""The forward pass equals transformers' to 1e-4, whatever batch, slot, prefix or version is in play."""

from __future__ import annotations

import random

import pytest
import torch

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "qwen3": ("qwen3", {}),
    "qwen3 untied": ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama": ("llama", {"num_key_value_heads": 1}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
}


def drain(batcher, requests=()):
    for request in requests:
        batcher.submit(request)
    finished = []
    while batcher.busy:
        finished += batcher.step()
    return finished


def random_requests(make_live, count, seed, **overrides):
    rng = random.Random(seed)
    return [
        make_live(
            index,
            [rng.randrange(61) for _ in range(rng.choice([1, 2, 7, 16, 33, 50]))],
            max_tokens=rng.randint(1, 24),
            **overrides,
        )
        for index in range(count)
    ]


def assert_logprobs_match(reference_logprobs, folder, request, temperature):
    expected = reference_logprobs(folder, request.token_ids, len(request.prompt_ids), temperature)
    torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_ragged_prompts_in_moving_slots_equal_a_full_forward(
    name, temperature, save_model, make_batcher, make_live, reference_logprobs
):
    architecture, overrides = MODELS[name]
    folder = save_model(11, architecture, **overrides)
    batcher = make_batcher(folder, max_slots=6, prefill_budget_tokens=100)
    finished = drain(batcher, random_requests(make_live, 30, 5, temperature=temperature))
    assert len(finished) == 30
    for request in finished:
        assert_logprobs_match(reference_logprobs, folder, request, temperature)


def test_greedy_takes_the_best_id_and_reports_its_logprob_at_temperature_one(
    model_dir, make_batcher, make_live, reference_logprobs
):
    (request,) = drain(make_batcher(model_dir), [make_live(1, [5, 6, 7], temperature=0.0, max_tokens=6)])
    assert_logprobs_match(reference_logprobs, model_dir, request, 1.0)
    for end in (3, 8):
        candidates = [
            float(reference_logprobs(model_dir, [*request.token_ids[:end], token_id], end)[0])
            for token_id in range(61)
        ]
        assert candidates.index(max(candidates)) == request.token_ids[end]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_retracted_requests_go_on_under_new_weights_as_if_prefilled_with_them(
    name, save_model, make_batcher, make_live, reference_logprobs, weights_of
):
    architecture, overrides = MODELS[name]
    old, new = (save_model(seed, architecture, **overrides) for seed in (21, 22))
    batcher = make_batcher(old, version=1)
    requests = random_requests(make_live, 8, 3)
    for request in requests:
        request.max_tokens = 20
        batcher.submit(request)
    for _ in range(6):
        batcher.step()
    assert batcher.retract() == len(requests)
    batcher.load(weights_of(new), 2)
    drain(batcher)
    for request in requests:
        first, second = request.version_spans()
        assert (first.version, second.version, request.num_retractions) == (1, 2, 1)
        for folder, span in ((old, first), (new, second)):
            num_past = len(request.prompt_ids) + span.start
            expected = reference_logprobs(folder, request.token_ids, num_past)[: span.end - span.start]
            actual = torch.tensor(request.logprobs[span.start : span.end])
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_on_a_gpu_equal_those_on_the_cpu(name, save_model, make_batcher, make_runner, make_live):
    architecture, overrides = MODELS[name]
    folder = save_model(11, architecture, **overrides)
    on_cpu = drain(make_batcher(folder, max_slots=6), random_requests(make_live, 20, 5))
    on_gpu = drain(
        make_batcher(folder, max_slots=6, runner=make_runner("torch", folder, "cuda")),
        random_requests(make_live, 20, 5),
    )
    by_rid = {request.rid: request for request in on_gpu}
    for request in on_cpu:
        twin = by_rid[request.rid]
        assert twin.output_ids == request.output_ids
        torch.testing.assert_close(
            torch.tensor(twin.logprobs), torch.tensor(request.logprobs), atol=1e-3, rtol=0
        )
