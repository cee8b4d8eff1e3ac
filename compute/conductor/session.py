"""One training session: brings its cells up, runs the step loop, takes everything down.

The same code runs on real processes and on modelled ones in virtual time: what differs are the `Surroundings`
and the clock of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from megloom.compute.conductor.backend import Backend
from megloom.compute.conductor.bring_up import BringUp, Surroundings
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.events import EventLog
from megloom.compute.conductor.keeping import UnknownVersion
from megloom.compute.conductor.reports import ENDED, SessionStatus, StepReport
from megloom.compute.conductor.rollback import RolledBack, roll_back
from megloom.compute.conductor.run import Run, RunPaths
from megloom.compute.conductor.snapshot import Snapshot, tasks_hash
from megloom.compute.conductor.step_loop import run_steps
from megloom.compute.conductor.version_services import VersionServices, serve_versions
from megloom.compute.store.step_store import StepStore

log = logging.getLogger(__name__)


class Session:
    """`run` is the whole life; the other methods are the service's view of it, on the same event loop."""

    def __init__(
        self,
        *,
        config: SessionConfig,
        backend: Backend,
        store: StepStore,
        paths: RunPaths,
        epoch: int,
        wall_time: Callable[[], str],
        write_events: Callable[[list[str]], None],
        discard_uncommitted: Callable[[str, int, Sequence[str]], None],
        discard_state: Callable[[str], None],
        versions: VersionServices | None = None,
    ) -> None:
        self.config, self.paths, self.reports = config, paths, list[StepReport]()
        self.state, self.failure = "starting", None  # type: str, str | None
        self._store, self._write_events, self._versions = store, write_events, versions
        self._rollbacks: list[tuple[str, int, asyncio.Future[RolledBack]]] = []  # asked for, not yet done
        self._events = EventLog(self._clock)
        self._around = Surroundings(
            config=config,
            backend=backend,
            store=store,
            paths=paths,
            clock=self._clock,
            wall_time=wall_time,
            events=self._events,
            epoch=epoch,
            discard_uncommitted=discard_uncommitted,
            discard_state=discard_state,
            keeper=versions.keeper if versions else None,
        )
        self._started_s = self._asked_s = 0.0  # when the session began, when a client last asked
        self._bring_up: BringUp | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Runs the session to its end. A failure is told by `state`, `failure`; only a cancel is raised."""
        self._started_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._bring_up = BringUp(self._around, tasks)
                run, supervisor = await self._bring_up.start()
                watching = [
                    tasks.create_task(supervisor.watch(), name="supervisor:watch"),
                    tasks.create_task(supervisor.check_suspects(), name="supervisor:suspects"),
                ]
                if self._versions is not None:
                    serve_versions(run, self._versions)
                await self._restore_reports()
                run.on_commit = self.reports.append
                self._set_state("running")
                await run_steps(run, between_steps=self._between_steps)
                for task in watching:
                    task.cancel()
            self._set_state("finished")
        except ExceptionGroup as group:  # the control plane failed: the session ends, with its cause
            self.failure = explain(group)
            log.exception("session run=%s failed", self.config.run)
            self._events.add("session_failed", cause=self.failure[:500])
            self._set_state("failed")
        except asyncio.CancelledError:
            self._set_state("cancelled")
            raise
        finally:
            try:
                self._write_events(self._events.take())
            except OSError:
                log.exception("events of run=%s not written", self.config.run)
            finally:
                await asyncio.shield(self._around.backend.close())
                for _, _, waiting in self._rollbacks:
                    if not waiting.done():
                        waiting.set_exception(ValueError(f"run {self.config.run} {self.state}: ask again"))
                self._notify()

    def renew_lease(self) -> None:
        """A client is there; a session that paused for the lack of one goes on."""
        self._asked_s = self._clock()
        if self.state == "paused":
            self._set_state("running")

    async def roll_back(self, policy: str, version: int) -> RolledBack:
        """Rolls a policy back as soon as the step in work is committed.

        Raises: ValueError, UnknownVersion if it cannot be, the session goes on then; PublishAborted.
        """
        waiting: asyncio.Future[RolledBack] = asyncio.get_running_loop().create_future()
        self._rollbacks.append((policy, version, waiting))
        self._notify()
        return await waiting

    async def wait_for_change(self, *, after: int, timeout_s: float) -> None:
        """Returns when a step later than `after` is there, the state changes, or `timeout_s` has passed."""
        state = self.state
        try:
            async with asyncio.timeout(timeout_s):
                while not self.steps_after(after) and self.state == state and state not in ENDED:
                    await self._changed.wait()
        except TimeoutError:
            return

    def steps_after(self, step: int) -> list[StepReport]:
        return [report for report in self.reports if report.step > step]

    def status(self) -> SessionStatus:
        run = self._bring_up.run if self._bring_up else None
        return SessionStatus(
            run=self.config.run,
            workload=self.config.workload,
            state=self.state,
            step=self.reports[-1].step if self.reports else -1,
            target_steps=self.config.steps,
            config_hash=self.config.config_hash(),
            code_hash=run.code_hash if run else None,
            policies=list(run.plan.policies) if run else [],
            agents={name: agent.policy for name, agent in run.plan.agents.items()} if run else {},
            versions=run.ledger.versions() if run else {},
            num_tasks=len(run.train_ids) if run else 0,
            num_eval_tasks=len(run.eval_ids) if run else 0,
            store_root=self.paths.store_root,
            failure=self.failure,
            waiting_for=self._waiting_for(run),
        )

    async def _between_steps(self) -> None:
        """Hands the events over, wakes waiting clients, and pauses while no client holds the lease."""
        self._write_events(self._events.take())
        self._notify()
        if self._clock() - self._asked_s > self.config.lease_s:
            self._events.add("paused", reason="no client asked within the lease")
            self._set_state("paused")
        await self._roll_back_waiting()
        while self.state == "paused":
            await self._changed.wait()
            await self._roll_back_waiting()

    async def _roll_back_waiting(self) -> None:
        """Does what was asked for. A refused request changes nothing; a failed one ends the session."""
        while self._rollbacks:
            policy, version, waiting = self._rollbacks[0]
            run = self._bring_up.run if self._bring_up else None
            assert run is not None
            try:
                if self._versions is None or not self.reports:
                    raise ValueError(f"run {self.config.run} has no committed version to roll back to")
                last = Snapshot(
                    ledger=run.ledger,
                    report=self.reports[-1],
                    seed=self.config.seed,
                    tasks_hash=tasks_hash(run.train_ids),
                )
                done = await roll_back(run, self._versions.keeper, last, policy, version)
            except (ValueError, UnknownVersion) as error:
                _answer(waiting, error)
            except Exception as error:
                _answer(waiting, error)
                raise
            else:
                if not waiting.done():
                    waiting.set_result(done)
            self._rollbacks.pop(0)

    async def _restore_reports(self) -> None:
        for snapshot in await self._store.snapshots(self.config.run):
            self.reports.append(Snapshot.from_json(snapshot).report)

    def _clock(self) -> float:
        """Seconds since the session's start, on its event loop's clock."""
        return asyncio.get_running_loop().time() - self._started_s

    def _set_state(self, state: str) -> None:
        self.state = state
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _waiting_for(self, run: Run | None) -> str | None:
        if self.state == "starting" and self._bring_up is not None:
            return self._bring_up.phase
        if self.state == "paused":
            return "a client to ask for steps"
        if self.state == "running" and run is not None:
            return f"step {run.ledger.next_step}: {run.desk.describe_wait()}"
        return None


def _answer(waiting: asyncio.Future[RolledBack], error: Exception) -> None:
    if not waiting.done():
        waiting.set_exception(error)
        waiting.exception()  # seen, also if the client is gone


def explain(group: BaseException) -> str:
    """The first cause inside nested exception groups, with its type."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return f"{type(group).__name__}: {group}"
