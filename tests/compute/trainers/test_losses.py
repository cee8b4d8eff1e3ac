"""Token losses against hand-computed values, a slow float64 reference and published trainers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megloom.compute.trainers.losses import TokenLosses, imitation, policy_gradient

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_losses.json").read_text())
MASK = torch.tensor(GOLDEN["mask"]).bool()


def reference(new: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(new - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def surrogate(
    new: list[float], old: list[float], advantages: list[float], weights: list[float] | None = None
) -> TokenLosses:
    return policy_gradient(
        torch.tensor(new),
        behaviour_N=torch.tensor(old),
        advantages_N=torch.tensor(advantages),
        weights_N=torch.tensor(weights or [1.0] * len(new)),
        clip_low=0.2,
        clip_high=0.28,
    )


def golden_losses(logprobs_BT: torch.Tensor) -> TokenLosses:
    advantages_BT = torch.tensor(GOLDEN["advantage"])[:, None].expand_as(MASK)
    return policy_gradient(
        logprobs_BT[MASK],
        behaviour_N=torch.tensor(GOLDEN["behaviour"])[MASK],
        advantages_N=advantages_BT[MASK],
        weights_N=torch.ones(int(MASK.sum())),
        clip_low=0.2,
        clip_high=0.28,
    )


def test_the_four_corners_of_the_clip_by_hand() -> None:
    ratios, advantages = [1.2, 1.4, 0.5, 1.4], [1.0, 1.0, -1.0, -1.0]
    losses = surrogate([math.log(r / 2) for r in ratios], [math.log(0.5)] * 4, advantages)
    assert losses.losses_N.tolist() == pytest.approx([-1.2, -1.28, 0.8, 1.4], abs=1e-6)
    assert losses.is_clipped_N.tolist() == [False, True, True, False]


def test_losses_equal_a_plain_float64_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    new, old = -torch.rand(500, generator=generator) * 4, -torch.rand(500, generator=generator) * 4
    advantages = torch.randn(500, generator=generator)
    losses = surrogate(new.tolist(), old.tolist(), advantages.tolist()).losses_N
    expected = [
        reference(n, o, a, 0.2, 0.28)
        for n, o, a in zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_token_mean_equals_published_trainers() -> None:
    losses = golden_losses(torch.tensor(GOLDEN["logprobs"])).losses_N
    assert losses.sum().item() / len(losses) == pytest.approx(GOLDEN["token_mean"], abs=1e-6)


def test_sequence_mean_equals_published_trainers() -> None:
    losses = golden_losses(torch.tensor(GOLDEN["logprobs"])).losses_N
    weights_BT = (1.0 / MASK.sum(1, keepdim=True)).expand_as(MASK)
    mean = (losses * weights_BT[MASK]).sum().item() / len(MASK)
    assert mean == pytest.approx(GOLDEN["seq_mean_token_mean"], abs=1e-6)


def test_the_gradient_equals_published_trainers() -> None:
    logprobs_BT = torch.tensor(GOLDEN["logprobs"], requires_grad=True)
    losses = golden_losses(logprobs_BT).losses_N
    (losses.sum() / len(losses)).backward()
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad[0].tolist() == pytest.approx(GOLDEN["token_mean_gradient_row_0"], abs=1e-6)


def test_weights_multiply_token_losses() -> None:
    plain = surrogate([-1.0, -2.0], [-1.0, -2.0], [1.0, -2.0])
    weighted = surrogate([-1.0, -2.0], [-1.0, -2.0], [1.0, -2.0], [0.5, 3.0])
    assert weighted.losses_N.tolist() == pytest.approx([-0.5, 6.0])
    assert plain.losses_N.tolist() == pytest.approx([-1.0, 2.0])


@pytest.mark.parametrize("gap", [-300.0, 300.0])
def test_an_extreme_ratio_keeps_loss_and_gradient_finite(gap: float) -> None:
    new = torch.tensor([gap], requires_grad=True)
    losses = policy_gradient(
        new,
        behaviour_N=torch.zeros(1),
        advantages_N=-torch.ones(1),
        weights_N=torch.ones(1),
        clip_low=0.2,
        clip_high=0.28,
    ).losses_N
    losses.sum().backward()
    assert new.grad is not None
    assert torch.isfinite(losses).all() and torch.isfinite(new.grad).all()


def test_imitation_is_the_weighted_negative_logprob() -> None:
    losses = imitation(torch.tensor([-0.5, -2.0]), weights_N=torch.tensor([1.0, 0.25]))
    assert losses.losses_N.tolist() == [0.5, 0.5] and not losses.is_clipped_N.any()
