"""The schedule in numbers, and moments that survive a move."""

from __future__ import annotations

import pytest
import torch

from megloom.compute.trainers.optimizer import AdamW, learning_rate
from megloom.compute.workload import Optimizer


def test_the_rate_rises_linearly_and_falls_as_a_cosine_to_zero() -> None:
    knobs = Optimizer(learning_rate=0.1, warmup_steps=4, total_steps=12)
    rates = [learning_rate(knobs, step) for step in (0, 1, 3, 4, 8, 12, 99)]
    assert rates == pytest.approx([0.025, 0.05, 0.1, 0.1, 0.05, 0.0, 0.0])


def test_without_a_schedule_the_rate_is_constant() -> None:
    assert {learning_rate(Optimizer(learning_rate=0.3), step) for step in range(9)} == {0.3}


def test_a_warmup_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps 5 must be below"):
        Optimizer.parse({"learning_rate": 0.1, "warmup_steps": 5, "total_steps": 5})


def test_one_step_moves_each_weight_by_the_rate_against_the_gradients_sign() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = AdamW({"w": weight}, Optimizer(learning_rate=0.01))
    optimizer.step({"w": torch.tensor([[3.0, -3.0], [0.1, -0.1]])})
    assert weight.flatten().tolist() == pytest.approx([0.99, 1.01, 0.99, 1.01], abs=1e-5)


def test_vectors_have_no_weight_decay() -> None:
    parameters = {"matrix": torch.nn.Parameter(torch.ones(2, 2)), "vector": torch.nn.Parameter(torch.ones(2))}
    optimizer = AdamW(parameters, Optimizer(learning_rate=0.1, weight_decay=0.5))
    optimizer.step({name: torch.zeros_like(value) for name, value in parameters.items()})
    assert parameters["matrix"][0, 0].item() == pytest.approx(0.95)
    assert parameters["vector"][0].item() == 1.0


def test_restored_moments_continue_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, 3, generator=generator) for _ in range(6)]
    knobs = Optimizer(learning_rate=0.05, warmup_steps=2, total_steps=9)
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = AdamW({"w": weight}, knobs)
    for gradient in gradients[:3]:
        optimizer.step({"w": gradient.clone()})
    moved = torch.nn.Parameter(weight.detach().clone())
    other = AdamW({"w": moved}, knobs)
    other.restore({name: value.clone() for name, value in optimizer.tensors().items()}, optimizer.num_steps)
    for gradient in gradients[3:]:
        optimizer.step({"w": gradient.clone()})
        other.step({"w": gradient.clone()})
    assert torch.equal(weight, moved)
