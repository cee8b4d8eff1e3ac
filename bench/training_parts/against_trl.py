"""Tokens per second of rollout and training together, against TRL's `GRPOTrainer`, in one run.

Both train the same random Qwen3 on the same prompts (16 a step, 8 completions each, up to 256 tokens, the
same reward, AdamW, one update a step, on-policy). Megloom runs as it is used: a whole session with its
store, lineage and checks, one engine and two trainer replicas, processes of one thread each. TRL runs on all
cores of the machine and, apart, on one, with the whole batch in one forward pass and in four; the best of
these counts. Each runs in processes of its own; TRL at its best and Megloom run twice, in turns. A rate is
the tokens generated in the steps after the first three over their seconds.

`python bench/training_parts/against_trl.py [demo|1m|4m] [free|capped]` measures other models, and answers
that are nearly all cut off at 64 tokens, where nothing is gained by not waiting for the longest.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import util
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent
NUM_STEPS, NUM_WARM = 9, 3
TARGET_RATIO = 1.5
TIMEOUT_S = 300


def trl_figures(size: str = "demo", answers: str = "free") -> dict[str, dict[str, Any]]:
    """vs_trl, and the rates that it is made of; said to be not measured where TRL is not installed."""
    if util.find_spec("trl") is None:
        missing = "not measured: TRL is not installed, pip install '.[bench]'"
        return {"vs_trl": {"value": None, "unit": missing, "target": TARGET_RATIO, "ok": None}}
    os.environ["MEGLOOM_BENCH_ANSWERS"] = answers
    ours = [_run("megloom", size)]
    cores = os.cpu_count() or 1
    variants = list(dict.fromkeys([(1, 1), (cores, 1), (cores, 4)]))  # (threads, passes)
    peers = {variant: [_run("trl", size, *variant)] for variant in variants}
    best = max(peers, key=lambda variant: peers[variant][0])
    ours.append(_run("megloom", size))
    peers[best].append(_run("trl", size, *best))
    ratio = statistics.mean(ours) / statistics.mean(peers[best])
    rates = {f"{threads} threads, {cuts} passes": max(peers[threads, cuts]) for threads, cuts in variants}
    told = ", ".join(f"{name}: {rate:.0f}" for name, rate in rates.items())
    return {
        "vs_trl": {
            "value": round(ratio, 2),
            "unit": "of the tokens/s of TRL's best variant",
            "target": TARGET_RATIO,
            "ok": ratio >= TARGET_RATIO,
        },
        "vs_trl_tokens_per_s": {
            "value": round(statistics.mean(ours)),
            "unit": f"tokens/s; TRL with {told}",
            "target": None,
            "ok": None,
        },
    }


def _run(*arguments: Any) -> float:
    """The rate that a process of its own prints."""
    environment = {**os.environ, "MEGLOOM_BENCH_MODEL": arguments[1], "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(Path(__file__)), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{arguments}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def rate(ends_s: list[float], tokens: list[int]) -> float:
    """Tokens per second of the steps after the warm ones; both lists by step."""
    return sum(tokens[NUM_WARM:]) / (ends_s[-1] - ends_s[NUM_WARM - 1])


async def megloom_rate(folder: Path) -> float:
    from megloom.compute.cluster.local import LocalCluster
    from megloom.compute.conductor.config import SessionConfig
    from megloom.compute.conductor.sessions import SessionTable

    cluster = LocalCluster(folder / "logs")
    table = SessionTable(home=folder, cluster=cluster, epoch=1, wall_time=lambda: "2026-01-01T00:00:00Z")
    config = SessionConfig(
        workload="trl_system:workload",
        run="bench",
        steps=NUM_STEPS,
        import_paths=(str(PARTS),),
    )
    try:
        session = await table.start(config)
        while session.state not in ("finished", "failed", "cancelled"):
            await session.wait_for_change(after=len(session.reports) - 1, timeout_s=10)
        if session.failure:
            raise RuntimeError(session.failure)
        steps = [report for report in session.reports if report.kind == "train"]
        return rate([step.finished_s for step in steps], [step.num_completion_tokens for step in steps])
    finally:
        await table.close()
        await cluster.close()


def trl_rate(size: str, threads: int, cuts: int, folder: Path) -> float:
    import torch
    import trl_system as system
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megloom.compute.trainers.model import write_model

    torch.set_num_threads(threads)
    (folder / "model").mkdir()
    write_model(system.model(size), folder / "model", seed=0, cache_dir=None)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    tokenizer.eos_token, tokenizer.pad_token = system.MODEL.tokenizer.stop, "<pad>"
    counts: list[int] = []
    ends: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        counts.append(sum(map(len, completion_ids)))
        return [system.noise(text) for text in completions]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    batch = system.TASKS_PER_STEP * system.GROUP_SIZE
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=batch // cuts,
        gradient_accumulation_steps=cuts,
        num_generations=system.GROUP_SIZE,
        max_completion_length=system.MAX_NEW,
        learning_rate=system.LEARNING_RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        max_steps=NUM_STEPS,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict(
            {"prompt": [f"<user>{prompt}<assistant>" for prompt in system.prompts()]}
        ),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    assert len(ends) == NUM_STEPS and len(counts) == NUM_STEPS, (len(ends), len(counts))
    return rate(ends, counts)


def main() -> None:
    """The figures; or one side of them in this process: `megloom SIZE`, `trl SIZE THREADS CUTS`."""
    with tempfile.TemporaryDirectory() as folder:
        match sys.argv[1:]:
            case ["megloom", _]:
                print(json.dumps(asyncio.run(megloom_rate(Path(folder)))))
            case ["trl", size, threads, cuts]:
                print(json.dumps(trl_rate(size, int(threads), int(cuts), Path(folder))))
            case sizes:
                print(json.dumps(trl_figures(*sizes), indent=2))


if __name__ == "__main__":
    main()
