"""With real processes: a run whose newest version was damaged goes on from its trainer's state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.conductor.run import RunPaths
from megloom.compute.state.weights import (
    DELTA_FILE,
    MODEL_FILE,
    WeightManifest,
    file_digest,
    read_manifest,
    version_dir,
)
from tests.compute.state.weight_versions import spoil
from tests.service_fixture import config, follow, service

RUN = "mended"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def a_session(steps: int) -> SessionConfig:
    return config(RUN, steps).model_copy(update={"workload": "tests.versions_system:workload"})


def newest_version(home: Path, version: int) -> tuple[Path, WeightManifest]:
    folder = version_dir(Path(RunPaths(home=home, run=RUN).weights("writer")), version)
    return folder, read_manifest(folder, verified=False)


def events(home: Path) -> list[dict[str, Any]]:
    lines = RunPaths(home=home, run=RUN).events.read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run that no session works on, and the writer's version: a delta. Nothing is left in scratch."""
    home, scratch = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGLOOM_SCRATCH", str(scratch))
        with service(home) as client:
            client.start_session(a_session(1))
            status, _ = follow(client, RUN)
            assert (status.state, status.failure) == ("finished", None)
    shutil.rmtree(scratch)
    version = status.versions["writer"]
    assert not newest_version(home, version)[1].is_whole
    return home, version


def test_a_resume_mends_a_damaged_delta_before_its_engines_start_or_says_why_not(
    stopped: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, version = stopped
    monkeypatch.setenv("MEGLOOM_SCRATCH", str(tmp_path / "scratch"))
    folder, before = newest_version(home, version)
    (state,) = Path(RunPaths(home=home, run=RUN).states("writer")).iterdir()
    spoil(folder / DELTA_FILE, 20)
    with service(home) as client:
        state.rename(tmp_path / "state")
        client.start_session(a_session(2))
        status, _ = follow(client, RUN)
        assert status.state == "failed" and status.failure is not None
        damage = f"version {version} cannot be used: {folder} cannot be rebuilt: {folder / DELTA_FILE}: "
        assert damage in status.failure and "; version 0 is intact; it is not mended: " in status.failure
        assert str(state) in status.failure and "\n" not in status.failure
        assert newest_version(home, version) == (folder, before)

        (tmp_path / "state").rename(state)
        client.start_session(a_session(2))
        status, steps = follow(client, RUN)
    assert (status.state, status.failure) == ("finished", None)
    gaps = [report.max_logprob_gap for step in steps for report in step.policies.values()]
    assert max(gap for gap in gaps if gap is not None) < 1e-3, "engines and trainers have the same weights"
    _, after = newest_version(home, version)
    assert after.is_whole and after.digest == before.digest == file_digest(folder / MODEL_FILE)
    told = [event for event in events(home) if event["kind"].startswith("version_")]
    assert {(event["policy"], event["version"]) for event in told} == {("writer", version)}
    assert [event["kind"] for event in told] == ["version_damaged", "version_damaged", "version_mended"]
    assert str(folder / DELTA_FILE) in told[-2]["cause"]
