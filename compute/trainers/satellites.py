"""The satellites of a training group: replicas that join a running batch and hand in what they took.

A satellite starts with the step's weights and nothing else (its full state only where weights do not say all,
see `Source`) and takes whole micro-batches, until the join window closes: its raw sums go to the core by a
file. Until then its micro-batches are kept, so that they can be taken again if it is lost. Then it rests with
its process and its cell, and joins the next batch with new weights, unless somebody wants the cell.

    joining ──▶ here ──hand_in──▶ resting ──▶ joining …        (from anywhere: ending)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from megloom.compute.cluster.protocol import ClusterError
from megloom.compute.state.errors import StateError
from megloom.compute.trainers.cells import Tenant, TrainerCells
from megloom.compute.trainers.deadlines import Deadlines
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
    """`source` is what it has loaded, `taken` what its sums hold: nothing while it rests."""

    cell: str
    trainer: Trainer
    source: Source
    taken: list[MicroBatch] = field(default_factory=list)
    resting_since_s: float | None = None


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
        deadlines: Deadlines,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float],
        tell: Tell,
    ) -> None:
        self._plan, self._limit, self._tenant, self._clock = plan, limit, tenant, clock
        self._cells, self._turns, self._starter, self._shelf = cells, turns, starter, shelf
        self._deadlines, self._tasks, self._tell = deadlines, tasks, tell
        self._here: dict[int, _Satellite] = {}
        self._resting: dict[int, _Satellite] = {}
        self._joining: dict[int, tuple[asyncio.Task[None], str]] = {}  # with the cell
        self._ending: set[int] = set()  # their names are not free yet
        self._again: list[MicroBatch] = []
        self._num_losses = 0

    def consider(self, source: Source | None) -> None:
        """Lets one more join, if there is work for it, one that rests or a cell that nobody wants. Returns at
        once.
        """
        if source is None or self._turns.has_free or self._num_losses >= MAX_LOSSES:
            return
        if self._resting:
            self._wake(min(self._resting), source)
            return
        used = {*self._here, *self._joining, *self._ending}
        slot = next((number for number in range(1, self._limit + 1) if number not in used), None)
        if slot is None or (cell := self._cells.bind_spare(self._tenant)) is None:
            return
        self._begin(slot, cell, source, None)

    def wake(self, source: Source | None) -> None:
        """Lets all that rest load what the next batch needs, before it is there. Returns at once."""
        if source is not None:
            for slot in sorted(self._resting):
                self._wake(slot, source)

    def resting_since_s(self, cell: str) -> float | None:
        """Since when a satellite rests on the cell; None if none does."""
        since = [one.resting_since_s for one in self._resting.values() if one.cell == cell]
        return since[0] if since else None

    async def take(
        self, slot: int, verb: str, batch: MicroBatch | None, work: Callable[[Trainer], Any]
    ) -> Any:
        """What `work` returns on the satellite, which then holds the gradient of `batch`, if one is given.

        Raises: SatelliteLost, also for one that is late; and what `work` raises otherwise.
        """
        satellite = self._here.get(slot)
        if satellite is None:
            raise SatelliteLost(f"replica {slot} ended before its turn")
        try:
            async with self._deadlines.of(verb):
                report = await work(satellite.trainer)
        except TrainerLost as error:
            await self._lose(slot, satellite, str(error))
            raise SatelliteLost from error
        except asyncio.CancelledError:
            await self._lose(slot, satellite, f"{verb}: cancelled")  # nobody knows what it holds
            raise
        if batch is not None:
            satellite.taken.append(batch)
        return report

    async def hand_in(self, core: Trainer, *, cell: str | None = None, leaves: bool = False) -> None:
        """Adds the sums of all satellites (or of the one on `cell`) to the core's. Then they rest, or give
        their cells back if somebody wants the one, or the group `leaves`.

        What a lost one held the core takes itself.
        Raises: TrainerLost for the core; TrainerError if it cannot take what was lost.
        """
        await self._stop_joining()
        for slot in sorted(self._here):
            satellite = self._here.get(slot)
            if satellite is None or cell not in (None, satellite.cell):
                continue
            try:
                await self._turns.claim(slot)
            except LookupError:
                continue  # lost meanwhile
            await self._hand_in(slot, satellite, core)
        if leaves or cell is not None:
            await self._end_resting(cell)
        while self._again:
            async with self._deadlines.of(f"forward_backward {self._again[0].micro_batch_id}"):
                await core.forward_backward(self._again[0])
            del self._again[0]

    async def drop(self) -> None:
        """Ends all of them, and forgets what they took."""
        await self._stop_joining()
        for slot, satellite in list(self._here.items()):
            await self._end(slot, satellite)
        await self._end_resting()
        self._again.clear()

    async def ended(self, slot: int, cause: str) -> None:
        """A satellite's process ended by itself."""
        if (resting := self._resting.get(slot)) is not None:
            self._count_loss(self._name(slot), cause)
            await self._end(slot, resting)
            return
        satellite = self._here.get(slot)
        try:
            await self._turns.claim(slot)
        except LookupError:
            return  # its verb told us already
        if satellite is not None:
            await self._lose(slot, satellite, cause)

    def _wake(self, slot: int, source: Source) -> None:
        satellite = self._resting.pop(slot)
        self._begin(slot, satellite.cell, source, satellite)

    def _name(self, slot: int) -> str:
        return f"trainer/{self._plan.policy}.{slot}"

    def _begin(self, slot: int, cell: str, source: Source, rested: _Satellite | None) -> None:
        joining = self._join(slot, cell, source, rested)
        try:
            self._joining[slot] = self._tasks.create_task(joining, name=f"join:{self._name(slot)}"), cell
        except RuntimeError:  # the task group is ending, and with its session every process
            joining.close()
            self._cells.release(cell)

    async def _join(self, slot: int, cell: str, source: Source, rested: _Satellite | None) -> None:
        """Consumes nothing. Waits for a process and its weights. Woken by both; ends as a free replica."""
        name, joined = self._name(slot), False
        try:
            trainer = rested.trainer if rested else await self._starter.start_trainer(name, self._plan)
            if rested is None or rested.source != source:
                async with self._deadlines.of("load"):
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
                self._here[slot] = _Satellite(cell=cell, trainer=trainer, source=source)
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
                await self._starter.stop(self._name(slot))
                self._cells.release(cell)

    async def _end_resting(self, cell: str | None = None) -> None:
        for slot, satellite in list(self._resting.items()):
            if cell in (None, satellite.cell):
                await self._end(slot, satellite)

    async def _hand_in(self, slot: int, satellite: _Satellite, core: Trainer) -> None:
        if satellite.taken:
            try:
                path = await self._exported(satellite)
            except (TrainerError, StateError, OSError) as error:  # it died, or there is no room for its sums
                await self._lose(slot, satellite, str(error))
                return
            try:
                async with self._deadlines.of("add_gradients"):
                    await core.add_gradients(path=path)
            except TrainerLost:
                raise
            except TrainerError as error:
                await self._lose(slot, satellite, str(error))
                return
            finally:
                await self._shelf.drop_draft(path)
        if self._here.get(slot) is satellite:
            del self._here[slot]
            self._turns.remove(slot)
            satellite.taken, satellite.resting_since_s = [], self._clock()
            self._resting[slot] = satellite

    async def _exported(self, satellite: _Satellite) -> str:
        """A file with its sums."""
        path = await self._shelf.draft(self._plan.policy)
        try:
            async with self._deadlines.of("export_gradients"):
                await satellite.trainer.export_gradients(path=path)
        except BaseException as error:
            if isinstance(error, TrainerError) and not isinstance(error, TrainerLost):
                await self._shelf.pass_over(self._plan.policy, path)
            await self._shelf.drop_draft(path)
            raise
        return path

    async def _lose(self, slot: int, satellite: _Satellite, cause: str) -> None:
        if self._here.get(slot) is not satellite:
            return  # dropped while its verb ran
        self._count_loss(self._name(slot), cause)
        self._again.extend(satellite.taken)
        await self._end(slot, satellite)

    async def _end(self, slot: int, satellite: _Satellite) -> None:
        if self._here.get(slot) is not satellite and self._resting.get(slot) is not satellite:
            return  # another of its failures has ended it
        self._here.pop(slot, None)
        self._resting.pop(slot, None)
        self._ending.add(slot)
        self._turns.remove(slot)
        try:
            await self._starter.stop(self._name(slot))
        finally:
            self._ending.discard(slot)
            self._cells.release(satellite.cell)

    def _count_loss(self, name: str, cause: str) -> None:
        self._num_losses += 1
        self._tell("satellite_lost", policy=self._plan.policy, replica=name, cause=cause[:200])
