"""Keeps a session's cells alive: restarts engines, workers and gateways that died or no longer answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict

from megloom.compute.cluster.protocol import ClusterError
from megloom.compute.conductor.backend import Backend
from megloom.compute.conductor.config import Cells
from megloom.compute.conductor.run import Run
from megloom.compute.engines.protocol import EngineError
from megloom.compute.gateway.protocol import GatewayLost
from megloom.compute.graph.seeds import content_hash
from megloom.compute.rollout.protocol import EpisodeEvents, WorkerLost, WorkloadError

log = logging.getLogger(__name__)
MAX_RESTARTS = 10  # of one cell in a session: more is a bug that a restart does not mend
BACKOFF_S = 0.5  # before the second restart of a cell, doubled for each later one, at most 30 s
ANSWER_TIMEOUT_S = 20.0  # for a worker whose episode ran past its deadline
GATEWAY_PREFIX, TRAINER_PREFIX = "gateway/", "trainer/"


class CellLost(Exception):
    """A cell died too often, or came back with other code."""


class Supervisor:
    """Trainers are not restarted here: their group is told, and its lane replays what that lost."""

    def __init__(
        self,
        *,
        run: Run,
        backend: Backend,
        worker_events: EpisodeEvents,
        tokenizers: Callable[[], dict[str, str]],
    ) -> None:
        self._run, self._backend = run, backend
        self._worker_events, self._tokenizers = worker_events, tokenizers
        self._restarts: dict[str, int] = {}
        self._policy_of: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        run.dispatcher.lost_engine = self.restart_engine

    async def start_engines(self, cells: Cells) -> None:
        """Starts every engine on the version that its policy serves."""
        for policy in self._run.plan.policies:
            for number in range(cells.engines_per_policy):
                cell = f"engine/{policy}/{number}"
                self._policy_of[cell] = policy
                self._run.dispatcher.add_engine(cell, policy=policy, capacity=cells.engine_slots)
        async with asyncio.TaskGroup() as tasks:
            for cell in self._policy_of:
                tasks.create_task(self._start_engine(cell), name=f"start:{cell}")

    async def start_gateways(self, names: Sequence[str]) -> None:
        """Starts every gateway with the policies' chat templates."""
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(self._start_gateway(name), name=f"start:{name}")

    async def watch(self) -> None:
        """Consumes exits of cells. Waits for the backend. Woken by each exit."""
        while True:
            exit_ = await self._backend.exits.get()
            self._run.events.add("cell_exit", cell=exit_.name, cause=exit_.cause[-300:])
            if exit_.incarnation != self._backend.incarnation(exit_.name):
                continue  # somebody has replaced it already
            if exit_.name in self._policy_of:
                await self.restart_engine(exit_.name, exit_.cause)
            elif exit_.name.startswith("worker/"):
                await self._restart_worker(exit_.name, exit_.cause)
            elif exit_.name.startswith(GATEWAY_PREFIX):
                await self._restart_gateway(exit_.name, exit_.cause)
            elif exit_.name.startswith(TRAINER_PREFIX):
                policy = exit_.name.removeprefix(TRAINER_PREFIX).partition(".")[0]
                self._run.groups[policy].ended(exit_.name, exit_.cause)

    async def check_suspects(self) -> None:
        """Consumes cells that let a deadline pass. Waits for the desk. Woken by each such episode."""
        while True:
            name = await self._run.desk.suspects.get()
            if name.startswith(GATEWAY_PREFIX):
                await self._restart_gateway(name, "did not close an episode in time")
                continue
            worker = self._run.desk.workers().get(name)
            if worker is None:
                continue
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await worker.describe()
            except TimeoutError:
                await self._restart_worker(name, f"did not answer within {ANSWER_TIMEOUT_S:g} s")
            except (WorkerLost, WorkloadError):
                continue  # its exit is reported apart

    async def restart_engine(self, cell: str, cause: str) -> None:
        """Fences an engine, ends it and starts it on the version to serve. Also the publisher's fence.

        Who asks while another restart of the cell is under way gets that one.
        """
        seen = self._backend.incarnation(cell)
        async with self._locks.setdefault(cell, asyncio.Lock()):
            if self._backend.incarnation(cell) != seen:
                return
            self._run.dispatcher.engine_down(cell, cause)
            while True:
                await self._back_off(cell, cause)
                await self._backend.stop(cell)
                try:
                    await self._start_engine(cell)
                    return
                except (EngineError, ClusterError) as error:
                    cause = str(error)

    async def _start_engine(self, cell: str) -> None:
        policy = self._policy_of[cell]
        while True:
            serving = self._run.publisher.serving[policy]
            engine = await self._backend.start_engine(
                cell, policy=policy, uri=serving.uri, version=serving.version
            )
            if serving == self._run.publisher.serving[policy]:
                await self._run.publisher.check(policy, cell, engine)
            if serving == self._run.publisher.serving[policy]:
                break
            await self._backend.stop(cell)  # a newer version was published while it started
        self._run.dispatcher.engine_up(cell, engine)

    async def _restart_worker(self, name: str, cause: str) -> None:
        """Ends a worker and starts it anew; who asks while that is under way gets that restart."""
        seen = self._backend.incarnation(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            if self._backend.incarnation(name) != seen:
                return
            self._run.desk.worker_down(name)
            while True:
                await self._back_off(name, cause)
                await self._backend.stop(name)
                try:
                    worker = await self._backend.start_worker(name, self._worker_events)
                    plan = await worker.describe()
                    await worker.tasks("train")
                    await worker.tasks("eval")
                    await worker.load_tokenizers(self._tokenizers())
                except (ClusterError, WorkerLost) as error:
                    cause = str(error)
                    continue
                if content_hash(asdict(plan)) != self._run.code_hash:
                    raise CellLost(f"{name}: the workload's code changed while the run was under way")
                self._run.desk.worker_up(name, worker)
                self._run.events.add("worker_up", cell=name)
                return

    async def _start_gateway(self, name: str) -> None:
        gateways = self._run.gateways
        assert gateways is not None
        gateway = await self._backend.start_gateway(name, gateways.desk)
        await gateway.load_chats(self._tokenizers())
        gateways.up(name, gateway)

    async def _restart_gateway(self, name: str, cause: str) -> None:
        """Ends a gateway and starts it anew; the attempts that it held are lost."""
        seen, gateways = self._backend.incarnation(name), self._run.gateways
        assert gateways is not None
        async with self._locks.setdefault(name, asyncio.Lock()):
            if self._backend.incarnation(name) != seen:
                return
            gateways.down(name, cause)
            while True:
                await self._back_off(name, cause)
                await self._backend.stop(name)
                try:
                    await self._start_gateway(name)
                    return
                except (ClusterError, GatewayLost) as error:
                    cause = str(error)

    async def _back_off(self, cell: str, cause: str) -> None:
        number = self._restarts[cell] = self._restarts.get(cell, 0) + 1
        if number > MAX_RESTARTS:
            raise CellLost(f"{cell} ended {number} times; last cause: {cause}")
        if number > 1:
            await asyncio.sleep(min(30.0, BACKOFF_S * 2 ** (number - 2)))
