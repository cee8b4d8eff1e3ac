"""A policy's trainer comes and goes, its numbers stay, and what a lost process held is taken again."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megloom.compute.graph.states import IllegalMove
from megloom.compute.scheduling.trainer_cells import Rules, TrainerCell
from megloom.compute.trainers.cells import TrainerCells
from megloom.compute.trainers.group import TrainingGroup
from megloom.compute.trainers.lifecycle import GroupLife, checked_move
from megloom.compute.trainers.protocol import MicroBatch, TrainerError, TrainerLost, TrainerPlan
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.snapshot import read_state
from megloom.compute.trainers.suspended import FolderShelf
from megloom.compute.workload import Publishing
from megloom.compute.workload import Trainer as TrainerKnobs

from .builders import batch, plan, ragged_rows
from .group_parts import QUICK, Stage, Starter, on_stage

ROWS = ragged_rows(24)


def plan_of(policy: str, **trainer: Any) -> TrainerPlan:
    return plan(policy=policy, trainer=TrainerKnobs(**trainer).model_dump())


def micro_batches(policy: str, step: int, count: int = 2) -> list[MicroBatch]:
    rng = random.Random(f"{policy} {step}")
    return [batch(rng.sample(ROWS, 3), name=f"{policy}-s{step}-b{number}") for number in range(count)]


async def loaded(stage: Stage, made: TrainingGroup) -> TrainingGroup:
    """The group on a fresh version 0."""
    created = await made.create(str(stage.folder / made.policy))
    await made.load(weights_uri=created.uri, state_path=None)
    return made


async def verbs_of(trainer: Any, policy: str, folder: Path, steps: int) -> AsyncIterator[str]:
    """A policy's whole training, one verb at each turn."""
    for step in range(1, steps + 1):
        for taken in micro_batches(policy, step):
            await trainer.forward_backward(taken)
            yield "forward_backward"
        await trainer.optim_step(scale=0.01)
        yield "optim_step"
        await trainer.publish(weights_dir=str(folder / policy), version=step)
        yield "publish"
        await trainer.save(state_path=str(folder / f"{policy}.s{step}"))
        yield "save"


class Direct:
    """A replica behind async verbs, and nothing else: being trained alone."""

    def __init__(self, made: TrainerPlan, folder: Path) -> None:
        self._replica = Replica(made)
        self._replica.load(weights_uri=self._replica.create(str(folder / made.policy)).uri, state_path=None)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        async def call(*args: Any, **named: Any) -> Any:
            return getattr(self._replica, verb)(*args, **named)

        return call


def trained_alone(folder: Path, policy: str, steps: int, made: TrainerPlan | None = None) -> bytes:
    """The state after the last step, of a replica that is never suspended."""

    async def main() -> None:
        async for _ in verbs_of(Direct(made or plan_of(policy), folder), policy, folder, steps):
            pass

    asyncio.run(main())
    return (folder / f"{policy}.s{steps}").read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], bytes]:
    """`trained_alone`, once for each policy."""
    folder = tmp_path_factory.mktemp("alone")
    return functools.cache(lambda policy, steps: trained_alone(folder / str(steps), policy, steps))


@pytest.mark.parametrize(
    ("seed", "steps"),
    [*((n, 1) for n in range(2)), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in range(20))],
)
def test_eight_policies_on_one_cell_are_each_bit_equal_to_being_trained_alone(
    tmp_path: Path, alone: Callable[[str, int], bytes], seed: int, steps: int
) -> None:
    policies = [f"p{number}" for number in range(8)]

    async def work(stage: Stage) -> None:
        turns = {}
        for policy in policies:
            group = await loaded(stage, stage.add(plan_of(policy)))
            turns[policy] = verbs_of(group, policy, stage.folder, steps)
        rng = random.Random(seed)
        while turns:  # the next verb of whichever policy: nearly every one of them is a switch
            policy = rng.choice(sorted(turns))
            if await anext(turns[policy], None) is None:
                del turns[policy]
        assert stage.kinds()["trainer_offloaded"] > 25 * steps and stage.starter.max_running == 1

    on_stage(tmp_path, work, num_cells=1)
    for policy in policies:
        assert (tmp_path / f"{policy}.s{steps}").read_bytes() == alone(policy, steps)


