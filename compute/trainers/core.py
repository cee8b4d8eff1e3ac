"""The core replica of a training group: its process, its cell, and what a new process would go on from.

It knows at every moment whether a file holds all that its process holds (`saved`). If so, ending the process
loses nothing; if not, the group is `lost` with it, until somebody says what to go on from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megloom.compute.cluster.protocol import ClusterError
from megloom.compute.state.errors import StateError
from megloom.compute.trainers.cells import Tenant, TrainerCells
from megloom.compute.trainers.deadlines import Deadlines
from megloom.compute.trainers.lifecycle import GroupLife, checked_move
from megloom.compute.trainers.protocol import Trainer, TrainerError, TrainerLost, TrainerPlan
from megloom.compute.trainers.satellites import ReplicaStarter, Source, Tell
from megloom.compute.trainers.suspended import StateShelf


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A state that equals what the core holds: a file of the run, or a handle of the shelf.

    Neither of both: the weights are all there is.
    """

    path: str | None = None
    handle: str | None = None


class Core:
    """Whoever calls holds the core's turn. `show(activity, started_s)` is told what took time."""

    def __init__(
        self,
        plan: TrainerPlan,
        *,
        tenant: Tenant,
        cells: TrainerCells,
        starter: ReplicaStarter,
        shelf: StateShelf,
        deadlines: Deadlines,
        clock: Callable[[], float],
        tell: Tell,
    ) -> None:
        self._plan, self._tenant, self._cells = plan, tenant, cells
        self._starter, self._shelf, self._deadlines = starter, shelf, deadlines
        self._clock, self._tell = clock, tell
        self.show: Callable[[str, float], None] = lambda activity, started_s: None
        self.name = f"trainer/{plan.policy}"
        self.life = GroupLife.INACTIVE
        self.trainer: Trainer | None = None
        self.cell: str | None = None
        self.source: Source | None = None  # the state comes from `saved`
        self.saved: Saved | None = None  # None: only the process knows
        self.lost: str | None = None
        self.is_stuck = False  # its state could not be written
        self.switch_s = 0.0

    async def ready(self) -> Trainer:
        """The loaded trainer, in a new process if there is none.

        Raises: TrainerLost if what it held is lost, TrainerError if there is nothing to load or to load into.
        """
        if self.lost is not None:
            raise TrainerLost(self.lost)
        if self.trainer is None:
            if self.source is None:
                raise TrainerError(f"policy={self._plan.policy}: no weights are loaded")
            await self.start()
            await self.load()
        assert self.trainer is not None
        return self.trainer

    async def start(self) -> Trainer:
        """A process on a cell, nothing loaded."""
        self._move(GroupLife.BIND)
        started_s = self._clock()
        try:
            self.cell = await self._cells.bind(self._tenant)
        except TimeoutError as error:
            await self.end()
            raise TrainerError(str(error)) from None
        self.show("bind", started_s)
        try:
            self.trainer = await self._starter.start_trainer(self.name, self._plan)
        except (ClusterError, TimeoutError) as error:
            raise TrainerLost(f"policy={self._plan.policy} start: {error}") from error
        self._tell("trainer_bound", policy=self._plan.policy, cell=self.cell)
        return self.trainer

    async def load(self) -> None:
        """Loads what it goes on from; a process that cannot is ended."""
        self._move(GroupLife.LOAD)
        started_s = self._clock()
        assert self.trainer is not None and self.source is not None and self.saved is not None
        try:
            path = self.saved.path if self.saved.handle is None else await self._fetch(self.saved.handle)
            async with self._deadlines.of("load"):
                await self.trainer.load(
                    weights_uri=self.source.weights_uri,
                    state_path=path,
                    reference_uri=self.source.reference_uri,
                )
        except TrainerError:
            await self.end()
            raise
        self._move(GroupLife.COMPUTE)
        self.switch_s = self._clock() - started_s
        self.show("load", started_s)

    async def offload(self) -> None:
        """Writes the full state and ends the process; if it cannot be written, all stays as it is."""
        assert self.trainer is not None and self.cell is not None
        self._move(GroupLife.OFFLOAD)
        started_s = self._clock()
        if self.saved is None and (cause := await self._suspend()) is not None:
            self._tell("trainer_stays", policy=self._plan.policy, cell=self.cell, cause=cause[:200])
            self.is_stuck = True
            self._move(GroupLife.COMPUTE)
            self._cells.stay(self.cell, self._tenant)
            return
        self._tell("trainer_offloaded", policy=self._plan.policy, cell=self.cell)
        await self.end()
        self.show("offload", started_s)

    async def lose(self, cause: str) -> None:
        """The process is gone, or must be."""
        if self.source is not None and self.saved is None:
            self.lost = cause
        await self.end()

    async def end(self) -> None:
        """Ends the process and gives the cell back; neither need be there."""
        cell, self.trainer, self.cell = self.cell, None, None
        self._move(GroupLife.DESTROYED)
        if cell is not None:
            try:
                await self._starter.stop(self.name)
            finally:
                self._cells.release(cell)

    async def go_on_from(self, source: Source, saved: Saved) -> None:
        """Whatever was there is forgotten."""
        await self.changed()
        self.source, self.saved, self.lost = source, saved, None

    async def changed(self) -> None:
        """From here on only the process knows."""
        saved, self.saved = self.saved, None  # first: while the old state goes, another may be saved
        if saved is not None and saved.handle is not None:
            await self._shelf.drop(saved.handle)

    async def _suspend(self) -> str | None:
        """Writes the full state to the fastest place that takes it; what the last one said if none does."""
        assert self.trainer is not None
        policy, cause = self._plan.policy, None
        while True:
            try:
                draft = await self._shelf.draft(policy)
            except (StateError, OSError) as error:
                return cause or str(error)
            is_kept = False
            try:
                async with self._deadlines.of("save"):
                    digest = await self.trainer.save(state_path=draft)
                self.saved = Saved(handle=await self._shelf.keep(policy, draft, digest))
                is_kept = True
                return None
            except TrainerLost:
                raise
            except (TrainerError, StateError, OSError) as error:  # such as a full disk
                cause = str(error)
                if not await self._shelf.pass_over(policy, draft):
                    return cause
            finally:
                if not is_kept:
                    await self._shelf.drop_draft(draft)

    async def _fetch(self, handle: str) -> str:
        try:
            return await self._shelf.fetch(handle)
        except (StateError, FileNotFoundError) as error:
            self.saved = None  # so that the group is lost with it
            raise TrainerLost(f"policy={self._plan.policy}: its suspended state: {error}") from error

    def _move(self, life: GroupLife) -> None:
        self.life = checked_move(self._plan.policy, self.life, life)
