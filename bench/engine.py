"""Speed of the local engine through HTTP against transformers on the same CPU, in one run.

With 32 requests waiting (48 prompt tokens, 32 to 64 new ones each, the demo's default model): wanted tokens
per second of the engine over those of `generate` on the batch, which runs until the longest request is done,
and of transformers' continuous batching. All sample at temperature 1 and return the tokens' logprobs. The
main figures take 32 different prompts; `group_…` takes 4 prompts 8 times each, as GRPO does, where the engine
computes each prompt once. Everybody has one torch thread; `…_all_cores` gives `generate` what torch takes by
default. The variants take turns, and each ratio is a median over the rounds, so that other load on the
machine hits all alike. Prints one JSON object `{figure: {value, unit, target, ok}}`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megloom.compute.engines.client import HttpEngine
from megloom.compute.engines.protocol import GenerateRequest
from megloom.compute.engines.server import EngineArgs, serve
from megloom.pipelines.systems.arithmetic_model import MODEL

NUM_REQUESTS, NUM_PROMPT, GROUP_SIZE = 32, 48, 8
MIN_NEW, MAX_NEW = 32, 64
VOCAB_SIZE = len(MODEL.tokenizer.special) + len(MODEL.tokenizer.words)
TARGET_RATIO = 5.0
NUM_SHORT_CALLS, NUM_SHORT_NEW = 128, 12  # one step of the demo makes some hundreds of short calls
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SERIES = ("tokens", "engine", "generate", "continuous_batching", "engine_groups", "generate_groups")
SERIES += ("generate_all_cores", "client_ms", "server_ms")

Prompts = list[list[int]]


def save_model(folder: str) -> Any:
    """Saves the demo's default model with random weights and returns it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{**MODEL.config, "max_position_embeddings": 1024},
        vocab_size=VOCAB_SIZE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def time_generate(model: Any, prompts: Prompts) -> float:
    """Returns the seconds that `generate` takes for the batch, with the logprobs of the sampled tokens."""
    inputs = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.no_grad():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=MAX_NEW,
            min_new_tokens=MAX_NEW,
            do_sample=True,
            top_k=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        sampled = output.sequences[:, NUM_PROMPT:]
        logprobs = torch.log_softmax(torch.stack(output.logits, dim=1), dim=-1)
        logprobs.gather(-1, sampled.unsqueeze(-1)).tolist()
    elapsed = time.perf_counter() - start
    assert sampled.shape == (NUM_REQUESTS, MAX_NEW), sampled.shape
    return elapsed


