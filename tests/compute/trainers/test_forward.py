"""`forward` gives what the loaded weights say of each row, and nothing of it reaches a gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megloom.compute.algorithms.base import Kl
from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.trainers.columns import Columns
from megloom.compute.trainers.model import load_model
from megloom.compute.trainers.passes import collate
from megloom.compute.trainers.protocol import TrainerError, TrainingRow
from megloom.compute.trainers.replica import Replica

from .builders import batch, gradient_sums, ragged_rows, replica, row, state_tensors, trained_critic

ROWS = ragged_rows(12)
PPO = Ppo().model_dump()
KL = Grpo(kl=Kl(coefficient=0.1)).model_dump()


def logprobs_under(folder: Path, one: TrainingRow) -> np.ndarray[Any, Any]:
    """The row's own logprobs under a version, 0 where it is not trainable."""
    network = load_model(folder, torch.device("cpu"))
    ids = torch.tensor(one.token_ids[None].astype(np.int64))
    with torch.no_grad():
        logs = torch.log_softmax(network(input_ids=ids).logits[0] / one.temperature, -1)
    found = np.zeros(len(one.token_ids), np.float32)
    for t in np.flatnonzero(one.loss_mask):
        found[t] = logs[t - 1, ids[0, t]]
    return found


def stepped(trainer: Replica, folder: Path, version: int) -> None:
    """One update, so that the trainer's weights are no longer the reference's."""
    trainer.forward_backward(batch(ROWS[:4], name="step", loss="imitation"))
    trainer.optim_step(scale=0.1)
    trainer.publish(weights_dir=str(folder), version=version)


