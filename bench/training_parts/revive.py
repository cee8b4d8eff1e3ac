"""From a destroyed trainer to its first micro-batch, through the fork server, on a tiny model.

    python bench/training_parts/revive.py

A group on one cell has trained, was suspended in mid-batch with its cached gradients, and gets a
micro-batch: bind, fork, load of weights and state, forward and backward, as the lane sees it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.cluster.local import LocalCluster
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.local_backend import LocalBackend
from megloom.compute.scheduling.trainer_cells import Rules, TrainerCell
from megloom.compute.trainers.cells import TrainerCells
from megloom.compute.trainers.group import TrainingGroup
from megloom.compute.trainers.lifecycle import GroupLife
from megloom.compute.trainers.protocol import MicroBatch, TrainerPlan, TrainingRow
from megloom.compute.workload import Optimizer, RandomModel, Tokenizer, Trainer

REPEATS = 5
TARGET_S = 1.0
MODEL = RandomModel(
    architecture="qwen3",
    config={
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    tokenizer=Tokenizer(
        words=tuple("abcdefghijklmnopqrstuvwxyz "),
        special=("<end>", "<unk>"),
        pattern=".",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        stop="<end>",
        unknown="<unk>",
    ),
)


def revive_figures(repeats: int = REPEATS) -> dict[str, dict[str, Any]]:
    """`revive_s` (plain torch) and `revive_deepspeed_s` (if installed): medians in seconds."""
    seconds = asyncio.run(_measure(repeats))
    return {
        name: {"value": round(value, 3), "unit": "s", "target": TARGET_S, "ok": value <= TARGET_S}
        for name, value in seconds.items()
    }


async def _measure(repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="revive-") as name:
        cluster = LocalCluster(Path(name) / "logs")
        try:
            await cluster.boot()
            figures = {"revive_s": await _revivals(Path(name) / "torch", cluster, Trainer(), repeats)}
            if importlib.util.find_spec("deepspeed") is not None:
                deepspeed = Trainer(backend="deepspeed")
                figures["revive_deepspeed_s"] = await _revivals(
                    Path(name) / "deepspeed", cluster, deepspeed, repeats
                )
            return figures
        finally:
            await cluster.close()


async def _revivals(home: Path, cluster: LocalCluster, knobs: Trainer, repeats: int) -> float:
    config = SessionConfig.parse({"workload": "bench:revive", "run": home.name, "steps": 1})
    backend = LocalBackend(config=config, home=home, cluster=cluster)
    clock = asyncio.get_running_loop().time
    cells = TrainerCells([TrainerCell(name="trainers/0")], clock=clock, rules=Rules(idle_s=0.01))
    seconds = []
    try:
        async with asyncio.TaskGroup() as tasks:
            group = TrainingGroup(
                _plan(knobs),
                cells=cells,
                starter=backend,
                shelf=backend.shelf,
                tasks=tasks,
                clock=clock,
                tell=lambda kind, **fields: None,
            )
            created = await group.create(str(home / "weights"))
            await group.load(weights_uri=created.uri, state_path=None)
            for number in range(repeats + 1):
                started = time.perf_counter()
                await group.forward_backward(_batch(number))
                seconds.append(time.perf_counter() - started)
                while group.life is not GroupLife.DESTROYED:  # noqa: ASYNC110 - suspended when it is idle
                    await asyncio.sleep(0.005)
            await group.close()
    finally:
        cells.close()
        await backend.close()
    return statistics.median(seconds[1:])  # the first one had no state to load


def _plan(knobs: Trainer) -> TrainerPlan:
    return TrainerPlan(
        policy="tiny",
        model=MODEL.model_dump(),
        algorithm=Grpo().model_dump(),
        optimizer=Optimizer(learning_rate=1e-4).model_dump(),
        warm_optimizer=None,
        seed=1,
        trainer=knobs.model_dump(),
    )


def _batch(number: int) -> MicroBatch:
    rng = np.random.default_rng(number)
    rows = tuple(_row(rng, f"s{number}-{position}") for position in range(8))
    return MicroBatch(micro_batch_id=f"b{number}", loss="policy_gradient", rows=rows)


def _row(rng: Any, name: str, num_tokens: int = 64) -> TrainingRow:
    mask = np.zeros(num_tokens, np.uint8)
    mask[num_tokens // 2 :] = 1
    return TrainingRow(
        sample_id=name,
        token_ids=rng.integers(0, 29, num_tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -3.3, 0.0).astype(np.float32),
        advantage=1.0,
        weight=1.0,
        temperature=1.0,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(revive_figures()) + "\n")
