"""Drives a whole session of the real conductor in virtual time and returns its event log and reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.reports import StepReport
from megloom.compute.conductor.run import RunPaths
from megloom.compute.conductor.session import Session
from megloom.compute.simulation.backend import Faults, ModelledBackend
from megloom.compute.simulation.cells import Costs
from megloom.compute.simulation.clock import run_virtual
from megloom.compute.simulation.gateway import Switchboard
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A session's end: `events` are its log lines, `virtual_s` how long it took on its own clock."""

    state: str
    failure: str | None
    events: list[str]
    reports: list[StepReport]
    virtual_s: float


def simulate(
    workload: Workload,
    config: SessionConfig,
    *,
    store: MemoryStore | None = None,
    num_tasks: int = 64,
    costs: Costs | None = None,
    faults: Faults | None = None,
    switchboard: Switchboard | None = None,
) -> Simulated:
    """Runs the session. The same arguments give byte-equal events.

    A workflow whose programs call through the gateway reaches it by the `switchboard`.
    """

    async def main() -> Simulated:
        events: list[str] = []
        paths = RunPaths(home=Path("simulated"), run=config.run)
        backend = ModelledBackend(
            workload,
            num_tasks=num_tasks,
            costs=costs or Costs(),
            faults=faults or Faults(),
            engine_slots=config.cells.engine_slots,
            switchboard=switchboard,
        )
        session = Session(
            config=config,
            backend=backend,
            store=store or MemoryStore(),
            paths=paths,
            epoch=1,
            wall_time=lambda: "simulated",
            write_events=events.extend,
            discard_uncommitted=lambda policy, version, states: backend.files.discard_after(
                paths.weights(policy), version
            ),
            discard_state=lambda path: None,
        )
        await session.run()
        return Simulated(
            state=session.state,
            failure=session.failure,
            events=events,
            reports=session.reports,
            virtual_s=session.reports[-1].finished_s if session.reports else 0.0,
        )

    return run_virtual(main())
