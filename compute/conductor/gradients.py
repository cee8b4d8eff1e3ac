"""Gradients early, one update late: complete groups go to the trainer while other episodes still run.

One lane per trained policy. A lane survives the loss of its trainer: the new one loads the last committed
state and takes this step's micro-batches again, in their recorded order, so that nothing is counted twice.
A demonstration pass is many optimizer steps: whoever drives it begins it again (`revive`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megloom.compute.algorithms.base import PolicyGradient
from megloom.compute.conductor.columns import mean_advantage, with_columns
from megloom.compute.conductor.events import Clock, EventLog
from megloom.compute.conductor.samples import Sample
from megloom.compute.graph.records import CellIntervalRecord, MicroBatchRecord
from megloom.compute.graph.states import SampleState, checked_move
from megloom.compute.trainers.protocol import (
    GradientReport,
    MicroBatch,
    Published,
    Trainer,
    TrainerLost,
    UpdateReport,
)

log = logging.getLogger(__name__)
MAX_TRAINER_LOSSES = 3  # in one verb of one policy; a trainer that dies each time is a bug, not an accident


@dataclass(kw_only=True, slots=True)
class Taken:
    """One micro-batch, its samples, and what the trainer said of it. Only its lane writes."""

    batch: MicroBatch
    samples: list[Sample]
    position: int
    state: SampleState = SampleState.READY  # of all its samples
    report: GradientReport | None = None
    started_s: float = 0.0
    finished_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class LaneStep:
    """A policy's work in one step. Only its lane writes."""

    taken: list[Taken] = field(default_factory=list)
    waiting: list[list[Sample]] = field(default_factory=list)  # complete groups short of a micro-batch
    dropped: list[Sample] = field(default_factory=list)
    update: UpdateReport | None = None

    def trained(self) -> list[Sample]:
        return [sample for taken in self.taken for sample in taken.samples]

    def samples(self) -> list[Sample]:
        """Those that were sent, then those that were not."""
        return [*self.trained(), *self.dropped]


