"""A whole training session whose engine is real SGLang, started by the session itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megloom.compute.conductor.reports import ENDED
from tests.service_fixture import config, processes, service, wait_until_gone
from tests.sglang.server import STUBS

pytestmark = [
    pytest.mark.usefixtures("sglang_python"),  # first of all: without SGLang nothing else is set up
    pytest.mark.timeout(900),
]
DEADLINE_S = 800.0  # SGLang's start on a busy machine is most of it


def with_stubs(python: str, folder: Path) -> str:
    """The interpreter of an environment, with what SGLang needs on a CPU."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={STUBS} exec {python} "$@"\n')
    path.chmod(0o700)
    return str(path)


def test_a_session_trains_on_what_sglang_samples_and_publishes_to_it(
    sglang_python: str, tmp_path: Path
) -> None:
    cells = {"engine": "sglang", "engine_python": with_stubs(sglang_python, tmp_path), "engine_slots": 16}
    session = config("real", 2, cells=cells).model_copy(update={"workload": "tests.sglang.system:workload"})
    with service(tmp_path / "home") as client:
        client.start_session(session)
        deadline, launched = time.monotonic() + DEADLINE_S, False
        while (status := client.status("real")).state not in ENDED:
            assert time.monotonic() < deadline, status
            launched |= any("sglang.launch_server" in command for command in processes(client).values())
            client.steps("real", after=status.step, wait_s=1.0)
        assert (status.state, status.failure) == ("finished", None)
        assert launched
        steps = client.steps("real", after=-1, wait_s=0.0).steps
        assert [report.failures for report in steps] == [{}, {}, {}]
        checks = [check for report in steps for check in report.checks]
        assert all(check.passed for check in checks if check.blocking)
        gaps = [check for check in checks if check.name == "train_infer_mismatch"]
        assert gaps and all(check.passed for check in gaps)
        assert status.versions["solver"] >= 1  # loaded by SGLang, whose canary agreed with the trainer
        wait_until_gone({pid: name for pid, name in processes(client).items() if "sglang" in name})
    events = (tmp_path / "home" / "runs" / "real" / "events.jsonl").read_text()
    assert "engine_down" not in events
