"""The kernels compute what torch computes, alike for every batch, and stand back where they do not gain."""

from __future__ import annotations

import dataclasses
import logging
import random

import pytest
import torch

from megloom.compute.engines import runners
from megloom.compute.engines.batcher import Batcher
from megloom.compute.engines.checkpoint import read_config
from megloom.compute.engines.protocol import FinishReason
from megloom.compute.engines.runner import Admission, TorchRunner

compiled = pytest.importorskip("megloom.compute.engines.compiled", exc_type=ImportError)

CPU = torch.device("cpu")
MODELS = {
    "qwen3": ("qwen3", {}),
    "qwen3 untied, odd widths": (
        "qwen3",
        {"tie_word_embeddings": False, "num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 71},
    ),
    "llama": ("llama", {"num_key_value_heads": 1, "intermediate_size": 40}),
}


def requests_of(make_live, count, seed=0, **overrides):
    """Returns requests of all lengths, whose prompts need more than one chunk together."""
    rng = random.Random(seed)
    return [
        make_live(
            index,
            [rng.randrange(61) for _ in range(rng.choice([1, 2, 9, 33, 70]))],
            **{"max_tokens": 12} | overrides,
        )
        for index in range(count)
    ]


def admit(requests):
    return [Admission(request=r, token_ids=r.token_ids, source_slot=0, num_cached=0) for r in requests]


def take(requests, sampled):
    for request, token_ids, logprobs in zip(requests, sampled.ids, sampled.logprobs, strict=True):
        request.extend(token_ids, logprobs, 0)


def drain(batcher, requests):
    for request in requests:
        batcher.submit(request)
    finished = []
    while batcher.busy:
        finished += batcher.step()
    return {request.rid: request for request in finished}


@pytest.fixture
def make_over(make_runner):
    """Returns a builder of batchers over a kind of runner."""

    def make(kind, folder, *, max_slots=8, prefill_budget_tokens=64, max_steps=1):
        return Batcher(
            make_runner(kind, folder),
            version=0,
            max_slots=max_slots,
            prefill_budget_tokens=prefill_budget_tokens,
            max_steps=max_steps,
        )

    return make


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 7])
def test_prefill_and_decode_equal_torch(name, count, save_model, make_runner, make_live):
    architecture, overrides = MODELS[name]
    folder = save_model(31, architecture, **overrides)
    torchs, kernels = (make_runner(kind, folder) for kind in ("torch", "compiled"))
    ours, theirs = requests_of(make_live, count), requests_of(make_live, count)
    take(theirs, torchs.prefill(0, admit(theirs)))
    take(ours, kernels.prefill(0, admit(ours)))
    for _ in range(6):
        ids = torch.tensor([[request.output_ids[-1]] for request in theirs])
        positions = torch.tensor([request.num_tokens - 1 for request in theirs])
        rows = torchs.model.decode_rows(positions, torchs.cache.length)
        torchs.cache.ensure(count, int(positions.max()) + 1)
        expected = torchs.model.forward(torchs.cache, ids, rows)
        take(theirs, torchs.decode(theirs, 1))
        take(ours, kernels.decode(ours, 1))
        torch.testing.assert_close(kernels.logits(count), expected, atol=1e-5, rtol=1e-5)
    for request, other in zip(ours, theirs, strict=True):
        assert request.output_ids == other.output_ids
        assert request.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        slot, length = ours.index(request), request.num_tokens - 1
        for name in ("keys", "values"):
            mine, their = (getattr(runner.cache, name)[:, slot, :, :length] for runner in (kernels, torchs))
            torch.testing.assert_close(mine, their, atol=1e-5, rtol=1e-5)


def test_a_request_gets_the_same_bits_alone_and_in_company(model_dir, make_over, make_live):
    together = drain(make_over("compiled", model_dir, max_slots=9), requests_of(make_live, 9))
    for request in requests_of(make_live, 9):
        (alone,) = drain(make_over("compiled", model_dir, max_slots=1), [request]).values()
        assert alone.output_ids == together[alone.rid].output_ids
        assert alone.logprobs == together[alone.rid].logprobs


