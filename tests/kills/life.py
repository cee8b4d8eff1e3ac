"""One life of a session: the real conductor on modelled cells in virtual time, with real files, until killed.

It runs in a process of its own. Over a pipe it tells, one JSON line each, what the store acknowledged (after
the acknowledgement, so that every line is a promise), which steps were sealed, and how it ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.run import RunPaths
from megloom.compute.conductor.session import Session
from megloom.compute.graph.records import TABLE_OF, record_key
from megloom.compute.graph.seeds import content_hash
from megloom.compute.simulation.backend import Faults
from megloom.compute.simulation.cells import Costs
from megloom.compute.simulation.clock import run_virtual
from megloom.compute.simulation.team import simulated_team
from megloom.compute.state.weights import discard_after, discard_states
from megloom.compute.store.journal import Journal
from megloom.compute.store.manifest import Manifest
from megloom.compute.store.sqlite_journal import SqliteJournal
from megloom.compute.store.store import MegStore
from megloom.compute.workload import Training
from tests.kills.cells import FileBackend
from tests.kills.tripwire import Tripwire, WiredOffload, wire_the_disk

RUN = "killed"
NUM_TASKS = 5  # fewer than a run takes, so that an epoch's end is crossed
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A life to live: `at` and `place` say at which operation it dies, `at` None that it may live.

    `kill_after_s` is for whoever starts the process: a real SIGKILL from outside at that time.
    """

    home: str
    steps: int
    seed: int
    epoch: int
    at: int | None = None
    place: str = "before"
    kill_after_s: float | None = None


def fingerprint(record: Any) -> tuple[str, str, str]:
    """Table, key and a hash of the whole content. Modelled cells use numbers that float32 keeps exactly."""
    return TABLE_OF[type(record)], record_key(record), content_hash(repr(record))


class TellingStore(MegStore):
    """Tells each promise of the store once it is given."""

    def __init__(
        self, *, root: str, journal: Journal, offload: WiredOffload, wire: Tripwire, tell: Tell
    ) -> None:
        super().__init__(root=root, journal=journal, offload=offload)
        self._wire, self._tell = wire, tell
        self._recorded: list[tuple[int, str, str, str]] = []

    def record(self, record: Any, *, step: int | None = None) -> None:
        super().record(record, step=step)
        at = record.step if step is None else step
        self._recorded.append((at, *fingerprint(record)))

    async def flush(self) -> None:
        promised = list(self._recorded)
        await super().flush()
        number = self._wire.before("acknowledge")
        self._tell({"acknowledged": promised})
        self._wire.after(number)
        del self._recorded[: len(promised)]

    async def seal(self, run: str, step: int, snapshot: Mapping[str, Any] | None = None) -> Manifest:
        promised = list(self._recorded)
        manifest = await super().seal(run, step, snapshot)
        self._tell({"acknowledged": promised, "sealed": step})
        del self._recorded[: len(promised)]
        return manifest


def session_config(steps: int, seed: int) -> SessionConfig:
    return SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": RUN,
            "steps": steps,
            "seed": seed,
            "lease_s": 1e9,
            "training": {"eval_tasks": 2},
        }
    )


def live(order: Order, tell: Tell) -> None:
    """Runs the session until it ends or the tripwire kills this process."""
    wire = Tripwire(at=order.at, place=order.place)
    paths = RunPaths(home=Path(order.home), run=RUN)
    paths.journal.parent.mkdir(parents=True, exist_ok=True)
    wire_the_disk(wire)
    session = run_virtual(_session(order, paths, wire, tell))
    tell({"state": session.state, "failure": session.failure, "operations": wire.names})


async def _session(order: Order, paths: RunPaths, wire: Tripwire, tell: Tell) -> Session:
    workload = simulated_team(
        Training.parse({"tasks_per_step": 2, "group_size": 2, "micro_batch_groups": 1, "call_timeout_s": 5})
    )
    offload = WiredOffload(wire)
    async with SqliteJournal.open(paths.journal, offload) as journal:
        session = Session(
            config=session_config(order.steps, order.seed),
            backend=FileBackend(
                workload, num_tasks=NUM_TASKS, costs=Costs(), faults=Faults(), engine_slots=256
            ),
            store=TellingStore(root=paths.store_root, journal=journal, offload=offload, wire=wire, tell=tell),
            paths=paths,
            epoch=order.epoch,
            wall_time=lambda: "simulated",
            write_events=lambda lines: None,
            discard_uncommitted=lambda policy, version, state: _discard(paths, policy, version, state),
            discard_state=lambda path: Path(path).unlink(missing_ok=True),
        )
        await session.run()
    return session


def _discard(paths: RunPaths, policy: str, version: int, states: Sequence[str]) -> None:
    discard_after(Path(paths.weights(policy)), version)
    discard_states(Path(paths.states(policy)), keep=states)


def line_writer(descriptor: int) -> Tell:
    """Writes each message as one line; a kill can only cut the last one."""

    def tell(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]

    return tell
