"""Programs that misbehave, through the worker that runs an episode: the right reward, and nothing left."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.conductor.recording import with_gateway_calls
from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.states import InvocationState
from megloom.compute.rollout.protocol import Endpoint, EpisodeOutcome
from megloom.compute.rollout.worker import WorkloadHost
from megloom.compute.workload import HarnessResult, ProgramLimits

from .builders import ORDER, RecordedEvents, agent, workload

NOWHERE = Endpoint(openai_url="http://127.0.0.1:9/v1", anthropic_url="http://127.0.0.1:9", token="secret")
LIMITS = ProgramLimits(grace_s=0.2, disk_bytes=8 << 20, output_bytes=4096)
KEEP = ("answer.txt",)
PRINTED = 8 << 20

SOLVES = "import os, pathlib, signal, sys, time\npathlib.Path('answer.txt').write_text('3')\n"
# Two children that hold its output, one of them in a session of its own, and a daemon of a daemon.
FORKS = """
for number in range(3):
    if os.fork() == 0:
        if number:
            os.setsid()
        if number == 2 and os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.mkdir(f"{os.environ['READY']}-{number}")
        time.sleep(600)
while not all(os.path.exists(f"{os.environ['READY']}-{number}") for number in range(3)):
    time.sleep(0.01)
"""
IGNORES = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(600)
os.mkdir(os.environ["READY"])
time.sleep(600)
"""
FILLS = """
for number in range(32):
    with open(str(number), "wb") as file:
        file.write(b"x" * (1 << 20))
time.sleep(600)
"""
PRINTS = f"""
for _ in range({PRINTED >> 16}):
    sys.stdout.write("x" * (1 << 16))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """How an episode ended, after its gateway's calls were counted, and what its reward function saw."""

    outcome: EpisodeOutcome
    results: list[HarnessResult]


class Events(RecordedEvents):
    def field_ready(self, field: Any) -> None:
        raise AssertionError(f"no field is declared, got {field}")


def answered() -> Vertex:
    """A call that the program made through the gateway."""
    return Vertex(
        invocation_id=f"{ORDER.episode_id}-a0-g000",
        episode_id=ORDER.episode_id,
        agent="coder",
        policy="p",
        index=0,
        parents=(),
        registered_s=0.0,
        seed=0,
        temperature=1.0,
        max_tokens=8,
        state=InvocationState.DONE,
        prompt_ids=(1,),
        token_ids=(2,),
        text="3",
    )


def run(source: str, tmp_path: Path, *, num_calls: int = 1, stop_when_ready: bool = False) -> Ran:
    """Runs Python source as an episode's program, which is stopped at its deadline or once it is ready."""
    marker, ready = str(tmp_path), tmp_path / "ready"
    results: list[HarnessResult] = []

    async def solve(task: Any, team: Any) -> Any:
        return await team.run(
            (sys.executable, "-I", "-S", "main.py", marker),
            agent="coder",
            files={"main.py": source},
            env={"READY": str(ready)},
            keep=KEEP,
            limits=LIMITS,
        )

    def reward(task: Any, episode: Any) -> float:
        results.append(episode.result)
        return float(episode.result.workspace.get("answer.txt") == task.ground_truth.encode())

    system = workload(
        agents={"coder": agent()},
        workflow=solve,
        reward=reward,
        tasks=lambda: [{"prompt": "1+2", "answer": "3"}],
        uses_gateway=True,
    )

    async def body() -> EpisodeOutcome:
        host = WorkloadHost(system, name=f"{__name__}:{marker}", data_dir=tmp_path / "data", events=Events())
        (task,) = await host.tasks("train")
        order = replace(ORDER, task_id=task.task_id, endpoint=NOWHERE, timeout_s=100.0)
        running = asyncio.create_task(host.run_episode(order))
        if stop_when_ready:
            while not ready.exists() and not running.done():  # noqa: ASYNC110  another process makes it
                await asyncio.sleep(0.01)
            host.cancel(order.episode_id, order.attempt)
        return await running

    outcome = asyncio.run(body())
    calls = [answered()] * num_calls
    ids = frozenset(call.invocation_id for call in calls)
    return Ran(outcome=with_gateway_calls(outcome, calls, ids, ()), results=results)


