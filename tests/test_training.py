"""A whole training run through the command line and Dagster, small: what a newcomer gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from megloom.compute.conductor.client import ServiceClient, ServiceError, is_alive, stop_service
from tests.service_fixture import ROOT, processes, wait_until_gone

pytestmark = pytest.mark.timeout(240)
SMALL = (
    "training.warm_examples=48",
    "training.eval_tasks=4",
    "training.tasks_per_step=3",
    "training.group_size=3",
    "training.eval_draws=1",
)


def megloom(place: Path, *argv: str) -> subprocess.Popen[str]:
    """The command in a process of its own, with its homes under `place`."""
    env = {**os.environ, "MEGLOOM_HOME": str(place / "home"), "DAGSTER_HOME": str(place / "dagster")}
    return subprocess.Popen(
        [sys.executable, "-m", "megloom.cli", *argv],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str], *, code: int = 0, within_s: float = 200) -> str:
    output, _ = process.communicate(timeout=within_s)
    assert process.returncode == code, output
    return output


def train(place: Path, run: str, steps: int) -> subprocess.Popen[str]:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    report = str(place / "report.html")
    return megloom(
        place, "train", "arithmetic_team", "--steps", str(steps), "--run", run, "--report", report, *settings
    )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for the homes; its service is stopped at the end and leaves nothing."""
    (tmp_path / "dagster").mkdir()
    yield tmp_path
    try:
        pids = processes(ServiceClient(tmp_path / "home"))
    except ServiceError:
        return
    stop_service(tmp_path / "home")
    wait_until_gone(pids)


def steps_in_dagster(place: Path, run: str) -> list[str]:
    """The partitions of `behavior_policy` that the instance knows, in order."""
    with dg.DagsterInstance.from_config(str(place / "dagster")) as instance:
        key = dg.AssetKey(["arithmetic_team", "behavior_policy"])
        return sorted(p for p in instance.get_materialized_partitions(key) if p.startswith(f"{run}:"))


def wait_for_step(place: Path, run: str, step: int) -> ServiceClient:
    client = ServiceClient(place / "home")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if client.status(run).step >= step:
                return client
        except ServiceError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"run {run} did not reach step {step}")


def test_a_run_from_the_command_line_is_trained_recorded_explained_and_shown(place: Path) -> None:
    output = finished(train(place, "first", 2))
    closing = next(line for line in output.splitlines() if line.startswith("train pipeline="))
    values = dict(pair.split("=", 1) for pair in closing.split()[1:])
    assert values["pipeline"] == "arithmetic_team" and values["steps"] == "2"
    assert 0.0 <= float(values["accuracy_after"]) <= 1.0 and int(values["policy_versions"]) >= 3
    assert steps_in_dagster(place, "first") == ["first:000001", "first:000002", "first:000003"]
    lineage = json.loads(
        finished(megloom(place, "lineage", "version", "solver@1", "--run", "first", "--json"))
    )
    assert lineage["row"]["kind"] == "start" and lineage["row"]["parent_version"] == 0
    assert len(lineage["micro_batches"]) == 9
    page = (place / "report.html").read_text()
    assert "<svg" in page and "first" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert "finished" in finished(megloom(place, "status"))
    assert "service stopped" in finished(megloom(place, "down"))


@pytest.mark.slow
def test_a_killed_client_leaves_the_session_and_a_new_one_reports_what_is_missing(place: Path) -> None:
    client = train(place, "killed", 200)
    service = wait_for_step(place, "killed", 2)
    client.kill()
    finished(client, code=-signal.SIGKILL)
    seen = service.status("killed").step
    wait_for_step(place, "killed", seen + 2)
    again = train(place, "killed", 200)
    deadline = time.monotonic() + 120
    while len(steps_in_dagster(place, "killed")) < seen + 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert service.status("killed").state == "cancelled"
    reported = steps_in_dagster(place, "killed")
    assert reported == [f"killed:{step:06d}" for step in range(1, len(reported) + 1)]
    assert len(reported) >= seen + 2


@pytest.mark.slow
def test_interrupting_the_command_stops_the_session_and_leaves_the_service(place: Path) -> None:
    client = train(place, "interrupted", 200)
    service = wait_for_step(place, "interrupted", 1)
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=60)
    assert service.status("interrupted").state == "cancelled"
    assert is_alive(service.health()["pid"])
