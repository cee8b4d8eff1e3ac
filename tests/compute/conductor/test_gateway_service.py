"""A whole run whose agents are called over HTTP: real gateways, engines, trainers and workers."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.conductor.client import ServiceClient
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.graph.schemas import from_table
from megloom.compute.store.reader import MegReader
from tests.service_fixture import config, follow, service

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceClient, Path]]:
    home = tmp_path_factory.mktemp("home")
    with service(home) as client:
        yield client, home


def system(run: str, steps: int, name: str = "workload", **changes: Any) -> SessionConfig:
    return config(run, steps, **changes).model_copy(update={"workload": f"tests.gateway_system:{name}"})


def gateway_pid(home: Path, run: str) -> int:
    """The gateway's process, which it names in its log."""
    log = home / "logs" / f"{run}-gateway-0.log"
    deadline = time.monotonic() + 60.0
    while not (log.exists() and (found := re.findall(r"listening port=\d+ pid=(\d+)", log.read_text()))):
        assert time.monotonic() < deadline, f"no gateway of run {run} has come up"
        time.sleep(0.02)
    return int(found[-1])


def test_a_run_over_http_trains_on_exact_records_of_every_call(
    running: tuple[ServiceClient, Path],
) -> None:
    client, _ = running
    client.start_session(system("http", 2, cells={"gateways": 2}))
    status, steps = follow(client, "http")
    assert (status.state, status.failure) == ("finished", None)
    assert [report.failures for report in steps] == [{}, {}, {}]
    assert all(check.passed for report in steps for check in report.checks if check.blocking)

    def rows(table: str) -> list[Any]:
        return from_table(table, MegReader(status.store_root).read_table("http", table))

    calls = [call for call in rows("invocations") if call.group_id.startswith("g")]
    assert Counter((c.agent, c.state) for c in calls) == {("writer", "done"): 18, ("critic", "done"): 18}
    segments = {s.segment_id: s for s in rows("segments")}
    for call in calls:
        sampled = segments[call.completion_segment]
        assert sampled.sampled and len(sampled.token_ids) == len(sampled.logprobs or ()) > 0
        assert (sampled.version_spans or [])[-1][2] == len(sampled.token_ids)
        assert call.reward is not None and call.message is not None
    assert "applied" in {sample.state for sample in rows("samples")}
    gaps = [policy.max_logprob_gap for report in steps for policy in report.policies.values()]
    assert max(gap for gap in gaps if gap is not None) < 1e-3


def test_a_killed_gateway_comes_back_and_its_episodes_are_tried_again(
    running: tuple[ServiceClient, Path],
) -> None:
    client, home = running
    client.start_session(system("killed", 2, "lingering"))
    follow(client, "killed", until=lambda _, steps: bool(steps))
    time.sleep(0.5)  # into the first second of the next step's episodes, each of which takes longer
    pid = gateway_pid(home, "killed")
    os.kill(pid, signal.SIGKILL)
    status, steps = follow(client, "killed")
    assert (status.state, status.failure) == ("finished", None)
    assert all(report.failures == {} for report in steps)
    assert gateway_pid(home, "killed") != pid
    episodes = from_table("episodes", MegReader(status.store_root).read_table("killed", "episodes"))
    assert {e.failure_boundary for e in episodes if e.state == "failed"} == {"gateway"}
    assert {e.attempt for e in episodes if e.state == "scored"} == {0, 1}
