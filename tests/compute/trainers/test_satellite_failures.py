"""Satellites that hang, die together, or find no room; and none beside a core that comes or goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.state.errors import StateFull
from megloom.compute.trainers.group import TrainingGroup
from megloom.compute.trainers.lifecycle import GroupLife
from megloom.compute.trainers.protocol import MicroBatch, TrainerError, TrainerLost
from megloom.compute.trainers.suspended import FolderShelf

from .group_parts import Stage, on_stage
from .test_group import assert_close, loaded, micro_batches, plan_of, sums_of, whole_batch

COUNT = 8


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - told by nobody else
            await asyncio.sleep(0)


async def taken(group: TrainingGroup, batches: list[MicroBatch]) -> None:
    await asyncio.gather(*(group.forward_backward(one) for one in batches))


def batch_is_whole(
    folder: Path, work: Callable[[Stage, TrainingGroup], Awaitable[None]], **stage: Any
) -> None:
    """Plays a step of `COUNT` micro-batches; its sums must be those of one replica, each counted once."""
    replicas, verb_timeout_s = stage.pop("replicas", 2), stage.pop("verb_timeout_s", 60.0)

    async def play(made: Stage) -> None:
        shelf = FullShelf(made.folder / "shelf")
        group = await loaded(
            made, made.add(plan_of("a", replicas=replicas), shelf=shelf, verb_timeout_s=verb_timeout_s)
        )
        await work(made, group)
        await group.save(state_path=str(made.folder / "sums"))
        report = await group.optim_step(scale=0.01)
        assert sorted(report.micro_batch_ids) == [f"a-s1-b{number}" for number in range(COUNT)]

    on_stage(folder / "group", play, **{"num_cells": replicas, **stage})
    assert_close(sums_of(folder / "group" / "sums"), whole_batch(folder / "alone", plan_of("a"), COUNT))


class FullShelf(FolderShelf):
    """A shelf that may be full."""

    is_full = False

    async def draft(self, policy: str) -> str:
        if self.is_full:
            raise StateFull("tier disk: no room")
        return await super().draft(policy)


@pytest.mark.parametrize("late", ["start", "load"])
def test_nobody_joins_a_core_that_comes_back_to_sums_that_only_the_shelf_has(
    tmp_path: Path, late: str
) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:2])
        group.leave("trainers/0")
        await until(lambda: group.life is GroupLife.DESTROYED)
        assert len(stage.leftovers()) == 1
        stage.starter.slow["trainer/a", late] = 40  # a satellite would be there long before
        await taken(group, batches[2:])
        assert stage.kinds()["satellite_joined"] >= 1, "those that waited are let in when the core is there"

    batch_is_whole(tmp_path, work, num_cells=3)


def test_nobody_joins_a_core_that_is_leaving(tmp_path: Path) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:2])
        stage.starter.slow["trainer/a", "save"] = 40
        group.leave("trainers/0")
        await until(lambda: group.life is GroupLife.OFFLOAD)
        await taken(group, batches[2:])
        assert stage.kinds()["trainer_offloaded"] == 1

    batch_is_whole(tmp_path, work, num_cells=3)


def test_nobody_joins_while_satellites_hand_in_to_a_core_that_leaves(tmp_path: Path) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:5])
        assert "trainer/a.1" in stage.starter.running
        stage.starter.slow["trainer/a.1", "export_gradients"] = 40
        group.leave("trainers/0")
        await asyncio.sleep(0)
        await taken(group, batches[5:])
        await until(lambda: stage.kinds()["trainer_offloaded"] == 1)

    batch_is_whole(tmp_path, work, replicas=3, num_cells=4)


def test_a_satellite_that_does_not_answer_is_lost_and_never_used_again(tmp_path: Path) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:5])
        stage.starter.hangs.add(("trainer/a.1", "forward_backward"))
        await taken(group, batches[5:])
        assert stage.kinds()["satellite_lost"] == 1
        assert "no answer within 0.5 s" in next(f["cause"] for k, f in stage.told if k == "satellite_lost")
        assert list(stage.starter.running) == ["trainer/a"]

    batch_is_whole(tmp_path, work, verb_timeout_s=0.5)


def test_a_satellite_that_does_not_answer_while_it_leaves_is_lost(tmp_path: Path) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        other = await loaded(stage, stage.add(plan_of("b")))
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:5])
        stage.starter.hangs.add(("trainer/a.1", "export_gradients"))
        await other.forward_backward(micro_batches("b", 1)[0])
        assert stage.kinds()["satellite_lost"] == 1 and "trainer/a" in stage.starter.running
        await taken(group, batches[5:])

    batch_is_whole(tmp_path, work, verb_timeout_s=0.5)


def test_a_core_that_does_not_answer_while_a_satellite_leaves_is_lost_with_its_cell(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=2), verb_timeout_s=0.5))
        other = await loaded(stage, stage.add(plan_of("b")))
        await taken(group, micro_batches("a", 1, 5))
        stage.starter.hangs.add(("trainer/a", "add_gradients"))
        await other.forward_backward(micro_batches("b", 1)[0])
        with pytest.raises(TrainerLost, match="policy=a add_gradients: no answer within 0.5 s"):
            await group.optim_step(scale=0.01)
        assert list(stage.starter.running) == ["trainer/b"]

    on_stage(tmp_path, work, num_cells=2)


def test_a_load_without_an_answer_ends_its_process_and_the_next_verb_tries_again(tmp_path: Path) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:2])
        group.leave("trainers/0")
        await until(lambda: group.life is GroupLife.DESTROYED)
        stage.starter.hangs.add(("trainer/a", "load"))
        with pytest.raises(TrainerLost, match="policy=a load: no answer within 0.5 s"):
            await group.forward_backward(batches[2])
        assert not stage.starter.running and stage.cells.describe() == "all are free"
        stage.starter.hangs.clear()
        await taken(group, batches[2:])

    batch_is_whole(tmp_path, work, replicas=1, verb_timeout_s=0.5)


def test_a_satellite_may_die_while_another_one_leaves(tmp_path: Path) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:6])
        assert {"trainer/a.1", "trainer/a.2"} < set(stage.starter.running)
        stage.starter.slow["trainer/a.1", "stop"] = 40
        cells = {
            fields["replica"]: fields["cell"] for kind, fields in stage.told if kind == "satellite_joined"
        }
        group.leave(cells["trainer/a.1"])
        for _ in range(12):
            await asyncio.sleep(0)
        stage.starter.kill("trainer/a.2")
        group.ended("trainer/a.2", "exit code -9")
        await taken(group, batches[6:])
        assert stage.kinds()["satellite_lost"] == 1

    batch_is_whole(tmp_path, work, replicas=3)


def test_both_satellites_may_die_at_once(tmp_path: Path) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:6])
        stage.starter.slow["trainer/a.1", "stop"] = 40
        for name in ("trainer/a.1", "trainer/a.2"):
            stage.starter.kill(name)
            group.ended(name, "exit code -9")
        await taken(group, batches[6:])
        assert stage.kinds()["satellite_lost"] == 2

    batch_is_whole(tmp_path, work, replicas=3)


def test_a_satellite_may_die_while_a_lost_core_takes_the_others_along(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=3)))
        await taken(group, micro_batches("a", 1, 6))
        stage.starter.slow["trainer/a.1", "stop"] = 40
        stage.starter.kill("trainer/a")
        group.ended("trainer/a", "exit code -9")
        for _ in range(8):
            await asyncio.sleep(0)
        stage.starter.kill("trainer/a.2")
        group.ended("trainer/a.2", "exit code -9")
        await until(lambda: not stage.starter.running)
        with pytest.raises(TrainerLost, match="exit code -9"):
            await group.optim_step(scale=0.01)

    on_stage(tmp_path, work, num_cells=3)


def test_nobody_joins_a_core_that_is_lost(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=3)))
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:6])
        stage.starter.slow["trainer/a.2", "stop"] = 40
        stage.starter.kill("trainer/a")
        group.ended("trainer/a", "exit code -9")
        await until(lambda: "trainer/a.1" not in stage.starter.running)
        for _ in range(2):
            await asyncio.sleep(0)
        with pytest.raises(TrainerLost, match="exit code -9"):
            await group.forward_backward(batches[6])
        for _ in range(60):  # longer than a join
            await asyncio.sleep(0)
        assert not stage.starter.running

    on_stage(tmp_path, work, num_cells=4)


@pytest.mark.parametrize("failing", ["draft", "export_gradients", "add_gradients"])
def test_a_satellite_whose_sums_find_no_room_is_lost_and_the_session_goes_on(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stage: Stage, group: TrainingGroup) -> None:
        other = await loaded(stage, stage.add(plan_of("b")))
        batches = micro_batches("a", 1, COUNT)
        await taken(group, batches[:5])

        def fail(name: str, verb: str) -> None:
            if verb == failing:
                raise TrainerError(f"policy=a {verb}: no space left on device")

        stage.starter.before = fail
        monkeypatch.setattr(FullShelf, "is_full", failing == "draft")
        await other.forward_backward(micro_batches("b", 1)[0])  # takes the satellite's cell
        assert stage.kinds()["satellite_lost"] == 1
        stage.starter.before = lambda name, verb: None
        monkeypatch.setattr(FullShelf, "is_full", False)
        await taken(group, batches[5:])

    batch_is_whole(tmp_path, work)
