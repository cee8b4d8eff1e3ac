"""One agent whose reward nobody can learn: so the lengths of its answers stay as they are, and Megloom and
TRL generate and train about the same number of tokens a step. See against_trl.py.
"""

from __future__ import annotations

import os
import random
import zlib
from typing import Any

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.workload import (
    Agent,
    Optimizer,
    Policy,
    RandomModel,
    Sampling,
    Trainer,
    Training,
    Workload,
)
from megloom.pipelines.systems.arithmetic_model import MODEL

SIZES: dict[str, dict[str, int | float | bool]] = {  # overrides of the demo's model, by its name here
    "demo": {},
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "head_dim": 32, "intermediate_size": 384},
    "4m": {"hidden_size": 256, "num_hidden_layers": 5, "head_dim": 64, "intermediate_size": 768},
}
# (most tokens of an answer, prompts a step). The random model ends an answer after 110 tokens on average:
# 13 % of the "free" ones are cut off by the limit, and two thirds of the "capped" ones, mostly of one length.
ANSWERS = {"free": (256, 16), "capped": (64, 32)}
GROUP_SIZE, LEARNING_RATE = 8, 1e-4
NUM_PROMPTS, NUM_DIGITS = 512, 24
SIZE = os.environ.get("MEGLOOM_BENCH_MODEL", "demo")
MAX_NEW, TASKS_PER_STEP = ANSWERS[os.environ.get("MEGLOOM_BENCH_ANSWERS", "free")]


def model(size: str) -> RandomModel:
    config = {**MODEL.config, "max_position_embeddings": 512, **SIZES[size]}
    return RandomModel(architecture=MODEL.architecture, config=config, tokenizer=MODEL.tokenizer)


def prompts() -> list[str]:
    """Different lists of digits, all of one length."""
    rng = random.Random(0)
    return ["".join(rng.choices("0123456789", k=NUM_DIGITS)) for _ in range(NUM_PROMPTS)]


def noise(text: str) -> float:
    """0 or 1, by the text alone."""
    return float(zlib.crc32(text.encode()) & 1)


async def solve(task: Any, team: Any) -> Any:
    return await team.solver(task.prompt)


def reward(task: Any, episode: Any) -> float:
    return noise(episode.result.text)


def rows() -> list[dict[str, str]]:
    return [{"prompt": prompt, "answer": "", "data_source": "digits"} for prompt in prompts()]


workload = Workload(
    name="trl_comparison",
    policies={
        "solver": Policy(
            model=model(SIZE),
            algorithm=Grpo(),
            optimizer=Optimizer(learning_rate=LEARNING_RATE),
            trainer=Trainer(replicas=2),
        )
    },
    agents={
        "solver": Agent(policy="solver", prompt=lambda text: text, sampling=Sampling(max_tokens=MAX_NEW))
    },
    workflow=solve,
    reward=reward,
    tasks=rows,
    eval_tasks=lambda: rows()[:1],  # TRL evaluates nothing
    training=Training(
        tasks_per_step=TASKS_PER_STEP,
        group_size=GROUP_SIZE,
        micro_batch_groups=TASKS_PER_STEP // 8,
        eval_every=0,
    ),
)
