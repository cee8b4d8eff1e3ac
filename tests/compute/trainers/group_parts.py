"""Training groups over replicas in this process, with the failures that a test asks for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megloom.compute.scheduling.trainer_cells import Rules, TrainerCell
from megloom.compute.simulation.clock import run_virtual
from megloom.compute.trainers.cells import TrainerCells
from megloom.compute.trainers.group import TrainingGroup
from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    GradientSums,
    MicroBatch,
    Published,
    TrainerLost,
    TrainerPlan,
    UpdateReport,
)
from megloom.compute.trainers.replica import Replica
from megloom.compute.trainers.suspended import FolderShelf

QUICK = Rules(settle_s=0.0, turn_s=0.0, payback=0.0)  # who waits gets the cell after the verb in work


@dataclass(kw_only=True)
class Starter:
    """Starts replicas as if they were processes. `before(name, verb)` runs first and may kill.

    `slow` are verbs, "start" and "stop" too, that take so many turns of the loop; `hangs` never answer.
    """

    before: Callable[[str, str], Any] = lambda name, verb: None
    slow: dict[tuple[str, str], int] = field(default_factory=dict)
    hangs: set[tuple[str, str]] = field(default_factory=set)
    running: dict[str, ReplicaProcess] = field(default_factory=dict)
    num_started: Counter[str] = field(default_factory=Counter)
    max_running: int = 0

    async def start_trainer(self, name: str, plan: TrainerPlan) -> ReplicaProcess:
        assert name not in self.running
        await self.spend(name, "start")
        self.running[name] = ReplicaProcess(self, name, plan)
        self.num_started[name] += 1
        self.max_running = max(self.max_running, len(self.running))
        return self.running[name]

    async def stop(self, name: str) -> None:
        await self.spend(name, "stop")
        if (process := self.running.pop(name, None)) is not None:
            process.is_dead = True

    async def spend(self, name: str, verb: str) -> None:
        """Others move while a process computes."""
        for _ in range(self.slow.get((name, verb), 1)):
            await asyncio.sleep(0)
        if (name, verb) in self.hangs:
            await asyncio.Event().wait()

    def kill(self, name: str) -> None:
        """What SIGKILL does: whoever calls it next, or waits for it now, finds it gone."""
        self.running[name].is_dead = True


class ReplicaProcess:
    """A replica that can die between any two verbs, and in the middle of one."""

    def __init__(self, starter: Starter, name: str, plan: TrainerPlan) -> None:
        self._starter, self._name, self._replica = starter, name, Replica(plan)
        self.is_dead = False

    async def create(self, weights_dir: str) -> Published:
        return await self._do("create", lambda: self._replica.create(weights_dir))

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        await self._do(
            "load",
            lambda: self._replica.load(
                weights_uri=weights_uri, state_path=state_path, reference_uri=reference_uri
            ),
        )

    async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
        return await self._do("forward", lambda: self._replica.forward(batch, wants))

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        return await self._do("forward_backward", lambda: self._replica.forward_backward(batch))

    async def export_gradients(self, *, path: str) -> GradientSums:
        return await self._do("export_gradients", lambda: self._replica.export_gradients(path=path))

    async def add_gradients(self, *, path: str) -> None:
        await self._do("add_gradients", lambda: self._replica.add_gradients(path=path))

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        return await self._do("optim_step", lambda: self._replica.optim_step(scale=scale, warm=warm))

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        return await self._do(
            "publish", lambda: self._replica.publish(weights_dir=weights_dir, version=version)
        )

    async def save(self, *, state_path: str) -> str | None:
        digest: str | None = await self._do("save", lambda: self._replica.save(state_path=state_path))
        return digest

    async def close(self) -> None:
        self.is_dead = True

    async def _do(self, verb: str, call: Callable[[], Any]) -> Any:
        self._alive(verb)
        await self._starter.spend(self._name, verb)
        self._starter.before(self._name, verb)
        self._alive(verb)
        result = call()
        await asyncio.sleep(0)
        self._alive(verb)
        return result

    def _alive(self, verb: str) -> None:
        if self.is_dead:
            raise TrainerLost(f"{self._name} {verb}: connection closed")


@dataclass(kw_only=True)
class Stage:
    """Cells, a starter and groups that share them."""

    folder: Path
    tasks: asyncio.TaskGroup
    cells: TrainerCells
    starter: Starter
    groups: dict[str, TrainingGroup] = field(default_factory=dict)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def add(self, plan: TrainerPlan, **options: Any) -> TrainingGroup:
        options.setdefault("shelf", FolderShelf(self.folder / "shelf"))
        group = TrainingGroup(
            plan,
            cells=self.cells,
            starter=self.starter,
            tasks=self.tasks,
            clock=asyncio.get_running_loop().time,
            tell=lambda kind, **fields: self.told.append((kind, fields)),
            **options,
        )
        self.groups[plan.policy] = group
        return group

    def kinds(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.told)

    def leftovers(self) -> list[str]:
        """Files on the shelf."""
        shelf = self.folder / "shelf"
        return sorted(path.name for path in shelf.iterdir()) if shelf.exists() else []


@asynccontextmanager
async def stage(
    folder: Path, *, num_cells: int, rules: Rules = QUICK, starter: Any = None, **options: Any
) -> AsyncIterator[Stage]:
    """A stage whose groups are closed at the end; nothing may be left then."""
    async with asyncio.TaskGroup() as tasks:
        clock = asyncio.get_running_loop().time
        names = [TrainerCell(name=f"trainers/{number}") for number in range(num_cells)]
        cells = TrainerCells(names, clock=clock, rules=rules, **options)
        made = Stage(folder=folder, tasks=tasks, cells=cells, starter=starter or Starter())
        yield made
        for group in made.groups.values():
            await group.close()
        cells.close()
    assert not made.starter.running and cells.describe() == "all are free" and made.leftovers() == []


def on_stage(folder: Path, work: Callable[[Stage], Awaitable[None]], **options: Any) -> None:
    """Runs `work` on a stage of its own loop, in virtual time: nobody waits for a deadline, none is met by a
    slow machine.
    """

    async def main() -> None:
        async with asyncio.timeout(100), stage(folder, **options) as made:
            await work(made)

    run_virtual(main())
