"""The verbs together teach a toy: say the digit again. First by imitation, then by reward alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.trainers.model import load_model
from megloom.compute.trainers.protocol import TrainingRow
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.tokenizer import build_tokenizer
from megloom.compute.workload import Optimizer

from .builders import TOKENIZER, batch, plan

DIGITS = [build_tokenizer(TOKENIZER).token_to_id(digit) for digit in "01234567"]
USER, ASSISTANT = 0, 1
GROUP_SIZE = 16


def answer_logprobs(uri: str) -> torch.Tensor:
    """The table [digit, vocabulary] of the model's first answer token."""
    network = load_model(Path(uri), torch.device("cpu"))
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([[USER, digit, ASSISTANT] for digit in DIGITS])).logits
    return torch.log_softmax(logits[:, -1], -1)


def accuracy(uri: str) -> float:
    """The chance of a right answer, averaged over the digits."""
    return float(answer_logprobs(uri).exp()[range(len(DIGITS)), DIGITS].mean())


def row(name: str, digit: int, answer: int, logprob: float, advantage: float) -> TrainingRow:
    return TrainingRow(
        sample_id=name,
        token_ids=np.array([USER, digit, ASSISTANT, answer], np.int32),
        loss_mask=np.array([0, 0, 0, 1], np.uint8),
        logprobs=np.array([0, 0, 0, logprob], np.float32),
        advantage=advantage,
        weight=1.0,
        temperature=1.0,
    )


def sampled_group(table: torch.Tensor, index: int, generator: torch.Generator) -> list[TrainingRow]:
    answers = torch.multinomial(table[index].exp(), GROUP_SIZE, True, generator=generator).tolist()
    advantages = Grpo().advantages([float(answer == DIGITS[index]) for answer in answers])
    return [
        row(f"{index}-{member}", DIGITS[index], answer, float(table[index, answer]), advantage)
        for member, (answer, advantage) in enumerate(zip(answers, advantages, strict=True))
    ]


def test_imitation_then_reward_teach_the_toy(tmp_path: Path) -> None:
    folder, knobs = str(tmp_path / "w"), Optimizer(learning_rate=1e-2).model_dump()
    trainer = Replica(plan(optimizer=knobs, warm_optimizer=knobs))
    uri = trainer.create(folder).uri
    trainer.load(weights_uri=uri, state_path=None)
    at_start = accuracy(uri)

    demonstrations = [row(f"d{digit}", digit, digit, 0.0, 1.0) for digit in DIGITS]
    for step in range(3):
        trainer.forward_backward(batch(demonstrations, name=f"warm-{step}", loss="imitation"))
        trainer.optim_step(scale=1.0 / len(DIGITS), warm=True)
    uri = trainer.publish(weights_dir=folder, version=1).uri
    after_imitation = accuracy(uri)

    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        table = answer_logprobs(uri)
        rows = [one for index in range(len(DIGITS)) for one in sampled_group(table, index, generator)]
        report = trainer.forward_backward(batch(rows, name=f"step-{step}"))
        assert report.max_logprob_gap is not None and report.max_logprob_gap < 1e-4
        trainer.optim_step(scale=1.0 / report.num_trainable)
        uri = trainer.publish(weights_dir=folder, version=step + 2).uri
    print(f"accuracy {at_start:.2f} → {after_imitation:.2f} → {accuracy(uri):.2f}")
    assert at_start < 0.2
    assert at_start + 0.1 < after_imitation < 0.75
    assert accuracy(uri) > after_imitation + 0.15
