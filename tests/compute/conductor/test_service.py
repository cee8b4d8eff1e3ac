"""The service with real processes: engines, trainers and workers that are killed, wrong input, clean ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megloom.compute.conductor.client import (
    ServiceClient,
    ServiceError,
    ensure_service,
    is_alive,
    read_address,
)
from megloom.compute.conductor.http_api import build_app
from megloom.compute.graph.schemas import from_table
from megloom.compute.store.lineage.backward import version_lineage
from megloom.compute.store.reader import MegReader
from tests.service_fixture import config, follow, processes, service, wait_until_gone

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with service(tmp_path_factory.mktemp("home")) as running:
        yield running


def pid_of(client: ServiceClient, run: str, cell: str) -> int:
    """The process that logs under a cell's name: the fork server's child with that log open."""
    log_path = str(client.home / "logs" / f"{run}-{cell.replace('/', '-')}.log")
    for pid in processes(client):
        try:
            if str(Path(f"/proc/{pid}/fd/1").readlink()) == log_path:
                return pid
        except (FileNotFoundError, PermissionError):
            continue
    raise LookupError(f"no process logs to {log_path}")


def events(client: ServiceClient, run: str) -> list[dict[str, object]]:
    lines = (client.home / "runs" / run / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_trains_every_policy_and_records_every_call(client: ServiceClient) -> None:
    client.start_session(config("plain", 3))
    status, steps = follow(client, "plain")
    assert (status.state, status.failure, [s.step for s in steps]) == ("finished", None, [0, 1, 2, 3])
    reader = MegReader(status.store_root)
    calls = from_table("invocations", reader.read_table("plain", "invocations"))
    episodes = {e.episode_id: e for e in from_table("episodes", reader.read_table("plain", "episodes"))}
    trained = [call for call in calls if episodes[call.episode_id].purpose == "train"]
    assert Counter(call.agent for call in trained) == {"writer": 27, "critic": 27}
    assert all(call.version_min == call.version_max for call in calls)
    assert all(check.passed for step in steps for check in step.checks if check.blocking)
    gaps = [p.max_logprob_gap for s in steps for p in s.policies.values() if p.max_logprob_gap is not None]
    assert gaps and max(gaps) < 1e-4


def test_a_session_is_attached_to_while_it_runs_and_another_configuration_is_refused(
    client: ServiceClient,
) -> None:
    client.start_session(config("attach", 2))
    assert client.start_session(config("attach", 2)).run == "attach"
    with pytest.raises(ServiceError, match="409: run attach is active with another configuration"):
        client.start_session(config("attach", 2, seed=9))
    assert follow(client, "attach")[0].state == "finished"


def test_a_finished_run_is_continued_and_another_configuration_of_it_is_refused(
    client: ServiceClient,
) -> None:
    client.start_session(config("longer", 1))
    _, first = follow(client, "longer")
    client.start_session(config("longer", 3))
    status, steps = follow(client, "longer")
    assert status.state == "finished" and [s.step for s in steps] == [0, 1, 2, 3]
    assert steps[1] == first[1]
    client.start_session(config("longer", 4, seed=5))
    status, _ = follow(client, "longer")
    assert status.state == "failed" and status.failure is not None and "another run name" in status.failure


def test_the_conductor_has_no_torch_while_it_runs(client: ServiceClient) -> None:
    client.start_session(config("light", 1))
    maps = Path(f"/proc/{client.health()['pid']}/maps").read_text()
    assert "libtorch" not in maps
    follow(client, "light")


@pytest.mark.parametrize("cell", ["engine/writer/0", "trainer/writer", "worker/0"])
def test_a_killed_cell_is_replaced_and_the_run_finishes(client: ServiceClient, cell: str) -> None:
    run = f"kill-{cell.replace('/', '-')}"
    client.start_session(config(run, 4))
    follow(client, run, until=lambda status, steps: len(steps) >= 2)
    os.kill(pid_of(client, run, cell), signal.SIGKILL)
    status, steps = follow(client, run)
    assert status.state == "finished", status.failure
    assert sum(step.num_episodes for step in steps) == 4 * 9
    assert [step.failures for step in steps] == [{}] * 5
    samples = from_table("samples", MegReader(status.store_root).read_table(run, "samples"))
    applied = Counter(sample.sample_id for sample in samples if sample.state == "applied")
    assert set(applied.values()) == {1}


def test_cancelling_stops_a_session_for_good_with_its_processes(client: ServiceClient) -> None:
    client.start_session(config("stop", 500))
    follow(client, "stop", until=lambda status, steps: bool(steps))
    engine = pid_of(client, "stop", "engine/writer/0")
    assert client.cancel("stop").state == "cancelled"
    assert not is_alive(engine)


def test_a_session_without_a_client_pauses_and_goes_on_when_one_asks(client: ServiceClient) -> None:
    client.start_session(config("lease", 400, lease_s=0.5))
    follow(client, "lease", until=lambda status, steps: bool(steps))
    paused_at = client.status("lease")
    deadline = time.monotonic() + 60
    while paused_at.state == "running" and time.monotonic() < deadline:
        time.sleep(0.1)  # asking for the status does not renew the lease
        paused_at = client.status("lease")
    assert (paused_at.state, paused_at.waiting_for) == ("paused", "a client to ask for steps")
    _, steps = follow(
        client, "lease", until=lambda status, steps: bool(steps) and steps[-1].step > paused_at.step
    )
    assert steps[-1].step > paused_at.step
    client.cancel("lease")


def test_failures_of_user_code_are_recorded_and_the_run_goes_on(client: ServiceClient) -> None:
    client.start_session(config("broken", 1, workload="broken"))
    status, steps = follow(client, "broken")
    assert status.state == "finished", status.failure
    failures = steps[1].failures
    assert failures == {"workflow": 4} and steps[1].num_episodes == 16
    episodes = from_table("episodes", MegReader(status.store_root).read_table("broken", "episodes", [1]))
    causes = " ".join(episode.failure or "" for episode in episodes)
    assert "ZeroDivisionError: this task is broken" in causes and "did you mean 'writer'" in causes
    states = Counter(episode.state for episode in episodes if episode.purpose == "train")
    assert states == {"scored": 12, "failed": 4}


@pytest.mark.slow
def test_a_workflow_that_blocks_its_process_costs_its_episodes_and_the_worker_is_replaced(
    client: ServiceClient,
) -> None:
    client.start_session(config("blocking", 14, workload="blocking"))  # two seconds a step
    status, steps = follow(client, "blocking")
    assert status.state == "finished", status.failure
    assert [step.failures for step in steps[1:]] == [{"deadline": 2}] * 14
    assert "worker_up" in {event["kind"] for event in events(client, "blocking")}


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("empty", "no rows"),
        ("no_prompt", "row 0: missing or empty field 'prompt'"),
        ("nothing", "expected a Workload, found NoneType"),
    ],
)
def test_bad_workloads_fail_the_session_with_the_cause(
    client: ServiceClient, workload: str, message: str
) -> None:
    client.start_session(config(f"bad-{workload}", 1, workload=workload))
    status, steps = follow(client, f"bad-{workload}")
    assert status.state == "failed" and status.failure is not None and message in status.failure
    assert steps == []


def test_unknown_runs_bad_bodies_and_missing_tokens_are_refused(client: ServiceClient) -> None:
    with pytest.raises(ServiceError, match="404: no session for run 'nobody'"):
        client.status("nobody")
    with pytest.raises(ServiceError, match="400: .*unknown key 'step', did you mean 'steps'"):
        client._request("POST", "/sessions", {"step": 1})
    address = read_address(client.home)
    assert address is not None
    app = build_app(None, token="t", epoch=1)  # type: ignore[arg-type]
    for route in app.routes:
        path = route.path.replace("{run}", "x")  # type: ignore[attr-defined]
        for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
            request = urllib.request.Request(address["url"] + path, method=method)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=10)


def test_the_token_is_private_and_the_service_listens_on_loopback(client: ServiceClient) -> None:
    assert stat.S_IMODE((client.home / "service.token").stat().st_mode) == 0o600
    address = read_address(client.home)
    assert address is not None and address["url"].startswith("http://127.0.0.1:")
    token = (client.home / "service.token").read_text()
    for path in [*client.home.glob("logs/*"), *client.home.glob("runs/*/*"), client.home / "service.log"]:
        if path.is_file():
            assert token not in path.read_text(errors="replace"), path


def test_a_killed_service_leaves_nothing_and_its_run_continues_from_the_last_sealed_step(
    tmp_path: Path,
) -> None:
    client = ensure_service(tmp_path)
    client.start_session(config("crash", 4))
    follow(client, "crash", until=lambda status, steps: len(steps) >= 2)
    pids = processes(client)
    os.kill(client.health()["pid"], signal.SIGKILL)
    wait_until_gone(pids)
    with service(tmp_path) as again:
        again.start_session(config("crash", 4))
        status, steps = follow(again, "crash")
        assert status.state == "finished" and [step.step for step in steps] == list(range(5))
        groups = from_table("groups", MegReader(status.store_root).read_table("crash", "groups"))
        per_epoch = Counter((group.epoch, group.task_id) for group in groups)
        assert len(groups) == 4 * 3 and set(per_epoch.values()) == {1}
        lineage = version_lineage(status.store_root, "crash", "writer", "last")
        assert lineage.row.version == status.versions["writer"]