@pytest.mark.parametrize("num_slots", [3, 12])
def test_several_steps_in_one_call_equal_single_steps(num_slots, model_dir, make_over, make_live):
    def run(max_steps):
        batcher = make_over("compiled", model_dir, max_slots=num_slots, max_steps=max_steps)
        requests = requests_of(make_live, 12, stop_ids=frozenset(range(0, 61, 9)))
        for index, request in enumerate(requests):
            request.max_tokens = 1 + 3 * index
        return drain(batcher, requests), batcher.num_sampled

    single, num_single = run(1)
    several, num_several = run(8)
    assert num_several == num_single
    for rid, request in several.items():
        assert request.output_ids == single[rid].output_ids
        assert request.logprobs == single[rid].logprobs
        assert request.finish_reason is single[rid].finish_reason
    reasons = [request.finish_reason for request in several.values()]
    assert {FinishReason.STOP, FinishReason.LENGTH} <= set(reasons)


def test_a_row_ends_inside_a_call_and_the_others_go_on(model_dir, make_runner, make_live):
    runner = make_runner("compiled", model_dir)
    whole = [make_live(index, [index], max_tokens=9) for index in range(3)]
    take(whole, runner.prefill(0, admit(whole)))
    take(whole, runner.decode(whole, 8))
    requests = [make_live(index, [index], max_tokens=9) for index in range(3)]
    stop = whole[1].output_ids[4]
    requests[1].stop_ids = frozenset([stop])
    requests[2].max_tokens = 3
    take(requests, runner.prefill(0, admit(requests)))
    sampled = runner.decode(requests, 8)
    first_stop = whole[1].output_ids.index(stop)
    assert sampled.ids[0] == whole[0].output_ids[1:]
    assert sampled.ids[1] == whole[1].output_ids[1 : first_stop + 1]
    assert sampled.ids[2] == whole[2].output_ids[1:3]


def test_narrowed_and_greedy_rows_draw_as_with_torch(model_dir, make_over, make_live):
    def run(kind):
        requests = requests_of(make_live, 6)
        for request, (temperature, top_p, top_k) in zip(
            requests,
            [(1, 0.6, -1), (0.7, 1, 5), (0, 1, -1), (1, 1, -1), (0, 0.5, 3), (1.5, 0.9, 9)],
            strict=True,
        ):
            request.temperature, request.top_p, request.top_k = float(temperature), float(top_p), top_k
        return drain(make_over(kind, model_dir, max_steps=8), requests)

    expected = run("torch")
    for rid, request in run("compiled").items():
        assert request.output_ids == expected[rid].output_ids
        assert request.logprobs == pytest.approx(expected[rid].logprobs, abs=1e-5)


def test_a_step_that_others_wait_for_is_single(model_dir, make_over, make_live):
    batcher = make_over("compiled", model_dir, max_slots=20, prefill_budget_tokens=10, max_steps=8)
    first = make_live(0, [1, 2], max_tokens=50)
    batcher.submit(first)
    batcher.step()
    assert len(first.output_ids) == 1 + 8
    for index in range(1, 4):
        batcher.submit(make_live(index, [index] * 9, max_tokens=50))
    for num_tokens in (10, 11, 19):  # two of the three wait, one waits, none waits
        batcher.step()
        assert len(first.output_ids) == num_tokens


def test_what_the_kernels_cannot_run_or_would_not_speed_up_stays_on_torch(
    model_dir, weights_of, caplog, monkeypatch
):
    config = read_config(model_dir)
    reason = compiled.unfit_reason
    assert reason(config, CPU, torch.float32) is None
    assert "float32 on the CPU" in reason(config, torch.device("cuda"), torch.float32)
    assert "bfloat16" in reason(config, CPU, torch.bfloat16)
    assert "multiples" in reason(dataclasses.replace(config, head_dim=12), CPU, torch.float32)
    assert "parameters" in reason(dataclasses.replace(config, num_layers=10_000), CPU, torch.float32)
    monkeypatch.setattr(runners, "_MISSING", "no compiler: no module named numba")
    with caplog.at_level(logging.WARNING):
        runner = runners.choose_runner(config, weights_of(model_dir), device=CPU, dtype=torch.float32)
    assert isinstance(runner, TorchRunner)
    (record,) = caplog.records
    assert "no module named numba" in record.getMessage()


def test_machine_code_is_kept_for_the_user_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiled.cache_folder()
    assert folder.parent == tmp_path / "megloom"
    assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    assert compiled.cache_folder() is None
