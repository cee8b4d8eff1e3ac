"""DeepSpeed behind the same verbs: the same updates as plain torch, and states that move between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megloom.compute.trainers.deepspeed_import import GATHER_WARNING
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.snapshot import read_state
from megloom.compute.workload import Optimizer

from .builders import batch, plan, ragged_rows, row

pytestmark = pytest.mark.filterwarnings(f"ignore:{GATHER_WARNING}:FutureWarning")
ROWS = ragged_rows(12)
OPTIMIZER = Optimizer(learning_rate=1e-3, weight_decay=0.1, warmup_steps=2, total_steps=9, grad_clip=0.5)
TORCH = {"backend": "torch", "budget_tokens": 64}
NUM_STEPS, NUM_PARTS = 3, 3  # a warm step, then two others; micro-batches of each
TOLERANCE = 1e-5  # on weights that move by 2e-3; the moments' first steps amplify rounding


def zero(stage: int, **overrides: Any) -> dict[str, Any]:
    return {"backend": "deepspeed", "zero_stage": stage, "budget_tokens": 64, **overrides}


def loaded(folder: Path, knobs: dict[str, Any], **overrides: Any) -> Replica:
    trainer = Replica(plan(trainer=knobs, optimizer=OPTIMIZER.model_dump(), **overrides))
    trainer.load(weights_uri=trainer.create(str(folder)).uri, state_path=None)
    return trainer


def moments(
    start: tuple[int, int] = (0, 0), end: tuple[int, int] = (NUM_STEPS, 0)
) -> Iterator[tuple[int, int]]:
    """(step, micro-batch) from `start` to before `end`."""
    every = itertools.product(range(NUM_STEPS), range(NUM_PARTS))
    return (moment for moment in every if start <= moment < end)


def train(trainer: Replica, start: tuple[int, int] = (0, 0), end: tuple[int, int] = (NUM_STEPS, 0)) -> None:
    """The same run for everyone; an optimizer step follows each last micro-batch."""
    for step, part in moments(start, end):
        loss = "imitation" if step == 0 else "policy_gradient"
        trainer.forward_backward(batch(ROWS[part::NUM_PARTS], name=f"{step}-{part}", loss=loss))
        if part == NUM_PARTS - 1:
            trainer.optim_step(scale=0.01, warm=step == 0)


def weights(trainer: Replica) -> dict[str, Tensor]:
    assert trainer._state is not None
    return {name: value.clone() for name, value in trainer._state.learner.weights()}


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def moved(
    folder: Path, here: dict[str, Any], there: dict[str, Any], at: tuple[int, int]
) -> dict[str, Tensor]:
    """The weights of a run that starts with knobs `here`, and moves to `there` at moment `at`."""
    folder.mkdir()
    first = loaded(folder / "w", here)
    train(first, end=at)
    first.save(state_path=str(folder / "state"))
    second = Replica(plan(trainer=there, optimizer=OPTIMIZER.model_dump(), seed=8))
    second.load(weights_uri=str(folder / "w" / "v000000"), state_path=str(folder / "state"))
    second.save(state_path=str(folder / "again"))
    (facts, before), (facts_again, after) = read_state(folder / "state"), read_state(folder / "again")
    assert facts == facts_again and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(second, start=at)
    return weights(second)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The final weights of a run without a move, by its knobs; each is made once."""
    made: dict[str, dict[str, Tensor]] = {}

    def of(knobs: dict[str, Any]) -> dict[str, Tensor]:
        if str(knobs) not in made:
            trainer = loaded(tmp_path_factory.mktemp("whole"), knobs)
            train(trainer)
            made[str(knobs)] = weights(trainer)
        return made[str(knobs)]

    return of


def test_stage_1_makes_the_updates_of_plain_torch(uninterrupted: Any) -> None:
    assert gap(uninterrupted(zero(1)), uninterrupted(TORCH)) < TOLERANCE