def test_policies_that_all_want_the_cell_at_once_share_it_and_get_their_own_numbers(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        async def train(policy: str) -> None:
            group = await loaded(stage, stage.add(plan_of(policy)))
            async for _ in verbs_of(group, policy, stage.folder, 2):
                pass

        async with asyncio.TaskGroup() as tasks:
            for policy in ("a", "b", "c"):
                tasks.create_task(train(policy))
        assert stage.starter.max_running <= 2

    on_stage(tmp_path / "shared", work, num_cells=2)
    for policy in ("a", "b", "c"):
        shared = (tmp_path / "shared" / f"{policy}.s2").read_bytes()
        assert shared == trained_alone(tmp_path / "alone", policy, 2)


def test_a_group_needs_no_process_until_its_first_verb(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a")))
        assert group.life is GroupLife.DESTROYED and not stage.starter.running  # `create` had one of its own
        await group.forward_backward(micro_batches("a", 1)[0])
        assert group.life is GroupLife.COMPUTE and list(stage.starter.running) == ["trainer/a"]

    on_stage(tmp_path, work, num_cells=1)


def test_a_verb_without_weights_says_so(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        with pytest.raises(TrainerError, match="policy=a: no weights are loaded"):
            await stage.add(plan_of("a")).optim_step(scale=1.0)

    on_stage(tmp_path, work, num_cells=1)


def test_an_idle_group_leaves_its_cell_after_idle_s_and_comes_back_with_its_gradients(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a")))
        first, second = micro_batches("a", 1)
        await group.forward_backward(first)
        async with asyncio.timeout(20):
            while stage.starter.running:  # noqa: ASYNC110 - the group has no event for it
                await asyncio.sleep(0.01)
        assert group.life is GroupLife.DESTROYED and len(stage.leftovers()) == 1
        await group.forward_backward(second)
        report = await group.optim_step(scale=0.01)
        assert report.micro_batch_ids == ("a-s1-b0", "a-s1-b1") and stage.leftovers() == []

    on_stage(tmp_path, work, num_cells=1, rules=Rules(idle_s=0.05))


def test_verbs_that_wait_while_their_group_is_suspended_are_done_in_order(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        first, other = (
            await loaded(stage, stage.add(plan_of("a"))),
            await loaded(stage, stage.add(plan_of("b"))),
        )
        queued = [asyncio.create_task(first.forward_backward(b)) for b in micro_batches("a", 1, 4)]
        await asyncio.sleep(0)
        await other.forward_backward(micro_batches("b", 1)[0])
        await asyncio.gather(*queued)
        report = await first.optim_step(scale=0.01)
        assert report.micro_batch_ids == tuple(f"a-s1-b{number}" for number in range(4))
        assert stage.kinds()["trainer_offloaded"] >= 2

    on_stage(tmp_path, work, num_cells=1)


def test_a_core_lost_in_a_verb_is_lost_until_load_and_the_replayed_step_has_the_same_bits(
    tmp_path: Path,
) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a")))
        uri = str(stage.folder / "a" / "v000000")
        taken = micro_batches("a", 1)
        await group.forward_backward(taken[0])
        calls = []

        def kill(name: str, verb: str) -> None:
            calls.append(verb)
            if calls == ["forward_backward"]:
                stage.starter.kill(name)

        stage.starter.before = kill
        with pytest.raises(TrainerLost, match="trainer/a forward_backward"):
            await group.forward_backward(taken[1])
        with pytest.raises(TrainerLost, match="trainer/a forward_backward"):
            await group.optim_step(scale=0.01)
        await group.load(weights_uri=uri, state_path=None)
        async for _ in verbs_of(group, "a", stage.folder, 1):
            pass

    on_stage(tmp_path / "group", work, num_cells=1)
    replayed = (tmp_path / "group" / "a.s1").read_bytes()
    assert replayed == trained_alone(tmp_path / "alone", "a", 1)


def test_an_idle_core_that_is_killed_costs_nothing_if_its_state_is_saved_and_the_batch_if_not(
    tmp_path: Path,
) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a")))
        async for _ in verbs_of(group, "a", stage.folder, 1):
            pass
        for is_saved in (True, False):
            if not is_saved:
                await group.forward_backward(micro_batches("a", 2)[0])
            stage.starter.kill("trainer/a")
            group.ended("trainer/a", "exit code -9")
            async with asyncio.timeout(20):
                while group.life is GroupLife.COMPUTE:  # noqa: ASYNC110 - the burial has no event for us
                    await asyncio.sleep(0)
            if is_saved:
                await group.forward_backward(micro_batches("a", 3)[0])
                await group.load(
                    weights_uri=str(stage.folder / "a" / "v000001"),
                    state_path=str(stage.folder / "a.s1"),
                )
            else:
                with pytest.raises(TrainerLost, match="exit code -9"):
                    await group.optim_step(scale=1.0)

    on_stage(tmp_path, work, num_cells=1)


def test_a_process_killed_while_it_is_suspended_leaves_the_old_state_and_frees_the_cell(
    tmp_path: Path,
) -> None:
    async def work(stage: Stage) -> None:
        one, other = (
            await loaded(stage, stage.add(plan_of("a"))),
            await loaded(stage, stage.add(plan_of("b"))),
        )
        async for _ in verbs_of(one, "a", stage.folder, 1):
            pass
        kept = (stage.folder / "a.s1").read_bytes()
        await one.forward_backward(micro_batches("a", 2)[0])

        def kill(name: str, verb: str) -> None:
            if (name, verb) == ("trainer/a", "save"):
                (stage.folder / "shelf" / "a-000000").write_bytes(b"half")
                stage.starter.kill(name)

        stage.starter.before = kill
        await other.forward_backward(micro_batches("b", 1)[0])
        assert stage.leftovers() == [] and (stage.folder / "a.s1").read_bytes() == kept
        stage.starter.before = lambda name, verb: None
        with pytest.raises(TrainerLost, match="trainer/a save"):
            await one.optim_step(scale=1.0)
        weights = str(stage.folder / "a" / "v000001")
        await one.load(weights_uri=weights, state_path=str(stage.folder / "a.s1"))
        for taken in micro_batches("a", 2):
            await one.forward_backward(taken)
        await one.optim_step(scale=0.01)
        await one.publish(weights_dir=str(stage.folder / "a"), version=2)
        await one.save(state_path=str(stage.folder / "a.s2"))

    on_stage(tmp_path / "group", work, num_cells=1)
    assert (tmp_path / "group" / "a.s2").read_bytes() == trained_alone(tmp_path / "alone", "a", 2)


def test_a_suspended_state_that_is_gone_is_a_lost_trainer(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        one, other = (
            await loaded(stage, stage.add(plan_of("a"))),
            await loaded(stage, stage.add(plan_of("b"))),
        )
        first, second = micro_batches("a", 1)
        await one.forward_backward(first)
        await other.forward_backward(micro_batches("b", 1)[0])
        (stage.folder / "shelf" / stage.leftovers()[0]).unlink()
        with pytest.raises(TrainerLost, match="policy=a: its suspended state: .* is gone"):
            await one.forward_backward(second)
        await one.load(weights_uri=str(stage.folder / "a" / "v000000"), state_path=None)
        assert (await one.forward_backward(first)).num_rows == 3

    on_stage(tmp_path, work, num_cells=1)


def test_a_full_disk_keeps_a_group_where_it_is_with_all_that_it_has(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        one, other = (
            await loaded(stage, stage.add(plan_of("a"))),
            await loaded(stage, stage.add(plan_of("b"))),
        )
        turns = verbs_of(one, "a", stage.folder, 1)
        await anext(turns)
        is_full = True

        def fill(name: str, verb: str) -> None:
            if (name, verb, is_full) == ("trainer/a", "save", True):
                raise TrainerError("policy=a save: no space left on device")

        stage.starter.before = fill
        waiting = asyncio.create_task(other.forward_backward(micro_batches("b", 1)[0]))
        async with asyncio.timeout(20):
            while not stage.kinds()["trainer_stays"]:  # noqa: ASYNC110 - told by nobody else
                await asyncio.sleep(0)
        assert one.life is GroupLife.COMPUTE and "could not be written" in stage.cells.describe()
        is_full = False
        async for _ in turns:
            pass
        await waiting

    on_stage(tmp_path / "group", work, num_cells=1)
    assert (tmp_path / "group" / "a.s1").read_bytes() == trained_alone(tmp_path / "alone", "a", 1)


def test_a_wait_for_a_cell_ends_at_its_deadline_and_says_who_holds_it(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        one, other = (
            await loaded(stage, stage.add(plan_of("a"))),
            await loaded(stage, stage.add(plan_of("b"))),
        )
        hang = asyncio.Event()

        async def hanging(batch: MicroBatch) -> Any:
            await hang.wait()
            raise TrainerLost("killed at last")

        await one.forward_backward(micro_batches("a", 1)[0])
        stage.starter.running["trainer/a"].forward_backward = hanging  # type: ignore[method-assign]
        stuck = asyncio.create_task(one.forward_backward(micro_batches("a", 1)[1]))
        with pytest.raises(
            TrainerError,
            match=r"trainers of b: no trainer cell within 0\.05 s: trainers/0 is held by a \(compute, "
            r"forward_backward a-s1-b1 for",
        ):
            await other.forward_backward(micro_batches("b", 1)[0])
        hang.set()
        with pytest.raises(TrainerLost, match="killed at last"):
            await stuck

    on_stage(tmp_path, work, num_cells=1, bind_timeout_s=0.05)


def test_a_verb_that_is_not_answered_is_a_lost_trainer_and_ends_it(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a"), verb_timeout_s=2.0))
        first, second = micro_batches("a", 1)
        await group.forward_backward(first)

        async def hanging(batch: MicroBatch) -> Any:
            await asyncio.Event().wait()

        stage.starter.running["trainer/a"].forward_backward = hanging  # type: ignore[method-assign]
        with pytest.raises(TrainerLost, match="policy=a forward_backward a-s1-b1: no answer within 2 s"):
            await group.forward_backward(second)
        assert not stage.starter.running and group.life is GroupLife.DESTROYED

    on_stage(tmp_path, work, num_cells=1)


def test_a_verb_that_is_cancelled_in_the_middle_leaves_no_half_known_trainer(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a")))
        first, second = micro_batches("a", 1)
        await group.forward_backward(first)
        running = asyncio.create_task(group.forward_backward(second))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert not stage.starter.running
        with pytest.raises(TrainerLost, match="policy=a forward_backward a-s1-b1: cancelled"):
            await group.optim_step(scale=1.0)

    on_stage(tmp_path, work, num_cells=1)


def test_a_failed_verb_changes_nothing_and_the_group_goes_on(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a")))
        turns = verbs_of(group, "a", stage.folder, 1)
        await anext(turns)
        with pytest.raises(TrainerError, match="a-s1-b0: its gradient is in the accumulation already"):
            await group.forward_backward(micro_batches("a", 1)[0])
        with pytest.raises(TrainerError, match="loss \"?'?unheard"):
            await group.forward_backward(batch(ROWS[:1], name="bad", loss="unheard"))
        async for _ in turns:
            pass

    on_stage(tmp_path / "group", work, num_cells=1)
    assert (tmp_path / "group" / "a.s1").read_bytes() == trained_alone(tmp_path / "alone", "a", 1)


# Satellites


def sums_of(path: Path) -> torch.Tensor:
    """All gradient sums of a state in one line."""
    tensors = read_state(path)[1]
    return torch.cat([tensors[name].flatten() for name in sorted(tensors) if name.startswith("sums/")])


def whole_batch(folder: Path, made: TrainerPlan, count: int) -> torch.Tensor:
    """What one replica sums up over the batch."""
    replica = Replica(made)
    replica.load(weights_uri=replica.create(str(folder)).uri, state_path=None)
    for taken in micro_batches("a", 1, count):
        replica.forward_backward(taken)
    replica.save(state_path=str(folder / "sums"))
    return sums_of(folder / "sums")


async def batch_of_many(stage: Stage, group: TrainingGroup, count: int) -> None:
    """All micro-batches at once, then the state with the sums of all replicas."""
    await asyncio.gather(*(group.forward_backward(taken) for taken in micro_batches("a", 1, count)))
    await group.save(state_path=str(stage.folder / "sums"))
    report = await group.optim_step(scale=0.01)
    assert sorted(report.micro_batch_ids) == [f"a-s1-b{number}" for number in range(count)]


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).norm() <= 1e-6 * other.norm()


def test_satellites_join_a_running_batch_and_the_sums_are_those_of_one_replica(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=3)))
        await batch_of_many(stage, group, 8)
        assert stage.kinds()["satellite_joined"] == 2 and stage.starter.max_running == 3
        await group.publish(weights_dir=str(stage.folder / "a"), version=1)
        await asyncio.gather(*(group.forward_backward(taken) for taken in micro_batches("a", 2, 8)))
        await group.save(state_path=str(stage.folder / "second"))
        assert stage.kinds()["satellite_joined"] == 4 and sum(stage.starter.num_started.values()) == 4

    on_stage(tmp_path / "group", work, num_cells=3)
    expected = whole_batch(tmp_path / "alone", plan_of("a"), 8)
    assert_close(sums_of(tmp_path / "group" / "sums"), expected)
    alone = Replica(plan_of("a"))  # the second batch was taken with the new weights, on every replica
    alone.load(weights_uri=str(tmp_path / "group" / "a" / "v000001"), state_path=None)
    for taken in micro_batches("a", 2, 8):
        alone.forward_backward(taken)
    alone.save(state_path=str(tmp_path / "second"))
    assert_close(sums_of(tmp_path / "group" / "second"), sums_of(tmp_path / "second"))


async def one_step(stage: Stage, group: TrainingGroup, number: int, *, count: int = 8) -> None:
    """As a lane does it."""
    await asyncio.gather(*(group.forward_backward(taken) for taken in micro_batches("a", number, count)))
    await group.optim_step(scale=0.01)
    await group.publish(weights_dir=str(stage.folder / "a"), version=number)
    await group.save(state_path=str(stage.folder / f"a.s{number}"))


def test_satellites_rest_between_steps_and_load_new_weights_before_the_next_batch(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        loads: list[str] = []
        stage.starter.before = lambda name, verb: loads.append(name) if verb == "load" else None
        group = await loaded(stage, stage.add(plan_of("a", replicas=2)))
        for number in (1, 2, 3):
            await one_step(stage, group, number)
        assert stage.starter.num_started["trainer/a.1"] == 1, "one process for all steps"
        for _ in range(20):  # it loads what the step has left, though no micro-batch waits
            await asyncio.sleep(0)
        assert loads.count("trainer/a.1") == 4
        assert stage.kinds()["satellite_lost"] == 0

    on_stage(tmp_path, work, num_cells=2)


def test_a_resting_satellite_is_the_first_to_give_its_cell_away(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        other = await loaded(stage, stage.add(plan_of("b")))
        group = await loaded(stage, stage.add(plan_of("a", replicas=2)))
        await asyncio.gather(*(group.forward_backward(taken) for taken in micro_batches("a", 1, 8)))
        await group.optim_step(scale=0.01)
        assert sorted(stage.starter.running) == ["trainer/a", "trainer/a.1"]
        assert group.idle_since_s("trainers/1") is not None
        await other.forward_backward(micro_batches("b", 1)[0])
        assert sorted(stage.starter.running) == ["trainer/a", "trainer/b"]
        assert stage.kinds()["trainer_offloaded"] == 0

    on_stage(tmp_path, work, num_cells=2)


@pytest.mark.parametrize("notices", ["told", "load"])
def test_a_satellite_that_dies_while_it_rests_is_replaced(tmp_path: Path, notices: str) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=2)))
        await asyncio.gather(*(group.forward_backward(taken) for taken in micro_batches("a", 1, 8)))
        await group.optim_step(scale=0.01)
        stage.starter.kill("trainer/a.1")
        if notices == "told":
            group.ended("trainer/a.1", "exit code -9")
            for _ in range(5):
                await asyncio.sleep(0)
            assert list(stage.starter.running) == ["trainer/a"]
        await group.publish(weights_dir=str(stage.folder / "a"), version=1)
        await group.save(state_path=str(stage.folder / "a.s1"))
        await one_step(stage, group, 2)
        assert stage.starter.num_started["trainer/a.1"] == 2 and stage.kinds()["satellite_lost"] == 1

    on_stage(tmp_path, work, num_cells=2)


def test_an_idle_group_takes_its_resting_satellites_along(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=3)))
        await asyncio.gather(*(group.forward_backward(taken) for taken in micro_batches("a", 1, 8)))
        await group.optim_step(scale=0.01)
        assert len(stage.starter.running) == 3
        await asyncio.sleep(5.1)
        assert not stage.starter.running and stage.cells.describe() == "all are free"

    on_stage(tmp_path, work, num_cells=3, rules=replace(QUICK, idle_s=5.0))


@pytest.mark.parametrize("verb", ["load", "forward_backward", "export_gradients"])
def test_what_a_lost_satellite_held_is_taken_again_and_counted_once(tmp_path: Path, verb: str) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=2)))
        seen = []

        def kill(name: str, now: str) -> None:
            if name == "trainer/a.1" and now == verb:
                seen.append(name)
                if len(seen) == (2 if verb == "forward_backward" else 1):
                    stage.starter.kill(name)

        stage.starter.before = kill
        await batch_of_many(stage, group, 8)
        assert stage.kinds()["satellite_lost"] == 1

    on_stage(tmp_path / "group", work, num_cells=2)
    expected = whole_batch(tmp_path / "alone", plan_of("a"), 8)
    assert_close(sums_of(tmp_path / "group" / "sums"), expected)


def test_a_satellite_that_ends_between_verbs_is_noticed(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=2)))
        first = micro_batches("a", 1, 8)
        await asyncio.gather(*(group.forward_backward(taken) for taken in first[:6]))
        stage.starter.kill("trainer/a.1")
        group.ended("trainer/a.1", "exit code -9")
        await asyncio.gather(*(group.forward_backward(taken) for taken in first[6:]))
        await group.save(state_path=str(stage.folder / "sums"))
        assert stage.kinds()["satellite_lost"] == 1

    on_stage(tmp_path / "group", work, num_cells=2)
    assert_close(sums_of(tmp_path / "group" / "sums"), whole_batch(tmp_path / "alone", plan_of("a"), 8))


