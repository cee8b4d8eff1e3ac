"""The value head: its loss against the slow reference, its start at zero, its file beside the weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.trainers.critic import (
    CRITIC_FILE,
    load_critic,
    make_value_head,
    save_critic,
    value_losses,
)
from megloom.compute.trainers.protocol import TrainerError

from . import slow_losses
from .slow_losses import Ragged
from .test_losses import flat, ragged

CPU = torch.device("cpu")


def head(size: int = 8) -> torch.nn.Linear:
    return make_value_head(SimpleNamespace(config=SimpleNamespace(hidden_size=size)), CPU)


def named(value_head: torch.nn.Linear) -> dict[str, torch.Tensor]:
    return {f"value_head.{name}": value for name, value in value_head.state_dict().items()}


@settings(max_examples=40, deadline=None)
@given(tables=ragged(3), clip=st.sampled_from([None, 0.2, 1.0]))
def test_value_losses_equal_the_slow_reference(tables: list[Ragged], clip: float | None) -> None:
    values, returns, old = tables
    got = value_losses(flat(values), returns_N=flat(returns), old_values_N=flat(old), clip=clip)
    expected = flat(slow_losses.value_loss(values, returns, old, clip), torch.float64)
    assert ((got.double() - expected).abs() <= 1e-6 * expected.abs().clamp(min=1)).all()


def test_a_value_that_moved_beyond_its_clip_has_no_gradient_towards_the_return() -> None:
    values = torch.tensor([0.5, 0.1, -0.5], requires_grad=True)
    losses = value_losses(values, returns_N=torch.ones(3), old_values_N=torch.zeros(3), clip=0.2)
    assert losses.tolist() == pytest.approx([0.32, 0.405, 1.125])
    (slopes,) = torch.autograd.grad(losses.sum(), values)
    assert slopes.tolist() == pytest.approx([0.0, -0.9, -1.5])


def test_a_new_head_says_zero_and_leaves_the_layers_below_alone_at_first() -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    values = head()(hidden).squeeze(-1)
    assert values.tolist() == [0.0, 0.0, 0.0]
    values.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()


def test_a_saved_head_reads_back_to_the_bit_and_a_missing_one_stays_new(tmp_path: Path) -> None:
    saved, loaded = head(), head()
    torch.nn.init.normal_(saved.weight)
    load_critic(loaded, tmp_path)
    assert not loaded.weight.any()
    save_critic(named(saved), tmp_path)
    load_critic(loaded, tmp_path)
    assert torch.equal(saved.weight, loaded.weight) and torch.equal(saved.bias, loaded.bias)


def test_a_head_of_another_model_and_a_torn_file_are_refused(tmp_path: Path) -> None:
    save_critic(named(head(16)), tmp_path)
    with pytest.raises(TrainerError, match=f"{CRITIC_FILE} is no critic of this model"):
        load_critic(head(8), tmp_path)
    (tmp_path / CRITIC_FILE).write_bytes(b"torn")
    with pytest.raises(TrainerError, match=f"{CRITIC_FILE} is no critic of this model"):
        load_critic(head(16), tmp_path)