def test_proximal_and_reference_logprobs_are_those_of_their_own_weights(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w", algorithm=KL, trainer={"budget_tokens": 60})
    first = str(tmp_path / "w" / "v000000")
    trainer.load(weights_uri=first, state_path=None, reference_uri=first)
    stepped(trainer, tmp_path / "w", 1)
    report = trainer.forward(batch(ROWS), ["reference_logprobs", "proximal_logprobs"])
    assert report.columns.keys() == {"reference_logprobs", "proximal_logprobs"}
    for version, name in enumerate(("reference_logprobs", "proximal_logprobs")):
        for one, values in zip(ROWS, report.columns[name], strict=True):
            expected = logprobs_under(tmp_path / "w" / f"v{version:06d}", one)
            assert values.dtype == np.float32
            assert values.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_values_are_zero_at_first_and_then_the_heads(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w", algorithm=PPO)
    assert not any(values.any() for values in trainer.forward(batch(ROWS), ["values"]).columns["values"])
    trained_critic(trainer, ROWS)
    columns = trainer.forward(batch(ROWS), ["values"]).columns["values"]
    for one, values in zip(ROWS, columns, strict=True):
        assert values[one.loss_mask == 1].all() and not values[one.loss_mask == 0].any()


def test_the_order_of_rows_and_the_cut_change_no_column(tmp_path: Path) -> None:
    one, other = replica(tmp_path / "w"), replica(tmp_path / "w", trainer={"budget_tokens": 30})
    first = one.forward(batch(ROWS), ["proximal_logprobs"]).columns["proximal_logprobs"]
    second = other.forward(batch(ROWS[::-1]), ["proximal_logprobs"]).columns["proximal_logprobs"]
    for values, same in zip(first, second[::-1], strict=True):
        assert values.tolist() == pytest.approx(same.tolist(), abs=1e-5)


def test_a_forward_between_gradients_changes_nothing(tmp_path: Path) -> None:
    plain, asked = (replica(tmp_path / "w", algorithm=PPO) for _ in range(2))
    for trainer in (plain, asked):
        trained_critic(trainer, ROWS[:3])
        trainer.forward_backward(batch(ROWS[:4], name="a", loss="imitation"))
    before = state_tensors(asked, tmp_path)
    asked.forward(batch(ROWS), ["values", "proximal_logprobs"])
    after = state_tensors(asked, tmp_path)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for trainer in (plain, asked):
        trainer.forward_backward(batch(ROWS[4:], name="b", loss="imitation"))
    one, other = gradient_sums(plain, tmp_path), gradient_sums(asked, tmp_path)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_rows_without_a_trainable_token_get_zeros_and_no_rows_are_fine(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    silent = row(3, loss_mask=np.zeros(7, np.uint8))
    columns = trainer.forward(batch([silent, ROWS[0]]), ["proximal_logprobs"]).columns["proximal_logprobs"]
    assert columns[0].tolist() == [0.0] * 7 and columns[1].any()
    assert trainer.forward(batch([]), ["proximal_logprobs"]).columns == {"proximal_logprobs": []}


def test_what_cannot_be_given_is_refused_by_name(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    with pytest.raises(TrainerError, match="forward batch-0: column 'values', but .* no critic"):
        trainer.forward(batch(ROWS), ["values"])
    with pytest.raises(TrainerError, match="'reference_logprobs', but no reference version"):
        trainer.forward(batch(ROWS), ["reference_logprobs"])
    with pytest.raises(TrainerError, match="column 'advantages', expected one of values"):
        trainer.forward(batch(ROWS), ["advantages"])
    with pytest.raises(TrainerError, match="samples sample-1 are there twice"):
        trainer.forward(batch([row(1), row(1)]), ["proximal_logprobs"])


def test_the_reference_is_loaded_when_asked_for_and_must_be_of_the_policy(tmp_path: Path) -> None:
    first = str(tmp_path / "w" / "v000000")
    trainer = replica(tmp_path / "w", algorithm=KL)
    trainer.load(weights_uri=first, state_path=None, reference_uri=str(tmp_path / "nowhere"))
    with pytest.raises(TrainerError, match="no complete weight version at .*nowhere"):
        trainer.forward(batch(ROWS), ["reference_logprobs"])
    other = replica(tmp_path / "v", policy="verifier", algorithm=KL)
    other.load(weights_uri=str(tmp_path / "v" / "v000000"), state_path=None, reference_uri=first)
    with pytest.raises(TrainerError, match="is of policy solver"):
        other.forward(batch(ROWS), ["reference_logprobs"])


def test_a_loss_that_needs_a_column_refuses_rows_without_it(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w", algorithm=KL)
    with pytest.raises(TrainerError, match="sample sample-1: column 'reference_logprobs' is missing"):
        trainer.forward_backward(batch([row(1)]))
    zeros = np.zeros(7, np.float32)
    mixed = [row(1), row(2, columns={"proximal_logprobs": zeros})]
    with pytest.raises(
        TrainerError, match="sample sample-2: columns .'proximal_logprobs'., but sample sample-1"
    ):
        replica(tmp_path / "w").forward_backward(batch(mixed))


def test_a_kl_term_pulls_nothing_while_policy_and_reference_are_one(tmp_path: Path) -> None:
    first = str(tmp_path / "w" / "v000000")
    plain, held = replica(tmp_path / "w"), replica(tmp_path / "w", algorithm=KL)
    held.load(weights_uri=first, state_path=None, reference_uri=first)
    columns = held.forward(batch(ROWS), ["reference_logprobs"]).columns["reference_logprobs"]
    rows = [replace(one, columns={"reference_logprobs": c}) for one, c in zip(ROWS, columns, strict=True)]
    report = held.forward_backward(batch(rows))
    plain.forward_backward(batch(ROWS))
    total, count = report.sums["kl"]
    assert abs(total) < 1e-8 and count == report.num_trainable
    one, other = gradient_sums(plain, tmp_path), gradient_sums(held, tmp_path)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-5


def test_a_column_that_is_not_finite_names_its_sample_and_token() -> None:
    columns = Columns([row(1), row(2)], ["values"])
    part = collate([row(1), row(2)], torch.device("cpu"))
    columns.fill(part, {"values": torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan, 6.0])})
    with pytest.raises(TrainerError, match="sample sample-2: values of token 5 is nan"):
        columns.by_name()