def test_a_state_in_mid_batch_goes_from_stage_1_to_torch_and_back_to_the_bit(
    uninterrupted: Any, tmp_path: Path
) -> None:
    there = moved(tmp_path / "to-itself", zero(1), zero(1), (1, 2))
    assert gap(there, uninterrupted(zero(1))) == 0.0
    assert gap(moved(tmp_path / "to-torch", zero(1), TORCH, (1, 2)), uninterrupted(TORCH)) < TOLERANCE
    assert gap(moved(tmp_path / "to-zero", TORCH, zero(1), (0, 1)), uninterrupted(zero(1))) == 0.0


def test_a_failed_micro_batch_and_a_gradient_that_is_not_finite_leave_no_trace(tmp_path: Path) -> None:
    trainer, plain = loaded(tmp_path / "a", zero(1)), loaded(tmp_path / "b", zero(1))
    bad = row(3, num_prompt=40, num_sampled=10, logprobs=np.full(50, -100.0, np.float32), advantage=3e38)
    with pytest.raises(TrainerError, match="sample sample-3: token loss"):
        trainer.forward_backward(batch([*ROWS, bad], name="bad"))  # some passes were through
    for one in (trainer, plain):
        one.forward_backward(batch(ROWS[:4], name="good"))
        one.optim_step(scale=0.01)
    assert gap(weights(trainer), weights(plain)) == 0.0
    trainer.forward_backward(batch(ROWS[:4], name="huge"))
    with pytest.raises(TrainerError, match="gradient norm inf, no step taken; micro-batches huge"):
        trainer.optim_step(scale=1e38)
    assert gap(weights(trainer), weights(plain)) == 0.0
    for one in (trainer, plain):
        one.forward_backward(batch(ROWS[4:], name="next"))
        one.optim_step(scale=0.01)
    assert gap(weights(trainer), weights(plain)) == 0.0


