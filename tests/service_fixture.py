"""Real services for tests: one shared by a module, or a fresh one; always stopped, never left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megloom.compute.conductor.client import ServiceClient, ensure_service, is_alive, stop_service
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.reports import ENDED, SessionStatus, StepReport

ROOT = Path(__file__).parents[1]
DEADLINE_S = 90.0


def config(run: str, steps: int, *, workload: str = "workload", **changes: Any) -> SessionConfig:
    """A session of the tiny system."""
    values = {
        "workload": f"tests.tiny_system:{workload}",
        "run": run,
        "steps": steps,
        "import_paths": [str(ROOT)],
    }
    return SessionConfig.parse({**values, **changes})


@contextmanager
def service(home: Path) -> Iterator[ServiceClient]:
    """A running service; at the end it is stopped and nothing of it is alive."""
    client = ensure_service(home)
    try:
        yield client
    finally:
        pids = processes(client)
        stop_service(home)
        wait_until_gone(pids)


def wait_until_gone(pids: dict[int, str]) -> None:
    """Raises: AssertionError naming the processes that outlive the deadline."""
    deadline = time.monotonic() + 15.0
    while left := {pid: command for pid, command in pids.items() if is_alive(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def processes(client: ServiceClient) -> dict[int, str]:
    """The service and all its descendants: pid → command line."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    frontier = [client.health()["pid"]]
    while frontier:
        pid = frontier.pop()
        command = Path(f"/proc/{pid}/cmdline")
        found[pid] = command.read_text().replace("\0", " ") if command.exists() else ""
        frontier += children.get(pid, [])
    return found


def follow(
    client: ServiceClient, run: str, *, until: Callable[[SessionStatus, list[StepReport]], bool] | None = None
) -> tuple[SessionStatus, list[StepReport]]:
    """Polls until the session has ended, or `until` says so."""
    steps: list[StepReport] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        page = client.steps(run, after=steps[-1].step if steps else -1, wait_s=1.0)
        steps += page.steps
        if page.status.state in ENDED or (until is not None and until(page.status, steps)):
            return page.status, steps
    raise TimeoutError(f"run {run} after {DEADLINE_S:.0f} s: {client.status(run)}")