def test_a_satellite_gives_its_cell_to_whoever_waits_for_one(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        other = await loaded(stage, stage.add(plan_of("b")))
        group = await loaded(stage, stage.add(plan_of("a", replicas=2)))
        taken = micro_batches("a", 1, 8)
        await asyncio.gather(*(group.forward_backward(one) for one in taken[:4]))
        assert "trainer/a.1" in stage.starter.running
        await other.forward_backward(micro_batches("b", 1)[0])
        assert sorted(stage.starter.running) == ["trainer/a", "trainer/b"]
        await asyncio.gather(*(group.forward_backward(one) for one in taken[4:]))
        await group.save(state_path=str(stage.folder / "sums"))

    on_stage(tmp_path / "group", work, num_cells=2)
    assert_close(sums_of(tmp_path / "group" / "sums"), whole_batch(tmp_path / "alone", plan_of("a"), 8))


def test_a_lost_core_takes_its_satellites_along(tmp_path: Path) -> None:
    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(plan_of("a", replicas=2)))
        taken = micro_batches("a", 1, 6)
        await asyncio.gather(*(group.forward_backward(one) for one in taken[:4]))
        stage.starter.before = lambda name, verb: name == "trainer/a" and stage.starter.kill(name)
        done = await asyncio.gather(
            *(group.forward_backward(one) for one in taken[4:]), return_exceptions=True
        )
        assert any(isinstance(result, TrainerLost) for result in done) and not stage.starter.running
        stage.starter.before = lambda name, verb: None
        await group.load(weights_uri=str(stage.folder / "a" / "v000000"), state_path=None)
        await batch_of_many(stage, group, 6)

    on_stage(tmp_path / "group", work, num_cells=2)
    assert_close(sums_of(tmp_path / "group" / "sums"), whole_batch(tmp_path / "alone", plan_of("a"), 6))


