"""The modelled `Backend`: the cells of a session in virtual time, and the faults that befall them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megloom.compute.cluster.protocol import ClusterError
from megloom.compute.conductor.backend import CellExit
from megloom.compute.engines.protocol import EngineUnavailable, GenerateRequest
from megloom.compute.gateway.protocol import CallDesk, Placement
from megloom.compute.graph.records import TaskRecord
from megloom.compute.graph.seeds import derive_seed
from megloom.compute.rollout.chat import Chat
from megloom.compute.rollout.dataset import DatasetTask
from megloom.compute.rollout.protocol import CallAnswer, CallOpened, CallPrompt, EpisodeEvents, FieldReady
from megloom.compute.rollout.worker import WorkloadHost
from megloom.compute.simulation.cells import Costs, ModelledEngine
from megloom.compute.simulation.gateway import ModelledGateway, Switchboard
from megloom.compute.simulation.trainers import Fuse, MemoryFiles, ModelledTrainer
from megloom.compute.trainers.protocol import TrainerPlan
from megloom.compute.trainers.suspended import StateShelf
from megloom.compute.workload import Prompt, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """`engine_deaths` kills cells at times; a call hangs with probability `hang_probability`, by its id.

    `trainer_deaths` names the verb, counted over all processes of that name, in which one is lost once;
    `trainer_kills` are times at which the process of that name is killed, if there is one;
    `trainer_no_starts` are those starts of that name, counted from 1, that fail.
    """

    engine_deaths: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    gateway_deaths: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    trainer_deaths: Mapping[str, int] = field(default_factory=dict)
    trainer_kills: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    trainer_no_starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    hang_probability: float = 0.0
    seed: int = 0


class ByteChat(Chat):
    """A tokenizer without files: one id per ASCII character."""

    def __init__(self) -> None:
        self.stop_ids = (0,)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        text = prompt if isinstance(prompt, str) else "".join(str(m["content"]) for m in prompt)
        return tuple(text.encode("ascii", "replace")) or (1,)

    def encode_answer(self, answer: str) -> tuple[int, ...]:
        return (*answer.encode("ascii", "replace"), 0)

    def decode(self, token_ids: object) -> str:
        return bytes(token_ids).decode("ascii")  # type: ignore[call-overload]


class Link:
    """A one-way connection: what is sent arrives in order, `latency_s` later."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._in_flight: deque[tuple[float, Callable[[Any], None], Any]] = deque()

    def send(self, deliver: Callable[[Any], None], message: Any) -> None:
        loop = asyncio.get_running_loop()
        arrival_s = loop.time() + self._latency_s
        self._in_flight.append((arrival_s, deliver, message))
        if len(self._in_flight) == 1:
            loop.call_at(arrival_s, self._arrive)

    def _arrive(self) -> None:
        loop = asyncio.get_running_loop()
        while self._in_flight and self._in_flight[0][0] <= loop.time():
            _, deliver, message = self._in_flight.popleft()
            deliver(message)
        if self._in_flight:
            loop.call_at(self._in_flight[0][0], self._arrive)


class DistantEvents:
    """A worker's announcements, on their way to the conductor."""

    def __init__(self, events: EpisodeEvents, link: Link) -> None:
        self._events, self._link = events, link

    def call_opened(self, call: CallOpened) -> None:
        self._link.send(self._events.call_opened, call)

    def call_prompt(self, prompt: CallPrompt) -> None:
        self._link.send(self._events.call_prompt, prompt)

    def field_ready(self, field: FieldReady) -> None:
        self._link.send(self._events.field_ready, field)


class ModelledWorker(WorkloadHost):
    """A workload worker in the same process: the user's workflow runs as it is, its messages take time."""

    def __init__(
        self, workload: Workload, *, num_tasks: int, events: EpisodeEvents, latency_s: float
    ) -> None:
        distant = DistantEvents(events, Link(latency_s))
        super().__init__(workload, name=f"{__name__}:simulated", data_dir=Path("unused"), events=distant)
        self._num_tasks = num_tasks
        self._answers = Link(latency_s)

    def answer(self, answer: CallAnswer) -> None:
        self._answers.send(super().answer, answer)

    async def tasks(self, split: str) -> list[TaskRecord]:
        records = []
        for position in range(self._num_tasks):
            name = f"{split}{position:06d}"
            self._tasks[split, name] = DatasetTask(task_id=name, prompt=name, ground_truth="", row={})
            records.append(
                TaskRecord(
                    task_id=name,
                    split=split,
                    position=position,
                    prompt=name,
                    ground_truth="",
                    data_source="simulation",
                    row="{}",
                )
            )
        return records

    async def load_tokenizers(self, directories: Mapping[str, str]) -> dict[str, list[int]]:
        self._chats = {policy: ByteChat() for policy in directories}
        return {policy: [0] for policy in directories}


