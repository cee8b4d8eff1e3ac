"""The satellites of a training group: replicas that join a running batch and hand in what they took.

A satellite starts with the step's weights and nothing else (its full state only where weights do not say all,
see `Source`), takes whole micro-batches, and ends when the join window closes: its raw sums go to the core by
a file. Until then its micro-batches are kept, so that they can be taken again if it is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from megloom.compute.cluster.protocol import ClusterError
from megloom.compute.trainers.cells import Tenant, TrainerCells
from megloom.compute.trainers.protocol import MicroBatch, Trainer, TrainerError, TrainerLost, TrainerPlan
from megloom.compute.trainers.suspended import StateShelf
from megloom.compute.trainers.turns import Turns

MAX_LOSSES = 3  # of satellites of one group; then it works without them

Tell = Callable[..., None]


class ReplicaStarter(Protocol):
    """Starts trainer processes by name; one name runs once."""

    async def start_trainer(self, name: str, plan: TrainerPlan) -> Trainer:
        """Raises: ClusterError or TimeoutError if it does not come up."""
        ...

    async def stop(self, name: str) -> None:
        """Ends the process, all ranks of it; an unknown name is fine."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What a replica loads to compute as the core does at the step's beginning.

    `state_path` is None where the weights say it all: published as float32, without adapters or a critic.
    """

    weights_uri: str
    state_path: str | None
    reference_uri: str | None


class SatelliteLost(Exception):
    """The satellite is gone; its micro-batches will be taken again."""


@dataclass(kw_only=True, slots=True)
class _Satellite:
    name: str
    cell: str
    trainer: Trainer
    taken: list[MicroBatch] = field(default_factory=list)


class Satellites:
    """Owned by one group. Whoever calls `hand_in` holds the core's turn."""

    def __init__(
        self,
        plan: TrainerPlan,
        *,
        limit: int,
        tenant: Tenant,
        cells: TrainerCells,
        turns: Turns,
        starter: ReplicaStarter,
        shelf: StateShelf,
        tasks: asyncio.TaskGroup,
        tell: Tell,
    ) -> None:
        self._plan, self._limit, self._tenant = plan, limit, tenant
        self._cells, self._turns, self._starter, self._shelf = cells, turns, starter, shelf
        self._tasks, self._tell = tasks, tell
        self._here: dict[int, _Satellite] = {}
        self._joining: dict[int, tuple[asyncio.Task[None], str]] = {}  # with the cell
        self._ending: set[int] = set()  # their names are not free yet
        self._again: list[MicroBatch] = []
        self._num_losses = 0

    def consider(self, source: Source | None) -> None:
        """Lets one more join, if there is work for it and a cell that nobody wants. Returns at once."""
        if source is None or self._turns.has_free or self._num_losses >= MAX_LOSSES:
            return
        used = {*self._here, *self._joining, *self._ending}
        slot = next((number for number in range(1, self._limit + 1) if number not in used), None)
        if slot is None or (cell := self._cells.bind_spare(self._tenant)) is None:
            return
        name = f"trainer/{self._plan.policy}.{slot}"
        joining = self._join(slot, name, cell, source)
        try:
            self._joining[slot] = self._tasks.create_task(joining, name=f"join:{name}"), cell
        except RuntimeError:  # the task group is ending, and with its session every process
            joining.close()
            self._cells.release(cell)

    async def take(self, slot: int, batch: MicroBatch | None, work: Callable[[Trainer], Any]) -> Any:
        """What `work` returns on the satellite, which then holds the gradient of `batch`, if one is given.

        Raises: SatelliteLost, and what `work` raises otherwise.
        """
        satellite = self._here[slot]
        try:
            report = await work(satellite.trainer)
        except TrainerLost as error:
            await self._lose(slot, satellite, str(error))
            raise SatelliteLost from error
        if batch is not None:
            satellite.taken.append(batch)
        return report

    async def hand_in(self, core: Trainer, *, cell: str | None = None) -> None:
        """Adds the sums of all satellites (or of the one on `cell`) to the core's; they end.

        What a lost one held the core takes itself.
        """
        await self._stop_joining()
        for slot in sorted(self._here):
            if cell is None or self._here[slot].cell == cell:
                try:
                    await self._turns.claim(slot)
                except LookupError:
                    continue  # lost meanwhile
                await self._hand_in(slot, core)
        while self._again:
            await core.forward_backward(self._again[0])
            del self._again[0]

    async def drop(self) -> None:
        """Ends all of them, and forgets what they took."""
        await self._stop_joining()
        for slot in list(self._here):
            await self._end(slot)
        self._again.clear()

    async def ended(self, slot: int, cause: str) -> None:
        """A satellite's process ended by itself."""
        try:
            await self._turns.claim(slot)
        except LookupError:
            return  # its verb told us already
        await self._lose(slot, self._here[slot], cause)

    async def _join(self, slot: int, name: str, cell: str, source: Source) -> None:
        """Consumes nothing. Waits for a process and its weights. Woken by both; ends as a free replica."""
        joined = False
        try:
            trainer = await self._starter.start_trainer(name, self._plan)
            await trainer.load(
                weights_uri=source.weights_uri,
                state_path=source.state_path,
                reference_uri=source.reference_uri,
            )
            joined = True
        except (TrainerError, ClusterError, TimeoutError) as error:
            self._count_loss(name, str(error))
        finally:
            self._joining.pop(slot, None)
            if joined:
                self._here[slot] = _Satellite(name=name, cell=cell, trainer=trainer)
                self._tell("satellite_joined", policy=self._plan.policy, replica=name, cell=cell)
                self._turns.add(slot)
            else:
                await self._starter.stop(name)
                self._cells.release(cell)

    async def _stop_joining(self) -> None:
        """The join window closes: who has not joined yet does not."""
        joining = dict(self._joining)
        for task, _ in joining.values():
            task.cancel()
        if joining:
            await asyncio.wait([task for task, _ in joining.values()])
        for slot, (_, cell) in joining.items():
            if self._joining.pop(slot, None) is not None:  # cancelled before it ran at all
                self._cells.release(cell)

    async def _hand_in(self, slot: int, core: Trainer) -> None:
        satellite = self._here[slot]
        if satellite.taken:
            path = await self._shelf.draft(self._plan.policy)
            try:
                try:
                    await satellite.trainer.export_gradients(path=path)
                except TrainerLost as error:
                    await self._lose(slot, satellite, str(error))
                    return
                await core.add_gradients(path=path)
            finally:
                await self._shelf.drop_draft(path)
        await self._end(slot)

    async def _lose(self, slot: int, satellite: _Satellite, cause: str) -> None:
        if self._here.get(slot) is not satellite:
            return  # dropped while its verb ran
        self._count_loss(satellite.name, cause)
        self._again.extend(satellite.taken)
        await self._end(slot)

    async def _end(self, slot: int) -> None:
        satellite = self._here.pop(slot)
        self._ending.add(slot)
        self._turns.remove(slot)
        try:
            await self._starter.stop(satellite.name)
        finally:
            self._ending.discard(slot)
            self._cells.release(satellite.cell)

    def _count_loss(self, name: str, cause: str) -> None:
        self._num_losses += 1
        self._tell("satellite_lost", policy=self._plan.policy, replica=name, cause=cause[:200])
