"""The sessions of a service: starts, finds and ends them. One active session per run."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from megloom.compute.cluster.local import LocalCluster
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.keeping import FileKeeper
from megloom.compute.conductor.local_backend import LocalBackend
from megloom.compute.conductor.reports import ENDED
from megloom.compute.conductor.rollback import RolledBack, roll_back_stopped
from megloom.compute.conductor.run import RunPaths
from megloom.compute.conductor.session import Session
from megloom.compute.conductor.version_services import local_services
from megloom.compute.state.weights import discard_after, discard_states
from megloom.compute.store.offload import ThreadOffload
from megloom.compute.store.sqlite_journal import SqliteJournal
from megloom.compute.store.store import MegStore

log = logging.getLogger(__name__)


class SessionConflict(Exception):
    """The run is active with another configuration."""


class UnknownRun(Exception):
    """No session of that name in this service, or no such run in its home."""


class SessionTable:
    """Owns the tasks of all sessions of this service."""

    def __init__(
        self, *, home: Path, cluster: LocalCluster, epoch: int, wall_time: Callable[[], str]
    ) -> None:
        self._home, self._cluster, self._epoch, self._wall_time = home, cluster, epoch, wall_time
        self._sessions: dict[str, Session] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting: dict[str, asyncio.Lock] = {}  # one start of a run at a time

    async def start(self, config: SessionConfig) -> Session:
        """Starts a session, or returns the active one of that run.

        Raises: SessionConflict if the active one has another configuration.
        """
        async with self._starting.setdefault(config.run, asyncio.Lock()):
            return await self._start(config)

    async def _start(self, config: SessionConfig) -> Session:
        active = self._sessions.get(config.run)
        if active is not None and active.state not in ENDED:
            if active.config.config_hash() != config.config_hash():
                raise SessionConflict(f"run {config.run} is active with another configuration")
            active.renew_lease()
            return active
        if config.run in self._tasks:
            await asyncio.wait([self._tasks[config.run]])
        ready: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        living = asyncio.get_running_loop().create_task(
            self._live(config, ready), name=f"session:{config.run}"
        )
        self._tasks[config.run] = living
        living.add_done_callback(lambda _: ready.cancel())  # it ended before its session was there
        try:
            return await ready
        except asyncio.CancelledError:
            if living.done():
                living.result()
            raise

    def get(self, run: str) -> Session:
        """Raises: UnknownRun naming the runs that are known."""
        if run not in self._sessions:
            known = ", ".join(sorted(self._sessions)) or "none"
            raise UnknownRun(f"no session for run {run!r} in this service (known: {known})")
        return self._sessions[run]

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    async def cancel(self, run: str) -> Session:
        """Stops a session for good; returns when its processes are gone."""
        session = self.get(run)
        task = self._tasks[run]
        if not task.cancelling():  # a second cancel would cut the first one's clean-up short
            task.cancel()
        await asyncio.wait([task])
        return session

    async def roll_back(self, run: str, policy: str, version: int) -> RolledBack:
        """Rolls a policy of a run back: between two steps of its session, or on the disk if it has none.

        Raises: UnknownRun; ValueError, UnknownVersion for a policy or version that is not there.
        """
        active = self._sessions.get(run)
        if active is not None and active.state not in ENDED:
            return await active.roll_back(policy, version)
        async with self._starting.setdefault(run, asyncio.Lock()):
            if run in self._tasks:
                await asyncio.wait([self._tasks[run]])
            return await roll_back_on_disk(self._home, run, policy, version, wall_time=self._wall_time)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _live(self, config: SessionConfig, ready: asyncio.Future[Session]) -> None:
        """One session's whole life, with its journal and its thread."""
        paths = RunPaths(home=self._home, run=config.run, store=config.storage.root)
        paths.journal.parent.mkdir(parents=True, exist_ok=True)
        paths.config.write_text(json.dumps(config.model_dump(mode="json"), indent=1))
        async with AsyncExitStack() as stack:
            offload = stack.enter_context(ThreadOffload(f"store-{config.run}"))
            files = stack.enter_context(ThreadOffload(f"weights-{config.run}"))
            journal = await stack.enter_async_context(SqliteJournal.open(paths.journal, offload))

            def write_events(lines: list[str]) -> None:
                with paths.events.open("a") as file:
                    file.writelines(f"{line}\n" for line in lines)

            def discard_uncommitted(policy: str, version: int, states: Sequence[str]) -> None:
                discard_after(Path(paths.weights(policy)), version)
                discard_states(Path(paths.states(policy)), keep=states)

            session = Session(
                config=config,
                backend=LocalBackend(config=config, home=self._home, cluster=self._cluster),
                store=MegStore(root=paths.store_root, journal=journal, offload=offload),
                paths=paths,
                epoch=self._epoch,
                wall_time=self._wall_time,
                write_events=write_events,
                discard_uncommitted=discard_uncommitted,
                discard_state=lambda path: Path(path).unlink(missing_ok=True),
                versions=local_services(
                    paths.weights,
                    files,
                    engine_folders=[Path(folder) / config.run for folder in config.cells.engine_folders],
                ),
            )
            self._sessions[config.run] = session
            ready.set_result(session)
            await session.run()


async def roll_back_on_disk(
    home: Path, run: str, policy: str, version: int, *, wall_time: Callable[[], str]
) -> RolledBack:
    """Rolls back a run that no session works on; the caller sees to it that none starts meanwhile.

    Raises: UnknownRun, UnknownVersion; ValueError; FileNotFoundError if the run has no sealed step.
    """
    paths = stored_run(home, run)
    with ThreadOffload(f"store-{run}") as offload:
        async with SqliteJournal.open(paths.journal, offload) as journal:
            return await roll_back_stopped(
                MegStore(root=paths.store_root, journal=journal, offload=offload),
                FileKeeper(paths.weights, offload),
                run=run,
                policy=policy,
                version=version,
                wall_time=wall_time,
            )


def stored_run(home: Path, run: str) -> RunPaths:
    """Where a run's files lie. Raises: UnknownRun naming the runs that are known."""
    runs = home / "runs"
    known = sorted(path.parent.name for path in runs.glob("*/config.json"))
    if run not in known:
        raise UnknownRun(f"no run {run!r} in {home} (known: {', '.join(known) or 'none'})")
    config = SessionConfig.parse(json.loads((runs / run / "config.json").read_text()))
    return RunPaths(home=home, run=run, store=config.storage.root)