class GradientLane:
    """Turns one policy's complete groups into micro-batches and those into gradients, in order."""

    def __init__(
        self,
        *,
        run: str,
        policy: str,
        algorithm: PolicyGradient,
        trainer: Trainer,
        restart: Callable[[str], Awaitable[Trainer]],
        groups_per_batch: int,
        num_at_once: int = 1,
        hold: bool,
        record: Callable[[Any], None],
        clock: Clock,
        events: EventLog,
    ) -> None:
        self._run, self._policy, self._algorithm, self._restart = run, policy, algorithm, restart
        self.trainer = trainer
        self._groups_per_batch, self._num_at_once, self._hold = groups_per_batch, num_at_once, hold
        self._record, self._clock, self._events = record, clock, events
        self._step_number, self._base_version = 0, 0
        self._step = LaneStep()
        self._inbox: asyncio.Queue[Taken | None] = asyncio.Queue()  # bounded by the step's groups
        self.intervals: list[CellIntervalRecord] = []  # of the step in work

    def begin(self, step: int, base_version: int) -> LaneStep:
        """Begins a step's work."""
        self._step_number, self._base_version, self._step = step, base_version, LaneStep()
        self.intervals = []
        return self._step

    def open(self, step: int, base_version: int, tasks: asyncio.TaskGroup) -> None:
        """Begins a step; gradients are taken by a task of `tasks` until `close`."""
        self.begin(step, base_version)
        self._worker = tasks.create_task(self._take_gradients(), name=f"gradients:{self._policy}")

    def add_group(self, samples: list[Sample]) -> None:
        """Adds a complete group. A full micro-batch goes to the trainer at once, unless held (sync mode)."""
        self._step.dropped.extend(sample for sample in samples if sample.row is None)
        self._step.waiting.append([sample for sample in samples if sample.row is not None])
        if not self._hold and len(self._step.waiting) >= self._groups_per_batch:
            self._emit(self._step.waiting)
            self._step.waiting = []

    async def close(self) -> LaneStep:
        """Sends what is left and waits for the last gradient. The group statistics of the step are final."""
        for start in range(0, len(self._step.waiting), self._groups_per_batch):
            self._emit(self._step.waiting[start : start + self._groups_per_batch])
        self._inbox.put_nowait(None)
        await self._worker
        return self._step

    async def imitate(self, samples: list[Sample], *, warm: bool) -> None:
        """Takes one demonstration micro-batch and steps at once, in the warm start with its own optimizer."""
        taken = self._pack("imitation", samples)
        self._step.taken.append(taken)
        num_trainable = sum(sample.record.num_trainable for sample in samples)
        await self._take(taken)
        self._step.update = await self.trainer.optim_step(scale=1.0 / num_trainable, warm=warm)

    async def finish(self, *, denominator: int, version: int, weights_dir: str, state_path: str) -> Published:
        """The policy's one optimizer step (raw sums divided by the exact count), its weights and its state.

        A trainer lost anywhere in here is replayed from the last committed state: the same numbers again.
        """

        async def work() -> Published:
            started_s = self._clock()
            self._step.update = await self.trainer.optim_step(scale=1.0 / denominator)
            self.interval("update", started_s)
            return await self.publish(version=version, weights_dir=weights_dir, state_path=state_path)

        published: Published = await self._surviving(work)
        return published

    async def publish(self, *, version: int, weights_dir: str, state_path: str) -> Published:
        """Writes the trainer's weights as a version, and its full state beside."""
        started_s = self._clock()
        published = await self.trainer.publish(weights_dir=weights_dir, version=version)
        await self.trainer.save(state_path=state_path)
        self.interval("publish", started_s)
        return published

    def record_step(self) -> None:
        """Writes samples and micro-batches in their final states."""
        for taken in self._step.taken:
            assert taken.report is not None
            for sample in taken.samples:
                state = checked_move(sample.record.sample_id, taken.state, SampleState.APPLIED)
                self._record(
                    replace(sample.record, micro_batch_id=taken.batch.micro_batch_id, state=state.value)
                )
            self._record(
                MicroBatchRecord(
                    micro_batch_id=taken.batch.micro_batch_id,
                    run=self._run,
                    step=self._step_number,
                    policy=self._policy,
                    position=taken.position,
                    cell=self._cell_of(taken.report),
                    base_version=self._base_version,
                    sample_ids=[row.sample_id for row in taken.batch.rows],
                    num_tokens=taken.report.num_tokens,
                    num_trainable=taken.report.num_trainable,
                    loss_sum=taken.report.loss_sum,
                    started_s=taken.started_s,
                    finished_s=taken.finished_s,
                )
            )
        for sample in self._step.dropped:
            self._record(sample.record)

    @property
    def cell(self) -> str:
        return f"trainer/{self._policy}"

    def _emit(self, groups: list[list[Sample]]) -> None:
        samples = [sample for group in groups for sample in group]
        if samples:
            taken = self._pack("policy_gradient", samples)
            self._step.taken.append(taken)
            self._inbox.put_nowait(taken)

    def _pack(self, loss: str, samples: list[Sample]) -> Taken:
        position = len(self._step.taken)
        name = f"{self._policy}-s{self._step_number:06d}-b{position:04d}"
        rows = tuple(sample.row for sample in samples if sample.row is not None)
        return Taken(
            batch=MicroBatch(micro_batch_id=name, loss=loss, rows=rows), samples=samples, position=position
        )

    async def _take_gradients(self) -> None:
        """Consumes micro-batches. Waits for complete groups. Woken by `add_group`; ends at `close`."""
        async with asyncio.TaskGroup() as tasks:
            running: dict[asyncio.Task[TrainerLost | None], Taken] = {}
            arriving: asyncio.Task[Taken | None] | None = tasks.create_task(self._inbox.get())
            while arriving is not None or running:
                has_room = len(running) < self._num_at_once
                watched: set[asyncio.Task[Any]] = {*running, *([arriving] if arriving and has_room else [])}
                done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if arriving is not None and arriving in done:
                    taken = arriving.result()
                    arriving = None if taken is None else tasks.create_task(self._inbox.get())
                    if taken is not None:
                        running[tasks.create_task(self._loss_of(taken))] = taken
                lost = next((loss for task in running if task in done and (loss := task.result())), None)
                if lost is None:
                    running = {task: taken for task, taken in running.items() if task not in done}
                else:  # what is under way is lost too
                    await asyncio.wait(running)
                    again = [taken for task, taken in running.items() if task.result() is not None]
                    running = {}
                    await self._surviving(lambda again=again: self._take_each(again), lost=lost)  # type: ignore[misc]

    async def _loss_of(self, taken: Taken) -> TrainerLost | None:
        """Takes the gradient; the loss if the trainer was lost."""
        try:
            await self._take(taken)
        except TrainerLost as error:
            log.info("policy=%s micro_batch=%s: %s", self._policy, taken.batch.micro_batch_id, error)
            return error
        return None

    async def _take_each(self, batches: list[Taken]) -> None:
        for taken in batches:
            if taken.state is SampleState.READY:
                await self._take(taken)

    async def _take(self, taken: Taken) -> None:
        await self._fill_columns(taken)
        taken.started_s = self._clock()
        taken.report = await self.trainer.forward_backward(taken.batch)
        name = taken.batch.micro_batch_id
        taken.state = checked_move(name, SampleState.READY, SampleState.GRADIENT_TAKEN)
        taken.finished_s = self._clock()
        # A verb may have waited for a cell, or for its turn: that is not the gradient's time.
        taken.started_s = max(taken.started_s, taken.finished_s - taken.report.seconds)
        self._events.add("gradient", micro_batch=taken.batch.micro_batch_id, rows=len(taken.batch.rows))
        self.interval("gradient", taken.started_s, cell=self._cell_of(taken.report))

    async def _fill_columns(self, taken: Taken) -> None:
        """Asks the trainer for what the loss needs of every token. A replay keeps the numbers that it has."""
        wants = self._algorithm.wants if taken.batch.loss == "policy_gradient" else ()
        if not wants or all(name in row.columns for row in taken.batch.rows for name in wants):
            return
        started_s = self._clock()
        report = await self.trainer.forward(taken.batch, wants)
        self.interval("forward", started_s)
        rows = with_columns(taken.batch.rows, report, wants, self._algorithm)
        taken.batch = replace(taken.batch, rows=rows)
        if self._algorithm.has_critic:
            taken.samples = [
                replace(sample, record=replace(sample.record, advantage=mean_advantage(row)), row=row)
                for sample, row in zip(taken.samples, rows, strict=True)
            ]

    async def revive(self, error: TrainerLost) -> None:
        """Brings a lost trainer back on its last committed state."""
        self._events.add("trainer_lost", policy=self._policy, cause=str(error)[:200])
        self.trainer = await self._restart(self._policy)

    async def _surviving(self, work: Callable[[], Awaitable[Any]], *, lost: TrainerLost | None = None) -> Any:
        """Runs `work`; if the trainer is lost, or was (`lost`), first brings one back and replays the step.

        A replay may lose its trainer too: what it had not taken again is taken by the next one.
        """
        behind: dict[int, Taken] = {}  # by position: what was taken once, and a loss undid
        for _ in range(MAX_TRAINER_LOSSES):
            try:
                if lost is not None:
                    await self.revive(lost)
                    for taken in self._step.taken:
                        if taken.state is SampleState.GRADIENT_TAKEN:
                            name = taken.batch.micro_batch_id
                            taken.state = checked_move(name, taken.state, SampleState.READY)
                            behind[taken.position] = taken
                    await self._take_each([behind[position] for position in sorted(behind)])
                return await work()
            except TrainerLost as error:
                lost = error
        raise TrainerLost(f"trainer of {self._policy} was lost {MAX_TRAINER_LOSSES} times in a row: {lost}")

    def _cell_of(self, report: GradientReport) -> str:
        return self.cell if report.replica == 0 else f"{self.cell}.{report.replica}"

    def interval(self, activity: str, started_s: float, *, cell: str | None = None) -> None:
        """Adds what one of the policy's trainers did until now."""
        self.intervals.append(
            CellIntervalRecord(
                run=self._run,
                step=self._step_number,
                cell=cell or self.cell,
                role="train",
                policy=self._policy,
                activity=activity,
                start_s=started_s,
                end_s=self._clock(),
            )
        )
