"""The thin client of the conductor's service: what Dagster ops, the CLI and tests use. Standard library only.

The service writes `service.json` (address, pid, epoch) and `service.token` (0600) into its home folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.reports import SessionStatus, StepReport

ROLLBACK_TIMEOUT_S = 3600.0  # it waits for the step in work
START_TIMEOUT_S = 60.0  # a cold start of the service took 3 s on a busy laptop


class ServiceError(Exception):
    """The service refused or failed a request; the message is the service's own."""


class ServiceDown(ServiceError):
    """No service answers at the address that the home folder names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPage:
    """Steps after the one asked for, and the session's state when the service answered."""

    status: SessionStatus
    steps: list[StepReport]


class ServiceClient:
    """Speaks to the service of one home folder. Holds an address and a token, nothing else."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def health(self, *, timeout_s: float = 10.0) -> dict[str, Any]:
        return dict(self._request("GET", "/health", timeout_s=timeout_s))

    def start_session(self, config: SessionConfig) -> SessionStatus:
        """Starts the run, or continues it where it stopped; a running one is attached to."""
        return SessionStatus(**self._request("POST", "/sessions", config.model_dump(mode="json")))

    def sessions(self, *, timeout_s: float = 10.0) -> list[SessionStatus]:
        answer = self._request("GET", "/sessions", timeout_s=timeout_s)
        return [SessionStatus(**entry) for entry in answer["sessions"]]

    def status(self, run: str) -> SessionStatus:
        return SessionStatus(**self._request("GET", f"/sessions/{urllib.parse.quote(run)}"))

    def steps(self, run: str, *, after: int, wait_s: float) -> StepPage:
        """Waits up to `wait_s` for steps later than `after`; renews the session's lease."""
        query = urllib.parse.urlencode({"after": after, "wait_s": wait_s})
        page = self._request(
            "GET", f"/sessions/{urllib.parse.quote(run)}/steps?{query}", timeout_s=wait_s + 30
        )
        return StepPage(
            status=SessionStatus(**page["status"]),
            steps=[StepReport.from_json(step) for step in page["steps"]],
        )

    def cancel(self, run: str) -> SessionStatus:
        """Stops the session for good; returns when its processes are gone."""
        return SessionStatus(**self._request("POST", f"/sessions/{urllib.parse.quote(run)}/cancel", {}))

    def roll_back(self, run: str, policy: str, version: int) -> dict[str, Any]:
        """Rolls a policy back after the step in work; what was done, once it is sealed."""
        path = f"/sessions/{urllib.parse.quote(run)}/rollback"
        body = {"policy": policy, "version": version}
        return dict(self._request("POST", path, body, timeout_s=ROLLBACK_TIMEOUT_S))

    def _request(self, method: str, path: str, body: Any = None, *, timeout_s: float = 60.0) -> Any:
        address = read_address(self.home)
        if address is None:
            raise ServiceDown(f"no service is running in {self.home} (start one with: megloom up)")
        token = (self.home / "service.token").read_text().strip()
        request = urllib.request.Request(
            address["url"] + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                error_body = json.loads(text)["error"]
                text = error_body["message"] if isinstance(error_body, dict) else error_body
            raise ServiceError(f"{method} {path}: {error.code}: {text}") from None
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise ServiceDown(f"{method} {address['url']}{path}: {error}") from None


def read_address(home: Path) -> dict[str, Any] | None:
    """The address file of a live service, or None. A file whose process is gone counts as none."""
    try:
        address = json.loads((home / "service.json").read_text())
    except FileNotFoundError:
        return None
    is_same = is_alive(address["pid"]) and process_start(address["pid"]) == address["started"]
    return dict(address) if is_same else None


def process_start(pid: int) -> str | None:
    """When a process began, in kernel ticks: tells it from a later one of its number. None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None
    return stat.rpartition(")")[2].split()[19]


def is_alive(pid: int) -> bool:
    """True if the process runs; a zombie that nobody has reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def ensure_service(home: Path, *, timeout_s: float = START_TIMEOUT_S) -> ServiceClient:
    """Returns a client of the home's service, starting one that outlives this process if none answers.

    Raises: ServiceDown with the end of the service's log, if it is not healthy within `timeout_s`.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    client = ServiceClient(home)
    deadline = time.monotonic() + timeout_s
    spawned = False
    while time.monotonic() < deadline:
        try:
            client.health()
            return client
        except ServiceDown:
            pass
        if not spawned and read_address(home) is None:
            _spawn(home)
            spawned = True
        time.sleep(0.1)
    log_path = home / "service.log"
    tail = log_path.read_text(errors="replace")[-2000:] if log_path.exists() else "(no log)"
    raise ServiceDown(
        f"the service in {home} did not become healthy within {timeout_s:.0f} s; its log ends:\n{tail}"
    )


def _spawn(home: Path) -> None:
    """Starts the service detached; a second one in the same home ends at once (its file lock)."""
    with (home / "service.log").open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "megloom.compute.conductor.service", "--detach", "--home", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
            check=False,
        )


def stop_service(home: Path, *, timeout_s: float = 30.0) -> bool:
    """Stops the home's service and everything it started. Returns False if none was running.

    Raises: ServiceError if it is still alive after `timeout_s`.
    """
    address = read_address(home)
    if address is None:
        return False
    os.kill(address["pid"], signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if read_address(home) is None:
            return True
        time.sleep(0.05)
    raise ServiceError(f"service pid={address['pid']} still runs {timeout_s:.0f} s after SIGTERM")
