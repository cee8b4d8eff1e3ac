"""Builders with keyword overrides: rows, micro-batches, plans of tiny models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.trainers.protocol import MicroBatch, TrainerPlan, TrainingRow
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.snapshot import read_state
from megloom.compute.workload import Optimizer, RandomModel, Tokenizer

TOKENIZER = Tokenizer(
    words=(*"0123456789", "+", "=", " ", "\n", "plan", "answer", "é"),
    special=("<user>", "<assistant>", "<end>"),
    pattern=r"[a-z]+|\s|.",
    chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
    stop="<end>",
)
VOCAB_SIZE = len(TOKENIZER.words) + len(TOKENIZER.special)
CONFIG: dict[str, int | float | bool] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,  # far from uniform logits
}


def model(**overrides: Any) -> RandomModel:
    values = {"architecture": "qwen3", "config": CONFIG, "tokenizer": TOKENIZER, **overrides}
    return RandomModel.model_validate(values)


def plan(**overrides: Any) -> TrainerPlan:
    values: dict[str, Any] = {
        "policy": "solver",
        "model": model().model_dump(),
        "algorithm": Grpo().model_dump(),
        "optimizer": Optimizer(learning_rate=1e-3).model_dump(),
        "warm_optimizer": None,
        "seed": 7,
        **overrides,
    }
    return TrainerPlan(**values)


def replica(folder: Path, **overrides: Any) -> Replica:
    """A loaded replica of a fresh version 0."""
    made = Replica(plan(**overrides))
    made.load(weights_uri=made.create(str(folder)).uri, state_path=None)
    return made


def row(seed: int = 0, *, num_prompt: int = 4, num_sampled: int = 3, **overrides: Any) -> TrainingRow:
    """A random row: a prompt, then sampled tokens."""
    rng, length = np.random.default_rng(seed), num_prompt + num_sampled
    mask = np.zeros(length, np.uint8)
    mask[num_prompt:] = 1
    values: dict[str, Any] = {
        "sample_id": f"sample-{seed}",
        "token_ids": rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, rng.normal(-3, 0.3, length), 0).astype(np.float32),
        "advantage": float(rng.normal()),
        "weight": 1.0,
        "temperature": 1.0,
        **overrides,
    }
    return TrainingRow(**values)


def ragged_rows(count: int) -> list[TrainingRow]:
    rng = np.random.default_rng(99)
    return [
        row(i, num_prompt=int(rng.integers(1, 20)), num_sampled=int(rng.integers(1, 20)))
        for i in range(count)
    ]


def batch(rows: Sequence[TrainingRow], name: str = "batch-0", loss: str = "policy_gradient") -> MicroBatch:
    return MicroBatch(micro_batch_id=name, loss=loss, rows=tuple(rows))


def state_tensors(trainer: Replica, folder: Path) -> dict[str, Tensor]:
    """Everything that the trainer would save."""
    trainer.save(state_path=str(folder / "peek"))
    return read_state(folder / "peek")[1]


def gradient_sums(trainer: Replica, folder: Path) -> dict[str, Tensor]:
    tensors = state_tensors(trainer, folder)
    return {name: value for name, value in tensors.items() if name.startswith("sums/")}


def critic_columns(one: TrainingRow, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random advantages, returns and values, as a policy with a critic trains on."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=len(one.token_ids)).astype(np.float32)
        for name in ("advantages", "returns", "values")
    }


def with_critic_columns(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    return [replace(one, columns=critic_columns(one, seed)) for seed, one in enumerate(rows)]


def trained_critic(trainer: Replica, rows: Sequence[TrainingRow]) -> None:
    """One update of a policy with a critic, after which its value head is no longer zero."""
    trainer.forward_backward(batch(with_critic_columns(rows), name="critic"))
    trainer.optim_step(scale=0.01)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference, as a share of the norm."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return math.sqrt(difference / sum(float(value.double().square().sum()) for value in one.values()))


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
