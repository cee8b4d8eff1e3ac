"""A grader without a verdict is tried again within a budget, and then its episode has no reward: never 0."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megloom.compute.rollout.episode import run_episode
from megloom.compute.rollout.protocol import Endpoint, EpisodeOutcome
from megloom.compute.rollout.worker import WorkloadHost
from megloom.compute.workload import HarnessResult
from megloom.pipelines.systems import coding_tasks
from megloom.pipelines.systems.coding_harness import workload
from megloom.pipelines.systems.coding_tasks import (
    BEGUN,
    FILE,
    GRADE_TRIES,
    Grade,
    GraderError,
    bug_of,
    grade,
    held_out_rows,
)
from tests.compute.rollout.builders import ORDER, RecordedEvents, book

ROW = held_out_rows()[0]
TASK = SimpleNamespace(task_id="t", prompt=ROW["prompt"], ground_truth=ROW["answer"], row=ROW)
BUG = bug_of(ROW)
RIGHT = BUG.files[FILE].replace(f" {BUG.wrong} ", f" {BUG.right} ").encode()
PASSED, NONE = Grade(works=True, passed=1.0), Grade(works=False, passed=0.0)


def ended(output: str, exit_code: int = 0, **flags: bool) -> HarnessResult:
    values = {"timed_out": False, "over_disk": False, **flags}
    return HarnessResult(exit_code=exit_code, output=output, workspace={}, **values)


GOOD = ended(f"{BEGUN}\n\n{BUG.expected}\n")
REFUSED = ended("guardian: not started: [Errno 11] Resource temporarily unavailable\n", 125)
NO_START = ended("", 143, timed_out=True)
SLOW = ended(f"{BEGUN}\n", 143, timed_out=True)
BROKEN = ended(f"{BEGUN}\nTraceback\n", 1)
NO_FORK = BlockingIOError(11, "Resource temporarily unavailable")


class Grader:
    """Stands for `run_alone`: ends as its script says, and counts how often it was asked."""

    def __init__(self, *script: HarnessResult | OSError) -> None:
        self._script = list(script)
        self.num_asked = 0

    async def __call__(self, program: Any, *, files: Mapping[str, Any], **_: Any) -> HarnessResult:
        assert files[FILE] == RIGHT
        step = self._script[self.num_asked]
        self.num_asked += 1
        if isinstance(step, OSError):
            raise step
        return step


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_tasks, "GRADE_PAUSE_S", 0.0)


def graded(monkeypatch: pytest.MonkeyPatch, *script: HarnessResult | OSError) -> tuple[Grade, int]:
    """The grade by a grader with this script, and how often it was asked."""
    grader = Grader(*script)
    monkeypatch.setattr(coding_tasks, "run_alone", grader)
    return asyncio.run(grade(BUG, RIGHT)), grader.num_asked


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ((GOOD,), PASSED),
        ((BROKEN,), NONE),
        ((ended(f"{BEGUN}\n", 126),), NONE),
        ((ended("", 137, over_disk=True),), NONE),  # the file alone was too large
        ((REFUSED, GOOD), PASSED),
        ((NO_FORK, NO_FORK, GOOD), PASSED),
        ((NO_START, BROKEN), NONE),
        ((SLOW, GOOD), PASSED),
        ((SLOW, SLOW), NONE),
        ((NO_START, SLOW, SLOW), NONE),
    ],
)
def test_a_grader_is_tried_again_until_it_has_a_verdict(
    script: tuple[HarnessResult | OSError, ...], verdict: Grade, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert graded(monkeypatch, *script) == (verdict, len(script))


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        (REFUSED, "did not begin, exit status 125: guardian: not started: .Errno 11"),
        (ended("", 126), "did not begin, exit status 126: it said nothing"),
        (ended("", -9), "did not begin, exit status -9"),
        (NO_START, "did not begin, not within 10 s"),
        (NO_FORK, "BlockingIOError"),
        (SLOW, "no answer within 10 s"),
    ],
)
def test_a_grader_that_never_has_a_verdict_is_an_error(
    last: HarnessResult | OSError, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [REFUSED] * (GRADE_TRIES - 1)
    with pytest.raises(GraderError, match=f"in {GRADE_TRIES} tries, the last: .*{cause}"):
        graded(monkeypatch, *script, last)


class Events(RecordedEvents):
    def field_ready(self, field: Any) -> None:
        raise AssertionError(f"no field is declared, got {field}")


class Program:
    """Stands for an episode's programs: the agent has repaired the file."""

    was_stopped, num_running = False, 0

    async def run(self, *_: Any, **__: Any) -> HarnessResult:
        return HarnessResult(
            exit_code=0, timed_out=False, over_disk=False, output="", workspace={FILE: RIGHT}
        )

    def endpoint(self, agent: str) -> Any:
        raise AssertionError(f"nobody asks for the endpoint of {agent}")


def episode(**order: Any) -> EpisodeOutcome:
    own: Any = Program()
    return asyncio.run(
        run_episode(workload, TASK, replace(ORDER, **order), book(RecordedEvents()), programs=own)
    )


def test_an_episode_whose_grader_cannot_be_limited_is_unscorable_and_the_same_one_is_right_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        refused = replace(coding_tasks.GRADER_LIMITS, memory_bytes=1 << 80)  # no kernel takes it: exit 125
        patched.setattr(coding_tasks, "GRADER_LIMITS", refused)
        lost = episode(reward_retries=1)
    assert (lost.state, lost.reward, lost.boundary) == ("unscorable", None, "reward")
    assert lost.failure is not None and "GraderError: no verdict on " in lost.failure
    assert "not started" in lost.failure
    kept = episode()
    assert (kept.state, kept.reward, kept.failure) == ("scored", 1.0, None)


def test_an_episode_that_ends_while_its_grader_is_tried_again_has_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_asked = asyncio.Event()

    async def asked(*_: Any, **__: Any) -> HarnessResult:
        if was_asked.is_set():
            await asyncio.sleep(600)
        was_asked.set()
        return REFUSED

    monkeypatch.setattr(coding_tasks, "run_alone", asked)
    nowhere = Endpoint(openai_url="http://127.0.0.1:9/v1", anthropic_url="http://127.0.0.1:9", token="x")

    async def body() -> EpisodeOutcome:
        host = WorkloadHost(workload, name=f"{__name__}:workload", data_dir=tmp_path, events=Events())
        monkeypatch.setattr(host, "_programs", lambda order: Program())
        task = (await host.tasks("eval"))[0]
        order = replace(ORDER, task_id=task.task_id, split="eval", endpoint=nowhere)
        running = asyncio.create_task(host.run_episode(order))
        await was_asked.wait()
        host.cancel(order.episode_id, order.attempt)
        return await running

    outcome = asyncio.run(body())
    assert (outcome.state, outcome.reward, outcome.boundary) == ("failed", None, "deadline")
    assert "ended before its files were graded" in str(outcome.failure)