class ModelledBackend:
    """Starts modelled cells. Deaths are timers of the virtual loop."""

    def __init__(
        self,
        workload: Workload,
        *,
        num_tasks: int,
        costs: Costs,
        faults: Faults,
        engine_slots: int,
        switchboard: Switchboard | None = None,
    ) -> None:
        self.exits: asyncio.Queue[CellExit] = asyncio.Queue()
        self._switchboard = switchboard or Switchboard()
        self._workload, self._num_tasks = workload, num_tasks
        self._costs, self._faults, self._slots = costs, faults, engine_slots
        self._engines: dict[str, ModelledEngine] = {}
        self._gateways: dict[str, ModelledGateway] = {}
        self._trainers: dict[str, ModelledTrainer] = {}
        self._fuses = {name: Fuse(verbs_left=verb) for name, verb in faults.trainer_deaths.items()}
        self.files = MemoryFiles()
        self.shelf: StateShelf = self.files
        self._num_tokens = 0
        self._lives: dict[str, int] = {}
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_at(time_s, self._kill, cell)
            for deaths in (faults.engine_deaths, faults.gateway_deaths, faults.trainer_kills)
            for cell, times in deaths.items()
            for time_s in times
        ]

    async def start_worker(self, name: str, events: EpisodeEvents) -> ModelledWorker:
        return ModelledWorker(
            self._workload, num_tasks=self._num_tasks, events=events, latency_s=self._costs.message_s
        )

    async def start_trainer(self, name: str, plan: TrainerPlan) -> ModelledTrainer:
        self._lives[name] = self._lives.get(name, 0) + 1
        await asyncio.sleep(self._costs.trainer_start_s)
        if self._lives[name] in self._faults.trainer_no_starts.get(name, ()):
            raise ClusterError(f"{name}: start {self._lives[name]} fails in the simulation")
        trainer = self._trainers[name] = self._make_trainer(name, plan)
        return trainer

    def _make_trainer(self, name: str, plan: TrainerPlan) -> ModelledTrainer:
        return ModelledTrainer(plan, self._costs, files=self.files, fuse=self._fuses.get(name))

    async def start_engine(self, name: str, *, policy: str, uri: str, version: int) -> ModelledEngine:
        self._lives[name] = self._lives.get(name, 0) + 1
        await asyncio.sleep(self._costs.start_s)
        engine = self._engines[name] = ModelledEngine(
            name, policy=policy, version=version, slots=self._slots, costs=self._costs, hangs=self._hangs
        )
        return engine

    async def start_gateway(self, name: str, desk: CallDesk) -> ModelledGateway:
        self._lives[name] = self._lives.get(name, 0) + 1
        await asyncio.sleep(self._costs.start_s)
        gateway = ModelledGateway(f"{name}.{self._lives[name]}", desk=desk, engine_at=self._engine_at)
        self._gateways[name] = gateway
        self._switchboard.add(gateway)
        return gateway

    def new_token(self) -> str:
        self._num_tokens += 1
        return f"token-{self._num_tokens}"

    def incarnation(self, name: str) -> int:
        return self._lives.get(name, 0)

    async def stop(self, name: str) -> None:
        if (cell := self._pop(name)) is not None:
            cell.die()

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _kill(self, cell: str) -> None:
        if (dying := self._pop(cell)) is not None:
            dying.die()
            cause = "killed by the simulation"
            self.exits.put_nowait(CellExit(name=cell, incarnation=self._lives[cell], cause=cause))

    def _pop(self, name: str) -> ModelledEngine | ModelledGateway | ModelledTrainer | None:
        for cells in (self._engines, self._gateways, self._trainers):
            if name in cells:
                return cells.pop(name)
        return None

    def _engine_at(self, placement: Placement) -> ModelledEngine:
        """The engine behind an address. Raises: EngineUnavailable if nothing listens there."""
        engine = self._engines.get(placement.url.removeprefix("sim://"))
        if engine is None:
            raise EngineUnavailable(f"{placement.url}: connection refused")
        return engine

    def _hangs(self, request: GenerateRequest) -> bool:
        dice = random.Random(derive_seed(self._faults.seed, "hang", request.rid))
        return dice.random() < self._faults.hang_probability