def marked(marker: str) -> list[str]:
    """The processes that carry the marker among their arguments or in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        for name in ("cmdline", "environ"):
            try:
                text = (process / name).read_bytes()
            except OSError:  # gone meanwhile
                continue
            if marker.encode() in text:
                found.append(f"{process.name}: {text!r}")
    return found


def forked(ran: Ran) -> None:
    assert ran.outcome.failure is None
    assert (ran.results[0].exit_code, ran.results[0].timed_out) == (0, False)


def ignored(ran: Ran) -> None:
    assert (ran.outcome.boundary, ran.results[0].exit_code) == ("deadline", 128 + 9)
    assert ran.results[0].timed_out


def filled(ran: Ran) -> None:
    assert ran.outcome.failure is None
    assert ran.results[0].over_disk and not ran.results[0].timed_out
    assert set(ran.results[0].workspace) == {"answer.txt"}


def printed(ran: Ran) -> None:
    assert ran.outcome.failure is None and ran.results[0].exit_code == 0
    assert len(ran.results[0].output) < 2 * LIMITS.output_bytes
    assert f"[... {PRINTED - LIMITS.output_bytes} bytes left out ...]" in ran.results[0].output


def ended_early(ran: Ran) -> None:
    assert ran.outcome.failure is None and ran.results[0].exit_code == 3


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scratch directories are made."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def assert_nothing_left(tmp_path: Path, scratch: Path) -> None:
    assert marked(str(tmp_path)) == []
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "reward", "check"),
    [
        pytest.param(SOLVES + FORKS, 1.0, forked, id="forks"),
        pytest.param(SOLVES + IGNORES, 1.0, ignored, id="ignores SIGTERM"),
        pytest.param(SOLVES + FILLS, 1.0, filled, id="fills its directory"),
        pytest.param(SOLVES + PRINTS, 1.0, printed, id="prints megabytes"),
        pytest.param("import sys; sys.exit(3)", 0.0, ended_early, id="exits early"),
    ],
)
def test_a_program_that_misbehaves_is_scored_on_what_it_left_and_leaves_nothing(
    source: str, reward: float, check: Callable[[Ran], None], tmp_path: Path, scratch: Path
) -> None:
    ran = run(source, tmp_path, stop_when_ready=source.endswith(IGNORES))
    assert (ran.outcome.state, ran.outcome.reward) == ("scored", reward)
    assert [call.reward for call in ran.outcome.calls] == [reward]
    assert len(ran.results) == 1
    check(ran)
    assert_nothing_left(tmp_path, scratch)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import sys; sys.exit(0)", id="exits early"),
        pytest.param(SOLVES + FORKS + "sys.exit(1)", id="forks, and exits with an answer of its own"),
    ],
)
def test_a_program_that_ends_without_a_call_has_no_reward_at_all(
    source: str, tmp_path: Path, scratch: Path
) -> None:
    outcome = run(source, tmp_path, num_calls=0).outcome
    assert (outcome.state, outcome.reward, outcome.boundary) == ("failed", None, "workflow")
    assert "no call ended with an answer" in str(outcome.failure)
    assert_nothing_left(tmp_path, scratch)


def test_the_search_for_what_is_left_finds_it(tmp_path: Path) -> None:
    async def body() -> list[str]:
        program = await asyncio.create_subprocess_exec("/bin/sleep", "600", env={"MARK": str(tmp_path)})
        try:
            return marked(str(tmp_path))
        finally:
            program.kill()
            await program.wait()

    assert len(asyncio.run(body())) == 1