def test_sums_of_one_replica_are_added_by_another(tmp_path: Path) -> None:
    """Core and satellite, as a group has them: the result is that of one replica doing all."""
    core, satellite, alone = (loaded(tmp_path / name, zero(1)) for name in ("core", "satellite", "alone"))
    core.forward_backward(batch(ROWS[:5], name="a"))
    satellite.forward_backward(batch(ROWS[5:], name="b"))
    handed = satellite.export_gradients(path=str(tmp_path / "sums"))
    assert handed.micro_batch_ids == ("b",)
    core.add_gradients(path=handed.path)
    for name, rows in (("a", ROWS[:5]), ("b", ROWS[5:])):
        alone.forward_backward(batch(rows, name=name))
    assert core.optim_step(scale=0.01).micro_batch_ids == alone.optim_step(scale=0.01).micro_batch_ids
    assert gap(weights(core), weights(alone)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_stage_makes_the_updates_of_plain_torch(uninterrupted: Any, stage: int) -> None:
    assert gap(uninterrupted(zero(stage)), uninterrupted(TORCH)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("at", [(0, 2), (1, 0), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("there", [TORCH, zero(0), zero(1)], ids=str)
@pytest.mark.parametrize("here", [TORCH, zero(0), zero(1)], ids=str)
def test_every_backend_restores_what_another_saved_in_mid_batch(
    uninterrupted: Any, tmp_path: Path, here: Any, there: Any, at: tuple[int, int]
) -> None:
    result = moved(tmp_path / "m", here, there, at)
    assert gap(result, uninterrupted(there)) < TOLERANCE
    if here == there:
        assert gap(result, uninterrupted(there)) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("there", [TORCH, *(zero(stage) for stage in range(4))], ids=str)
@pytest.mark.parametrize("here", [zero(2), zero(3), zero(1)], ids=str)
def test_every_stage_restores_what_another_saved_at_a_boundary(
    uninterrupted: Any, tmp_path: Path, here: Any, there: Any
) -> None:
    result = moved(tmp_path / "m", here, there, (2, 0))
    assert gap(result, uninterrupted(there)) < TOLERANCE
    if here == there:
        assert gap(result, uninterrupted(there)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_stages_2_and_3_refuse_what_needs_the_gradients_in_mid_batch(tmp_path: Path, stage: int) -> None:
    trainer = loaded(tmp_path / "w", zero(stage))
    trainer.forward_backward(batch(ROWS[:4], name="a"))
    with pytest.raises(TrainerError, match=f"ZeRO stage {stage} cannot save gradients in mid-batch; 1 micro"):
        trainer.save(state_path=str(tmp_path / "state"))
    with pytest.raises(TrainerError, match="cannot export gradients in mid-batch; use 0 or 1"):
        trainer.export_gradients(path=str(tmp_path / "sums"))
    trainer.optim_step(scale=0.01)
    trainer.save(state_path=str(tmp_path / "state"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_micro_batch_that_fails_half_way_at_stage_2_or_3_spoils_the_batch_until_a_load(
    tmp_path: Path, stage: int
) -> None:
    trainer, plain = loaded(tmp_path / "a", zero(stage)), loaded(tmp_path / "b", zero(stage))
    for one in (trainer, plain):
        train(one, end=(1, 0))
    trainer.save(state_path=str(tmp_path / "state"))
    bad = row(3, num_prompt=40, num_sampled=10, logprobs=np.full(50, -100.0, np.float32), advantage=3e38)
    with pytest.raises(TrainerError, match="sample sample-3: token loss"):
        trainer.forward_backward(batch([*ROWS, bad], name="bad"))
    for verb in (
        lambda: trainer.forward_backward(batch(ROWS[:2], name="next")),
        lambda: trainer.save(state_path=str(tmp_path / "no")),
    ):
        with pytest.raises(TrainerError, match="a micro-batch failed half-way, and ZeRO stage"):
            verb()
    trainer.load(weights_uri=str(tmp_path / "a" / "v000000"), state_path=str(tmp_path / "state"))
    for one in (trainer, plain):
        train(one, start=(1, 0))
    assert gap(weights(trainer), weights(plain)) == 0.0


@pytest.mark.slow
def test_bfloat16_arithmetic_under_autocast_keeps_float32_weights(uninterrupted: Any, tmp_path: Path) -> None:
    trainer = loaded(tmp_path, zero(1, deepspeed={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}))
    train(trainer)
    ours = weights(trainer)
    assert {value.dtype for value in ours.values()} == {torch.float32}
    assert 0.0 < gap(ours, uninterrupted(TORCH)) < 5e-3


@pytest.mark.slow
def test_engines_come_and_go_in_one_process(tmp_path: Path) -> None:
    trainer = loaded(tmp_path / "w", zero(1))
    for _ in range(4):
        trainer.load(weights_uri=str(tmp_path / "w" / "v000000"), state_path=None)
        train(trainer, end=(1, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_a_gpu_every_stage_makes_the_updates_of_plain_torch(tmp_path: Path, stage: int) -> None:
    """NCCL with one rank; float32, so the arithmetic differs from torch's only in its order."""
    trainers = [loaded(tmp_path / str(knobs), knobs, device="cuda") for knobs in (zero(stage), TORCH)]
    for trainer in trainers:
        train(trainer)
    assert gap(*(weights(trainer) for trainer in trainers)) < 5e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_state_in_mid_batch_continues_to_the_bit(tmp_path: Path) -> None:
    first = loaded(tmp_path / "w", zero(1), device="cuda")
    train(first, end=(1, 2))
    first.save(state_path=str(tmp_path / "state"))
    second = Replica(plan(trainer=zero(1), optimizer=OPTIMIZER.model_dump(), device="cuda", seed=8))
    second.load(weights_uri=str(tmp_path / "w" / "v000000"), state_path=str(tmp_path / "state"))
    for one in (first, second):
        train(one, start=(1, 2), end=(2, 0))
    assert gap(weights(first), weights(second)) == 0.0