def time_continuous_batching(model: Any, prompts: Prompts, num_new: list[int]) -> float:
    """Returns the seconds that transformers' continuous batching takes, without starting and stopping it."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(
        max_new_tokens=MAX_NEW, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=256, max_batch_tokens=2048, return_logprobs=True
    )
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    manager.start()
    try:
        manager.add_request(prompts[0][:4], max_new_tokens=2)
        _collect(manager, 1)
        start = time.perf_counter()
        for prompt, count in zip(prompts, num_new, strict=True):
            manager.add_request(prompt, max_new_tokens=count)
        outputs = _collect(manager, len(prompts))
        elapsed = time.perf_counter() - start
    finally:
        manager.stop(block=True)
    assert sum(len(output.generated_tokens) for output in outputs) == sum(num_new)
    return elapsed


def _collect(manager: Any, count: int) -> list[Any]:
    outputs: list[Any] = []
    while len(outputs) < count:
        output = manager.get_result(timeout=30)
        assert output is not None and output.error is None, output
        if output.is_finished():
            outputs.append(output)
    return outputs


def build_requests(prompts: Prompts, num_new: list[int], series_index: int) -> list[GenerateRequest]:
    """Returns one training request per prompt, with ids and seeds of their own."""
    return [
        GenerateRequest(
            rid=f"{series_index:016x}{index:016x}",
            token_ids=tuple(prompt),
            max_tokens=count,
            temperature=1.0,
            seed=series_index * 1000 + index,
            stop_token_ids=(),
            training=True,
        )
        for index, (prompt, count) in enumerate(zip(prompts, num_new, strict=True))
    ]


async def time_engine(engine: HttpEngine, requests: list[GenerateRequest]) -> float:
    """Returns the seconds until all requests, sent at once, are answered."""
    start = time.perf_counter()
    completions = await asyncio.gather(*map(engine.generate, requests))
    elapsed = time.perf_counter() - start
    assert all(
        len(completion.token_ids) == request.max_tokens
        for completion, request in zip(completions, requests, strict=True)
    )
    return elapsed


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def measure(url: str, pid: int, model: Any, num_rounds: int) -> dict[str, list[float]]:
    """Returns the samples of every series, one per round; the first round warms up and is dropped."""
    rng = random.Random(0)
    series_indices = itertools.count()

    def prompts(count: int, length: int) -> Prompts:
        return [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for _ in range(count)]

    async def run(batch: Prompts, num_new: list[int]) -> float:
        return await time_engine(engine, build_requests(batch, num_new, next(series_indices)))

    engine = HttpEngine(url, "bench", keep_alive_s=300.0)
    series: dict[str, list[float]] = {name: [] for name in SERIES}
    for _ in range(num_rounds + 1):
        batch = prompts(NUM_REQUESTS, NUM_PROMPT)
        groups = [prompt for prompt in batch[: NUM_REQUESTS // GROUP_SIZE] for _ in range(GROUP_SIZE)]
        num_new = [rng.randint(MIN_NEW, MAX_NEW) for _ in batch]
        series["tokens"].append(sum(num_new))
        series["engine"].append(await run(batch, num_new))
        series["generate"].append(time_generate(model, batch))
        torch.set_num_threads(os.cpu_count() or 1)
        series["generate_all_cores"].append(time_generate(model, batch))
        torch.set_num_threads(1)
        series["continuous_batching"].append(time_continuous_batching(model, batch, num_new))
        series["engine_groups"].append(await run(groups, num_new))
        series["generate_groups"].append(time_generate(model, groups))
        calls = prompts(NUM_SHORT_CALLS, 8)
        client_before, server_before = time.process_time(), cpu_s(pid)
        await run(calls, [NUM_SHORT_NEW] * len(calls))
        series["client_ms"].append((time.process_time() - client_before) * 1e3 / len(calls))
        series["server_ms"].append((cpu_s(pid) - server_before) * 1e3 / len(calls))
    await engine.close()
    return {name: values[1:] for name, values in series.items()}


def figure(value: float, unit: str, target: float | None = None, *, at_least: bool = True) -> dict[str, Any]:
    """Returns one figure; without a target it is only reported."""
    ok = None if target is None else bool(value >= target if at_least else value <= target)
    return {"value": round(value, 3), "unit": unit, "target": target, "ok": ok}


def figures(series: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Returns the figures of the measured series."""

    def ratio(slow: str, fast: str) -> float:
        return statistics.median(a / b for a, b in zip(series[slow], series[fast], strict=True))

    def rate(name: str) -> float:
        return statistics.median(n / t for n, t in zip(series["tokens"], series[name], strict=True))

    return {
        "vs_generate": figure(ratio("generate", "engine"), "ratio", TARGET_RATIO),
        "vs_continuous_batching": figure(ratio("continuous_batching", "engine"), "ratio", TARGET_RATIO),
        "vs_generate_all_cores": figure(ratio("generate_all_cores", "engine"), "ratio"),
        "group_vs_generate": figure(ratio("generate_groups", "engine_groups"), "ratio"),
        "engine_tok_s": figure(rate("engine"), "tok/s"),
        "group_engine_tok_s": figure(rate("engine_groups"), "tok/s"),
        "generate_tok_s": figure(rate("generate"), "tok/s"),
        "continuous_batching_tok_s": figure(rate("continuous_batching"), "tok/s"),
        "client_cpu_per_call": figure(statistics.median(series["client_ms"]), "ms", 0.7, at_least=False),
        "server_cpu_per_call_with_model": figure(statistics.median(series["server_ms"]), "ms"),
    }


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    num_rounds = parser.parse_args().rounds
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(f"{folder}/model")
        address_file = Path(folder) / "address.json"
        args = EngineArgs(
            model_dir=f"{folder}/model",
            policy="bench",
            version=0,
            token="bench",
            address_file=str(address_file),
            incarnation="bench",
        )
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(args,))
        process.start()
        try:
            while not address_file.exists():
                assert process.is_alive(), "the engine ended before it listened"
                time.sleep(0.02)
            address = json.loads(address_file.read_text())
            url = f"http://{address['host']}:{address['port']}"
            series = asyncio.run(measure(url, address["pid"], model, num_rounds))
        finally:
            process.terminate()
            process.join()
    print(json.dumps(figures(series), indent=2))


if __name__ == "__main__":
    main()
