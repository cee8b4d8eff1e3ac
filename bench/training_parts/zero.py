"""What a DeepSpeed ZeRO-1 step costs beside a plain torch step, on the same rows and models.

Two replicas in one process take turns: five micro-batches of ragged rows, about 1,200 tokens, then an
optimizer step. DeepSpeed's part does not depend on the tokens, so a smaller step has a larger ratio (1.32 at
26 million parameters with 480). CPU seconds of one thread, which other load on the machine hardly changes;
the median over the rounds of a pair's ratio. `zero1_ratio` is the larger of those at 4 and at 26 million.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.trainers.protocol import MicroBatch, TrainerPlan, TrainingRow
from megloom.compute.trainers.replica import Replica
from megloom.compute.workload import Optimizer, RandomModel, Tokenizer

SIZES = {  # hidden, intermediate, layers
    "4m": (256, 768, 5),
    "26m": (512, 1536, 8),
}
VOCAB_SIZE = 512
NUM_MICRO_BATCHES, NUM_ROWS = 5, 3  # about 1,200 tokens a step
NUM_ROUNDS = 4
TARGET_RATIO = 1.25


def zero_figures(num_rounds: int = NUM_ROUNDS) -> dict[str, dict[str, Any]]:
    """zero1_ratio, and the ratio at each size."""
    torch.set_num_threads(1)
    ratios = {name: ratio_of(*size, num_rounds) for name, size in SIZES.items()}
    found = {f"zero1_ratio_{name}": figure(ratio) for name, ratio in ratios.items()}
    return {"zero1_ratio": figure(max(ratios.values()), TARGET_RATIO), **found}


def ratio_of(hidden: int, intermediate: int, num_layers: int, num_rounds: int) -> float:
    """CPU seconds of a ZeRO-1 step over those of a torch step."""
    with tempfile.TemporaryDirectory() as folder:
        plain = loaded(Path(folder) / "plain", {}, hidden, intermediate, num_layers)
        zero = loaded(
            Path(folder) / "zero", {"backend": "deepspeed", "zero_stage": 1}, hidden, intermediate, num_layers
        )
        pairs = [(step_s(zero, number), step_s(plain, number)) for number in range(num_rounds + 1)]
    return statistics.median(one / other for one, other in pairs[1:])  # moments are made in the first


def loaded(folder: Path, knobs: dict[str, Any], hidden: int, intermediate: int, num_layers: int) -> Replica:
    words = tuple(f"w{number}" for number in range(VOCAB_SIZE - 1))
    source = RandomModel(
        architecture="qwen3",
        config={
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": hidden // 8,
            "tie_word_embeddings": True,
        },
        tokenizer=Tokenizer(
            words=words, special=("<end>",), pattern=r"\S+|\s", chat_template="", stop="<end>"
        ),
    )
    plan = TrainerPlan(
        policy="bench",
        model=source.model_dump(),
        algorithm=Grpo().model_dump(),
        optimizer=Optimizer(learning_rate=1e-4).model_dump(),
        warm_optimizer=None,
        seed=1,
        trainer=knobs,
    )
    replica = Replica(plan)
    replica.load(weights_uri=replica.create(str(folder)).uri, state_path=None)
    return replica


def step_s(replica: Replica, number: int) -> float:
    """CPU seconds of the micro-batches and the update of step `number`."""
    batches = [micro_batch(number, part) for part in range(NUM_MICRO_BATCHES)]
    started = time.process_time()
    num_trainable = sum(replica.forward_backward(batch).num_trainable for batch in batches)
    replica.optim_step(scale=1.0 / num_trainable)
    return time.process_time() - started


def micro_batch(number: int, part: int) -> MicroBatch:
    rng = np.random.default_rng([number, part])
    return MicroBatch(
        micro_batch_id=f"{number}-{part}",
        loss="policy_gradient",
        rows=tuple(row(rng, f"{number}-{part}-{index}") for index in range(NUM_ROWS)),
    )


def row(rng: np.random.Generator, name: str) -> TrainingRow:
    num_prompt, num_sampled = (int(count) for count in rng.integers(20, 60, 2))
    length = num_prompt + num_sampled
    mask = np.zeros(length, np.uint8)
    mask[num_prompt:] = 1
    return TrainingRow(
        sample_id=name,
        token_ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.log(VOCAB_SIZE), 0.0).astype(np.float32),
        advantage=float(rng.normal()),
        weight=1.0,
        temperature=1.0,
    )


def figure(ratio: float, target: float | None = None) -> dict[str, Any]:
    return {
        "value": round(ratio, 3),
        "unit": "of a torch step's CPU time",
        "target": target,
        "ok": None if target is None else ratio <= target,
    }
