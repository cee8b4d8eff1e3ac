"""A policy's training group: a core replica that comes and goes, and satellites that join its batches.

The core holds master weights and the only optimizer state. It starts with the first verb that needs it, keeps
its cell while it has work, and leaves between verbs when another policy waits: its full state, cached
gradients included, goes to the shelf and comes back in a new process, to the bit. Lanes see none of it: the
group implements `protocol.Trainer`. Several `forward_backward` may be under way; other verbs are for the core
alone. What only a process had is lost with it: the next verb is TrainerLost, until `load`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from megloom.compute.algorithms.table import parse_algorithm
from megloom.compute.trainers.cells import TrainerCells
from megloom.compute.trainers.core import Core, Saved
from megloom.compute.trainers.deadlines import VERB_TIMEOUT_S, Deadlines
from megloom.compute.trainers.lifecycle import GroupLife
from megloom.compute.trainers.protocol import (
    ForwardReport,
    GradientReport,
    GradientSums,
    MicroBatch,
    Published,
    Trainer,
    TrainerError,
    TrainerLost,
    TrainerPlan,
    UpdateReport,
)
from megloom.compute.trainers.satellites import ReplicaStarter, SatelliteLost, Satellites, Source, Tell
from megloom.compute.trainers.suspended import StateShelf
from megloom.compute.trainers.turns import CORE, Turns
from megloom.compute.workload import Publishing
from megloom.compute.workload import Trainer as TrainerKnobs

log = logging.getLogger(__name__)


class TrainingGroup:
    """Only the event loop's thread may use it.

    Raises: ValueError for satellites beside ZeRO 2 or 3, whose sums cannot be taken out in mid-batch.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        *,
        cells: TrainerCells,
        starter: ReplicaStarter,
        shelf: StateShelf,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float],
        tell: Tell,
        verb_timeout_s: float = VERB_TIMEOUT_S,
    ) -> None:
        self.policy = plan.policy
        self._plan, self._knobs = plan, TrainerKnobs.parse(plan.trainer)
        if self._is_sharded and self._knobs.replicas > 1:
            raise ValueError(
                f"policy {plan.policy}: replicas {self._knobs.replicas} need zero_stage 0 or 1, "
                f"got {self._knobs.zero_stage}"
            )
        self._cells, self._tasks, self._clock = cells, tasks, clock
        self._deadlines = deadlines = Deadlines(plan.policy, verb_timeout_s)
        self._turns = Turns()
        self._core = Core(
            plan,
            tenant=self,
            cells=cells,
            starter=starter,
            shelf=shelf,
            deadlines=deadlines,
            clock=clock,
            tell=tell,
        )
        self._satellites = Satellites(
            plan,
            limit=self._knobs.replicas - 1,
            tenant=self,
            cells=cells,
            turns=self._turns,
            starter=starter,
            shelf=shelf,
            deadlines=deadlines,
            tasks=tasks,
            clock=clock,
            tell=tell,
        )
        self._ids: set[str] = set()  # micro-batches in the accumulation, or on the way there
        self._is_published = False  # the source's weights are those that the core holds
        self._join_from: Source | None = None  # None: no satellite could compute as the core does
        self._is_closing = False  # satellites hand in, the core leaves or loads: nobody joins
        self._doing: tuple[str, float] = "nothing yet", clock()
        self._idle_since_s = clock()

    async def create(self, weights_dir: str) -> Published:
        """A process of its own makes version 0 and ends: what it took to make it is gone with it."""
        async with self._turn("create"):
            try:
                trainer = await self._core.start()
                async with self._deadlines.of("create"):
                    return await trainer.create(weights_dir)
            finally:
                await self._core.end()

    async def load(
        self, *, weights_uri: str, state_path: str | None, reference_uri: str | None = None
    ) -> None:
        """What the next verb goes on from. A process that is there loads it at once, else the next one."""
        async with self._turn("load", closes=True):
            await self._satellites.drop()
            source = Source(weights_uri=weights_uri, state_path=None, reference_uri=reference_uri)
            await self._core.go_on_from(source, Saved(path=state_path))
            self._ids.clear()
            self._is_published, self._join_from = True, self._boundary(state_path)
            if self._core.trainer is not None:
                await self._core.load()

    async def forward(self, batch: MicroBatch, wants: Sequence[str]) -> ForwardReport:
        verb = f"forward {batch.micro_batch_id}"
        report: ForwardReport = await self._anywhere(
            verb, None, lambda trainer: trainer.forward(batch, wants)
        )
        return report

    async def forward_backward(self, batch: MicroBatch) -> GradientReport:
        """Adds the gradient on whichever replica is free first; returns when it is taken."""
        name = batch.micro_batch_id
        verb = f"forward_backward {name}"
        if name in self._ids:
            raise TrainerError(f"policy={self.policy} {verb}: its gradient is in the accumulation already")
        self._ids.add(name)
        try:
            report: GradientReport = await self._anywhere(
                verb, batch, lambda trainer: trainer.forward_backward(batch)
            )
        except BaseException:
            self._ids.discard(name)
            raise
        return report

    async def export_gradients(self, *, path: str) -> GradientSums:
        async with self._verb("export_gradients", closes=True) as trainer:
            await self._core.changed()
            sums = await trainer.export_gradients(path=path)
            self._ids.clear()
            return sums

    async def add_gradients(self, *, path: str) -> None:
        async with self._verb("add_gradients") as trainer:
            await self._core.changed()
            await trainer.add_gradients(path=path)

    async def optim_step(self, *, scale: float, warm: bool = False) -> UpdateReport:
        """Closes the join window: satellites hand in and rest, then the core steps."""
        async with self._verb("optim_step", closes=True) as trainer:
            await self._core.changed()
            self._is_published, self._join_from = False, None
            try:
                return await trainer.optim_step(scale=scale, warm=warm)
            finally:
                self._ids.clear()

    async def publish(self, *, weights_dir: str, version: int) -> Published:
        async with self._verb(f"publish {version}") as trainer:
            published = await trainer.publish(weights_dir=weights_dir, version=version)
            await self._core.changed()
            assert self._core.source is not None
            self._core.source = replace(self._core.source, weights_uri=published.uri)
            self._is_published = True
            self._join_from = None if self._needs_state else self._boundary(None)
            return published

    async def save(self, *, state_path: str) -> str | None:
        async with self._verb("save", closes=True) as trainer:
            digest = await trainer.save(state_path=state_path)
            await self._core.changed()
            self._core.saved = Saved(path=state_path)
            if self._is_published and not self._ids:
                self._join_from = self._boundary(state_path)
        if self.life is GroupLife.COMPUTE and not self._ids:  # the step is complete: on to the next
            self._satellites.wake(self._join_from)
        return digest

    async def close(self) -> None:
        """Ends every process of the group, whatever it holds, and what it left on the shelf."""
        await self._satellites.drop()
        await self._core.end()
        await self._core.changed()

    @property
    def num_replicas(self) -> int:
        """The most that may compute at once; so many `forward_backward` are worth having under way."""
        return self._knobs.replicas

    @property
    def life(self) -> GroupLife:
        return self._core.life

    @property
    def switch_s(self) -> float:
        """What it takes to come back."""
        return self._core.switch_s

    def idle_since_s(self, cell: str) -> float | None:
        """Since when no verb runs or waits, or the satellite on the cell rests; None while it does not."""
        if cell != self._core.cell:
            return self._satellites.resting_since_s(cell)
        return self._idle_since_s if self._turns.is_quiet else None

    @property
    def can_leave(self) -> bool:
        """False in mid-batch at ZeRO 2 and 3, and after a state that could not be written."""
        in_mid_batch = self._is_sharded and bool(self._ids)
        return self.life is GroupLife.COMPUTE and not self._core.is_stuck and not in_mid_batch

    def leave(self, cell: str) -> None:
        """Gives the cell back after the verb in work; the cells call this."""
        self._begin(self._leave(cell), name=f"leave:{self._core.name}")

    def show_to(self, show: Callable[[str, float], None]) -> None:
        """`show(activity, started_s)` is told of "bind", "load" and "offload" when they end."""
        self._core.show = show

    def describe(self) -> str:
        """Life cycle and verb, in words."""
        verb, since_s = self._doing
        stuck = ", its state could not be written" if self._core.is_stuck else ""
        return f"{self.policy} ({self.life}, {verb} for {self._clock() - since_s:.1f} s{stuck})"

    def ended(self, name: str, cause: str) -> None:
        """A process of the group ended by itself; verbs under way notice it too."""
        if name == self._core.name:
            burial = self._bury(self._core.trainer, cause)
        else:
            burial = self._satellites.ended(int(name.rpartition(".")[2]), cause)
        self._begin(burial, name=f"ended:{name}")

    def _boundary(self, state_path: str | None) -> Source:
        assert self._core.source is not None
        return replace(self._core.source, state_path=state_path if self._needs_state else None)

    @property
    def _needs_state(self) -> bool:
        """True if published weights do not say all that a satellite needs."""
        return (
            Publishing.parse(self._plan.publishing).dtype != "float32"
            or self._knobs.lora is not None
            or bool(parse_algorithm(self._plan.algorithm).has_critic)
        )

    @property
    def _is_sharded(self) -> bool:
        return self._knobs.backend == "deepspeed" and self._knobs.zero_stage >= 2

    @asynccontextmanager
    async def _turn(
        self, verb: str, *, closes: bool = False, is_claimed: bool = False
    ) -> AsyncIterator[None]:
        """The core's turn. A core that is lost within, or left in the middle of a verb, is ended.

        Nobody joins while one lasts that `closes` the join window.
        """
        if not is_claimed:
            await self._turns.claim(CORE)
        self._is_closing = closes
        self._doing = verb, self._clock()
        try:
            yield
        except TrainerLost as error:
            await self._lose(str(error))
            raise
        except asyncio.CancelledError:
            await self._lose(f"policy={self.policy} {verb}: cancelled")
            raise
        finally:
            self._is_closing = False
            self._turns.release(CORE)
            self._settle()

    @asynccontextmanager
    async def _verb(
        self, verb: str, *, closes: bool = False, is_claimed: bool = False
    ) -> AsyncIterator[Trainer]:
        """The loaded core, for one verb; if it `closes` the join window, with what its satellites held."""
        async with self._turn(verb, closes=closes, is_claimed=is_claimed):
            trainer = await self._core.ready()
            if closes:
                await self._satellites.hand_in(trainer)
            for _ in range(self._turns.num_waiting):  # what came while the core was not there
                self._let_join()
            async with self._deadlines.of(verb):
                yield trainer
            self._core.is_stuck = False

    def _let_join(self) -> None:
        """Lets a satellite join beside a core that computes. One beside a core that is not there, or comes
        or goes, would change what the core's suspended state alone holds.
        """
        if self.life is GroupLife.COMPUTE and not self._is_closing:
            self._satellites.consider(self._join_from)

    async def _anywhere(
        self, verb: str, batch: MicroBatch | None, work: Callable[[Trainer], Awaitable[Any]]
    ) -> Any:
        """What `work` returns on the first free replica; a lost satellite's work goes to another."""

        async def changing(trainer: Trainer) -> Any:
            if batch is not None:
                await self._core.changed()
            return await work(trainer)

        while True:
            self._let_join()
            slot = await self._turns.claim()
            if slot == CORE:
                async with self._verb(verb, is_claimed=True) as trainer:
                    return await changing(trainer)
            try:
                report = await self._satellites.take(slot, verb, batch, changing)
                return report if batch is None else replace(report, replica=slot)
            except SatelliteLost:
                if self._core.lost is not None:
                    raise TrainerLost(self._core.lost) from None
            finally:
                self._turns.release(slot)
                self._settle()

    async def _leave(self, cell: str) -> None:
        try:
            async with self._turn("leaving its cell", closes=True):
                trainer = self._core.trainer
                if trainer is None or (cell == self._core.cell and not self.can_leave):
                    self._cells.stay(cell, self)
                elif cell != self._core.cell:
                    await self._satellites.hand_in(trainer, cell=cell)
                else:
                    await self._satellites.hand_in(trainer, leaves=True)
                    await self._core.offload()
        except TrainerLost:
            return  # the next verb says so
        except TrainerError as error:  # it cannot take what a lost satellite held; the update will say so too
            log.warning("policy=%s cell=%s: not left: %s", self.policy, cell, error)
            self._cells.stay(cell, self)

    async def _bury(self, trainer: Trainer | None, cause: str) -> None:
        async with self._turn("ending"):
            if trainer is not None and trainer is self._core.trainer:
                await self._lose(f"policy={self.policy}: {cause}")

    async def _lose(self, cause: str) -> None:
        self._is_closing = True  # until the turn ends: nobody joins what is lost
        await self._satellites.drop()
        await self._core.lose(cause)
        if self._core.lost is not None:
            self._ids.clear()

    def _begin(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        try:
            self._tasks.create_task(work, name=name)
        except RuntimeError:  # the task group is ending, and with its session every process
            work.close()

    def _settle(self) -> None:
        if self._turns.is_quiet:
            self._idle_since_s = self._clock()
            self._doing = "idle", self._idle_since_s
        self._cells.look()
