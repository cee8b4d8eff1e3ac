"""A core and its satellites: what they hand in makes the gradient that one replica alone would have taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megloom.compute.algorithms.ppo import Ppo
from megloom.compute.trainers.protocol import TrainerError
from megloom.compute.trainers.replica import Replica
from megloom.compute.workload import Optimizer

from .builders import (
    batch,
    distance,
    gradient_sums,
    plan,
    ragged_rows,
    replica,
    state_tensors,
    trained_critic,
    with_critic_columns,
)
from .group_parts import Stage, on_stage
from .test_group import Direct, loaded

PARTS = [batch(ragged_rows(24)[part::4], name=f"part-{part}") for part in range(4)]
WEIGHTS = {"calm": 1.0, "stormy": 1e12}  # of the rows of two policies


def exported(trainer: Replica, path: Path) -> str:
    trainer.export_gradients(path=str(path))
    return str(path)


def test_a_core_and_two_satellites_equal_one_replica(tmp_path: Path) -> None:
    alone, core, *satellites = (replica(tmp_path / "w") for _ in range(4))
    for part in PARTS:
        alone.forward_backward(part)
    for trainer, part in zip((core, *satellites), PARTS, strict=False):
        trainer.forward_backward(part)
    satellites[1].forward_backward(PARTS[3])
    for number, satellite in enumerate(satellites):
        path = tmp_path / f"sums-{number}"
        report = satellite.export_gradients(path=str(path))
        assert report.path == str(path)
        assert report.micro_batch_ids == (("part-1",), ("part-2", "part-3"))[number]
        core.add_gradients(path=str(path))
    assert distance(gradient_sums(alone, tmp_path), gradient_sums(core, tmp_path)) < 1e-6
    updates = [trainer.optim_step(scale=0.01) for trainer in (alone, core)]
    assert updates[0].micro_batch_ids == updates[1].micro_batch_ids
    assert updates[0].num_trainable == updates[1].num_trainable
    assert updates[0].grad_norm == pytest.approx(updates[1].grad_norm, rel=1e-6)


def test_a_critics_gradient_travels_too(tmp_path: Path) -> None:
    rows = with_critic_columns(ragged_rows(8))
    trainers = [replica(tmp_path / "w", algorithm=Ppo().model_dump()) for _ in range(3)]
    for trainer in trainers:
        trained_critic(trainer, rows)
    alone, core, satellite = trainers
    for part in (batch(rows[:4], name="a"), batch(rows[4:], name="b")):
        alone.forward_backward(part)
        (core if part.micro_batch_id == "a" else satellite).forward_backward(part)
    core.add_gradients(path=exported(satellite, tmp_path / "sums"))
    one, other = gradient_sums(alone, tmp_path), gradient_sums(core, tmp_path)
    assert "sums/value_head.weight" in one and distance(one, other) < 1e-6


def test_exporting_empties_the_satellite_and_nothing_else(tmp_path: Path) -> None:
    satellite = replica(tmp_path / "w")
    before = state_tensors(satellite, tmp_path)
    satellite.forward_backward(PARTS[0])
    exported(satellite, tmp_path / "sums")
    after = state_tensors(satellite, tmp_path)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    satellite.forward_backward(PARTS[0])  # as new: the same id may come again
    nothing = replica(tmp_path / "w").export_gradients(path=str(tmp_path / "none"))
    assert (nothing.micro_batch_ids, nothing.num_trainable) == ((), 0)


def test_sums_count_once_and_only_where_they_belong(tmp_path: Path) -> None:
    core, satellite = replica(tmp_path / "w"), replica(tmp_path / "w")
    satellite.forward_backward(PARTS[0])
    satellite.forward_backward(PARTS[1])
    sums = exported(satellite, tmp_path / "sums")
    core.forward_backward(PARTS[1])
    before = gradient_sums(core, tmp_path)

    def refused(trainer: Replica, message: str) -> None:
        with pytest.raises(TrainerError, match=message):
            trainer.add_gradients(path=sums)

    refused(core, "policy=solver add_gradients .*sums: micro-batches part-1 are in the accumulation already")
    after = gradient_sums(core, tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    core.optim_step(scale=0.01)
    refused(core, "sums of policy solver at version 0, expected policy solver at version 1")
    refused(replica(tmp_path / "v", policy="verifier"), "expected policy verifier at version 0")
    (tmp_path / "sums").write_bytes(b"torn")
    refused(replica(tmp_path / "w"), "gradient sums .*sums is unreadable")
    (tmp_path / "sums").unlink()
    refused(replica(tmp_path / "w"), "no gradient sums at")


def test_a_trainers_state_is_no_file_of_sums(tmp_path: Path) -> None:
    trainer = replica(tmp_path / "w")
    trainer.save(state_path=str(tmp_path / "state"))
    with pytest.raises(TrainerError, match="gradient sums .*state is unreadable"):
        trainer.add_gradients(path=str(tmp_path / "state"))


async def two_steps(trainer: Any, policy: str, folder: Path) -> AsyncIterator[float | None]:
    """A verb at each turn, and the norm after an update."""
    for step in (1, 2):
        for part in PARTS[2 * step - 2 :][:2]:
            rows = [replace(one, weight=WEIGHTS[policy]) for one in part.rows]
            await trainer.forward_backward(batch(rows, name=part.micro_batch_id))
            yield None
        yield (await trainer.optim_step(scale=0.01)).grad_norm
        await trainer.publish(weights_dir=str(folder / policy), version=step)
        yield None
        await trainer.save(state_path=str(folder / f"{policy}.s{step}"))
        yield None


def test_huge_gradients_of_one_policy_leave_anothers_clipping_alone(tmp_path: Path) -> None:
    """They share a trainer cell, which changes hands at every verb; each is as if it were trained alone."""
    optimizer = Optimizer(learning_rate=1e-3, grad_clip=0.01).model_dump()
    plans = {policy: plan(policy=policy, optimizer=optimizer) for policy in WEIGHTS}
    (tmp_path / "alone").mkdir()

    async def work_alone(policy: str) -> list[float]:
        trainer = Direct(plans[policy], tmp_path / "alone")
        return [norm async for norm in two_steps(trainer, policy, tmp_path / "alone") if norm is not None]

    alone = {policy: asyncio.run(work_alone(policy)) for policy in WEIGHTS}  # the calm one first
    assert min(alone["stormy"]) > 1e6 * max(alone["calm"]) > 1e6 * 0.01, "both are clipped"
    norms: dict[str, list[float]] = {policy: [] for policy in WEIGHTS}

    async def work(stage: Stage) -> None:
        turns = [
            (policy, two_steps(await loaded(stage, stage.add(made)), policy, stage.folder))
            for policy, made in plans.items()
        ]
        for _ in range(10):
            for policy, verbs in reversed(turns):
                if (norm := await anext(verbs)) is not None:
                    norms[policy].append(norm)
        assert stage.kinds()["trainer_offloaded"] >= 18 and stage.starter.max_running == 1

    on_stage(tmp_path / "shared", work, num_cells=1)
    assert norms == alone
    for policy in WEIGHTS:
        shared, expected = (tmp_path / name / f"{policy}.s2" for name in ("shared", "alone"))
        assert shared.read_bytes() == expected.read_bytes()


def test_sums_survive_a_save_between_the_hand_ins(tmp_path: Path) -> None:
    whole, moved, satellite = (replica(tmp_path / "w") for _ in range(3))
    satellite.forward_backward(PARTS[1])
    sums = exported(satellite, tmp_path / "sums")
    for trainer in (whole, moved):
        trainer.forward_backward(PARTS[0])
        trainer.add_gradients(path=sums)
    moved.save(state_path=str(tmp_path / "state"))
    moved = Replica(plan())
    moved.load(weights_uri=str(tmp_path / "w" / "v000000"), state_path=str(tmp_path / "state"))
    with pytest.raises(TrainerError, match="part-1 are in the accumulation already"):
        moved.add_gradients(path=sums)
    for trainer in (whole, moved):
        trainer.forward_backward(PARTS[2])
        assert trainer.optim_step(scale=0.01).micro_batch_ids == ("part-0", "part-1", "part-2")
    one, other = state_tensors(whole, tmp_path), state_tensors(moved, tmp_path)
    assert all(torch.equal(one[name], other[name]) for name in one)