def test_a_satellite_loads_the_state_where_published_weights_are_not_the_masters(tmp_path: Path) -> None:
    """Published as bfloat16, the weights alone would give another gradient."""
    publishing = Publishing(dtype="bfloat16").model_dump()
    made = plan(policy="a", trainer=TrainerKnobs(replicas=2).model_dump(), publishing=publishing)

    async def work(stage: Stage) -> None:
        group = await loaded(stage, stage.add(made))
        async for _ in verbs_of(group, "a", stage.folder, 1):
            pass
        await asyncio.gather(*(group.forward_backward(taken) for taken in micro_batches("a", 2, 8)))
        assert stage.kinds()["satellite_joined"] >= 1
        await group.save(state_path=str(stage.folder / "sums"))

    on_stage(tmp_path / "group", work, num_cells=2)
    alone = Replica(made)
    alone.load(
        weights_uri=str(tmp_path / "group" / "a" / "v000001"), state_path=str(tmp_path / "group" / "a.s1")
    )
    for taken in micro_batches("a", 2, 8):
        alone.forward_backward(taken)
    alone.save(state_path=str(tmp_path / "sums"))
    assert_close(sums_of(tmp_path / "group" / "sums"), sums_of(tmp_path / "sums"))


def test_satellites_beside_zero_2_are_refused() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            starter = Starter()
            with pytest.raises(ValueError, match="policy a: replicas 2 need zero_stage 0 or 1, got 2"):
                TrainingGroup(
                    plan_of("a", backend="deepspeed", zero_stage=2, replicas=2),
                    cells=TrainerCells([TrainerCell(name="0")], clock=lambda: 0.0),
                    starter=starter,
                    shelf=FolderShelf(Path("unused")),
                    tasks=tasks,
                    clock=lambda: 0.0,
                    tell=lambda kind, **fields: None,
                )

    asyncio.run(main())


def test_an_illegal_move_names_the_policy_and_what_is_allowed() -> None:
    with pytest.raises(
        IllegalMove, match="trainers of a: inactive → load is not a legal move .allowed: bind"
    ):
        checked_move("a", GroupLife.INACTIVE, GroupLife.LOAD)
