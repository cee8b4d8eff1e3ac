"""Training groups over real processes of the fork server: SIGKILL anywhere changes no update."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.cluster.local import LocalCluster
from megloom.compute.conductor.client import is_alive
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.local_backend import LocalBackend
from megloom.compute.scheduling.trainer_cells import Rules, TrainerCell
from megloom.compute.trainers.cells import TrainerCells
from megloom.compute.trainers.group import TrainingGroup
from megloom.compute.trainers.lifecycle import GroupLife
from megloom.compute.trainers.protocol import MicroBatch, TrainerLost, TrainerPlan
from megloom.compute.workload import Trainer as TrainerKnobs
from tests.compute.trainers.builders import batch, plan, row

SHORT = [row(seed, num_prompt=6, num_sampled=6) for seed in range(6)]
LONG = [row(seed, num_prompt=100, num_sampled=100) for seed in range(120)]  # seconds of backward


@dataclass(kw_only=True)
class Stage:
    backend: LocalBackend
    cluster: LocalCluster
    cells: TrainerCells
    tasks: asyncio.TaskGroup
    folder: Path
    told: Counter[str] = field(default_factory=Counter)

    def add(self, made: TrainerPlan) -> TrainingGroup:
        def tell(kind: str, **fields: Any) -> None:
            self.told[kind] += 1

        return TrainingGroup(
            made,
            cells=self.cells,
            starter=self.backend,
            shelf=self.backend.shelf,
            tasks=self.tasks,
            clock=asyncio.get_running_loop().time,
            tell=tell,
        )

    def pid(self, name: str) -> int:
        pid = self.cluster.pid(f"groups:{name}")
        assert pid is not None, f"{name} does not run"
        return pid


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests: the fork server boots once."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path_factory.mktemp("logs"), preload=("megloom.compute.trainers.server",))
    runner.run(made.boot())
    yield made
    runner.run(made.close())


@asynccontextmanager
async def stage(cluster: LocalCluster, folder: Path, num_cells: int) -> AsyncIterator[Stage]:
    config = SessionConfig.parse({"workload": "a:b", "run": "groups", "steps": 1})
    backend = LocalBackend(config=config, home=folder, cluster=cluster)
    cells = TrainerCells(
        [TrainerCell(name=f"trainers/{number}") for number in range(num_cells)],
        clock=asyncio.get_running_loop().time,
        rules=Rules(settle_s=0.0, turn_s=0.0, payback=0.0),
    )
    try:
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            yield Stage(backend=backend, cluster=cluster, cells=cells, tasks=tasks, folder=folder)
    finally:
        cells.close()
        await backend.close()
    assert cluster.names("groups:") == []


Play = Callable[[Callable[[Stage], Awaitable[Any]], int], Any]


@pytest.fixture
def play(runner: asyncio.Runner, cluster: LocalCluster, tmp_path: Path) -> Play:
    """Runs work on a stage with so many cells; returns what it returns."""

    def run(work: Callable[[Stage], Awaitable[Any]], num_cells: int) -> Any:
        async def main() -> Any:
            async with stage(cluster, tmp_path, num_cells) as made:
                return await work(made)

        return runner.run(main())

    return run


def plan_of(policy: str, **trainer: Any) -> TrainerPlan:
    return plan(policy=policy, trainer=TrainerKnobs(**trainer).model_dump())


async def loaded(stage: Stage, group: TrainingGroup) -> str:
    created = await group.create(str(stage.folder / group.policy))
    await group.load(weights_uri=created.uri, state_path=None)
    return created.uri


async def one_step(group: TrainingGroup, folder: Path, *, batches: list[MicroBatch]) -> str:
    """The digest of the version after one update of these micro-batches."""
    for taken in batches:
        await group.forward_backward(taken)
    await group.optim_step(scale=1e-3)
    published = await group.publish(weights_dir=str(folder / group.policy), version=1)
    await group.save(state_path=str(folder / f"{group.policy}.state"))
    return published.digest


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({}, id="torch"),
        pytest.param(
            {"backend": "deepspeed", "ranks": 2, "zero_stage": 1}, id="two ranks", marks=pytest.mark.slow
        ),
    ],
)
def test_sigkill_in_mid_backward_leaves_the_steps_update_unchanged(
    play: Play, tmp_path: Path, knobs: dict[str, Any]
) -> None:
    """For two ranks it is the second one that is killed: the first one goes with it."""
    if knobs:
        pytest.importorskip("deepspeed", reason="two ranks need the extra deepspeed")
    batches = [batch(SHORT, name="b0"), batch(LONG, name="b1")]
    last = f"@{knobs['ranks'] - 1}" if knobs else ""

    async def killed(stage: Stage) -> str:
        group = stage.add(plan_of("a", **knobs))
        uri = await loaded(stage, group)
        await group.forward_backward(batches[0])
        pids = [stage.pid(name) for name in {"trainer/a", f"trainer/a{last}"}]
        running = asyncio.create_task(group.forward_backward(batches[1]))
        await asyncio.sleep(0.1)  # real processes, real time: let the gradient begin
        os.kill(stage.pid(f"trainer/a{last}"), signal.SIGKILL)
        with pytest.raises(TrainerLost, match="policy=a"):
            await running
        assert group.life is GroupLife.DESTROYED and not any(is_alive(pid) for pid in pids)
        await group.load(weights_uri=uri, state_path=None)
        return await one_step(group, stage.folder / "killed", batches=batches)

    async def calm(stage: Stage) -> str:
        group = stage.add(plan_of("a", **knobs))
        await loaded(stage, group)
        return await one_step(group, stage.folder / "calm", batches=batches)

    assert play(killed, 1) == play(calm, 1)


def test_policies_that_share_a_cell_have_the_digests_of_those_that_do_not(play: Play) -> None:
    def train(num_cells: int) -> Any:
        async def work(stage: Stage) -> tuple[list[str], int]:
            groups = [stage.add(plan_of(policy)) for policy in "abc"]
            for group in groups:
                await loaded(stage, group)
            folder = stage.folder / str(num_cells)
            batches = [batch(SHORT[:3], name="b0"), batch(SHORT[3:], name="b1")]
            digests = await asyncio.gather(*(one_step(group, folder, batches=batches) for group in groups))
            return list(digests), stage.told["trainer_offloaded"]

        return play(work, num_cells)

    shared, num_offloads = train(1)
    apart, none = train(3)
    assert shared == apart and num_offloads >= 2 and none == 0


def test_sigkill_while_a_state_is_written_leaves_the_saved_one_and_frees_the_cell(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stage: Stage) -> None:
        one, other = stage.add(plan_of("a")), stage.add(plan_of("b"))
        for group in (one, other):
            await loaded(stage, group)
        await one_step(one, stage.folder, batches=[batch(SHORT, name="b0")])
        state = stage.folder / "a.state"
        kept = state.read_bytes()
        await one.forward_backward(batch(SHORT, name="b1"))
        draft = stage.backend.shelf.draft

        async def killing(policy: str) -> str:
            os.kill(stage.pid("trainer/a"), signal.SIGKILL)
            return await draft(policy)

        monkeypatch.setattr(stage.backend.shelf, "draft", killing)
        await other.forward_backward(batch(SHORT, name="b0"))
        monkeypatch.undo()
        assert state.read_bytes() == kept
        with pytest.raises(TrainerLost, match="policy=a save"):
            await one.optim_step(scale=1.0)
        await one.load(weights_uri=str(stage.folder / "a" / "v000001"), state_path=str(state))
        assert (await one.forward_backward(batch(SHORT, name="b1"))).num_rows == len(SHORT)

    play(work, 1)


def test_sigkill_of_a_satellite_loses_no_micro_batch(play: Play) -> None:
    async def work(stage: Stage) -> None:
        group = stage.add(plan_of("a", replicas=2))
        await loaded(stage, group)
        running: list[asyncio.Task[Any]] = []

        def submit(number: int) -> None:
            parts = [batch(LONG[:10], name=f"b{len(running) + position}") for position in range(number)]
            running.extend(asyncio.create_task(group.forward_backward(part)) for part in parts)

        async with asyncio.timeout(60):
            while not stage.told["satellite_joined"]:  # work for two, until there are two
                if sum(not task.done() for task in running) < 3:
                    submit(1)
                await asyncio.sleep(0.01)
        submit(6)
        await asyncio.wait(running[-6:-4])
        os.kill(stage.pid("trainer/a.1"), signal.SIGKILL)
        await asyncio.gather(*running)
        report = await group.optim_step(scale=1e-3)
        assert sorted(report.micro_batch_ids) == sorted(f"b{number}" for number in range(len(running)))
        assert report.num_trainable == len(running) * 10 * 100
        assert stage.told["satellite_lost"] == 1

    play(work, 2)
