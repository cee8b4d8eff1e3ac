"""Versions with real processes: deltas that two engines load, a canary, a rollback over HTTP, a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from megloom.cli import main
from megloom.compute.conductor.client import ServiceError, stop_service
from megloom.compute.conductor.http_api import build_app
from megloom.compute.conductor.keeping import UnknownVersion
from megloom.compute.conductor.publisher import PublishAborted
from megloom.compute.conductor.rollback import RolledBack
from megloom.compute.conductor.run import RunPaths
from megloom.compute.conductor.sessions import UnknownRun
from megloom.compute.state.versions import list_versions
from tests.service_fixture import config, follow, service

AUTH = {"Authorization": "Bearer t"}


class FakeTable:
    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    async def roll_back(self, run: str, policy: str, version: int) -> RolledBack:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return RolledBack(run=run, policy=policy, step=4, from_version=3, version=version, with_state=True)


def ask(outcome: Any, body: Any) -> tuple[int, dict[str, Any]]:
    app = build_app(FakeTable(outcome), token="t", epoch=1)  # type: ignore[arg-type]
    answer = TestClient(app).post("/sessions/r/rollback", json=body, headers=AUTH)
    return answer.status_code, answer.json()


def test_the_route_answers_with_what_was_done() -> None:
    status, body = ask(None, {"policy": "p", "version": 1})
    assert status == 200
    assert body == {"run": "r", "policy": "p", "step": 4, "from_version": 3, "version": 1, "with_state": True}


@pytest.mark.parametrize(
    ("outcome", "body", "status"),
    [
        (None, {"policy": "p"}, 400),
        (None, {"policy": "p", "version": "1"}, 400),
        (None, {"policy": "p", "version": True}, 400),
        (ValueError("on it already"), {"policy": "p", "version": 1}, 400),
        (UnknownRun("no run"), {"policy": "p", "version": 1}, 404),
        (UnknownVersion("no version"), {"policy": "p", "version": 1}, 404),
        (FileNotFoundError("no sealed step"), {"policy": "p", "version": 1}, 404),
        (PublishAborted("p", 1, "disk full"), {"policy": "p", "version": 1}, 503),
    ],
)
def test_a_request_that_fails_says_why(outcome: Any, body: Any, status: int) -> None:
    got, answer = ask(outcome, body)
    assert got == status and answer["error"]


def test_the_route_wants_the_token() -> None:
    app = build_app(FakeTable(None), token="t", epoch=1)  # type: ignore[arg-type]
    assert TestClient(app).post("/sessions/r/rollback", json={}).status_code == 401


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_with_deltas_rolls_back_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    settings: dict[str, Any] = {"cells": {"engines_per_policy": 2}, "storage": {"keep_states": 2}}

    def a_session(steps: int) -> Any:
        return config("r", steps, **settings).model_copy(
            update={"workload": "tests.versions_system:workload"}
        )

    with service(home) as client:
        client.start_session(a_session(4))
        status, steps = follow(client, "r")
        assert (status.state, status.failure) == ("finished", None)
        gaps = [p.max_logprob_gap for s in steps for p in [s.policies["writer"]] if p.max_logprob_gap]
        assert gaps and max(gaps) < 1e-3, "the writer's engines compute with what was published"
        last = status.versions["writer"]
        done = client.roll_back("r", "writer", last - 1)
        assert done["from_version"] == last and done["with_state"]
        with pytest.raises(ServiceError, match="404: policy writer has no version 99"):
            client.roll_back("r", "writer", 99)
        client.start_session(a_session(7))
        status, steps = follow(client, "r")
        assert (status.state, status.failure) == ("finished", None)
    stop_service(home)
    folder = Path(RunPaths(home=home, run="r").weights("writer"))
    stored = list_versions(folder)
    assert last + 1 in {one.version for one in stored}
    assert any(one.manifest and not one.manifest.is_whole for one in stored)
    parents = {one.version: one.manifest.parent_version for one in stored if one.manifest}
    assert parents[last + 1] == last - 1
    assert main(["versions", "list", "r", "--home", str(home)]) == 0
    assert "delta of" in capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["versions", "export", "r", "critic", "last", "--home", str(home), "--out", str(out)]) == 0
    assert (out / "model.safetensors").is_file()
