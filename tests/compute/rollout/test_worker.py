"""The worker's side of programs: the time that they have, and what a cancelled attempt still gives."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from megloom.compute.rollout.protocol import Endpoint, EpisodeOutcome
from megloom.compute.rollout.worker import WorkloadHost, program_time_s

from .builders import ORDER, RecordedEvents, agent, workload

ENDPOINT = Endpoint(openai_url="http://127.0.0.1:9/v1", anthropic_url="http://127.0.0.1:9", token="secret")


class Events(RecordedEvents):
    def field_ready(self, field: Any) -> None:
        raise AssertionError(f"no field is declared, got {field}")


async def host_of(tmp_path: Path, workflow: Any) -> WorkloadHost:
    system = workload(
        agents={"coder": agent()},
        workflow=workflow,
        reward=lambda task, episode: float(episode.result.timed_out),
        tasks=lambda: [{"prompt": "1+2", "answer": "3"}],
        uses_gateway=True,
    )
    return WorkloadHost(system, name=f"{__name__}:workload", data_dir=tmp_path, events=Events())


async def sleep(task: Any, team: Any) -> Any:
    return await team.run(("/bin/sleep", "600"), agent="coder")


def test_programs_leave_ten_seconds_of_an_episode_or_a_quarter_of_a_short_one() -> None:
    assert program_time_s(120.0) == 110.0
    assert program_time_s(8.0) == 6.0


def test_a_program_without_a_deadline_of_its_own_ends_before_its_episode(tmp_path: Path) -> None:
    async def body() -> EpisodeOutcome:
        host = await host_of(tmp_path, sleep)
        (task,) = await host.tasks("train")
        order = replace(ORDER, task_id=task.task_id, endpoint=ENDPOINT, timeout_s=0.8)
        return await host.run_episode(order)

    outcome = asyncio.run(body())
    assert (outcome.state, outcome.reward, outcome.failure) == ("scored", 1.0, None)


def test_a_cancelled_attempt_stops_its_program_and_is_scored_on_what_that_left(tmp_path: Path) -> None:
    async def body() -> EpisodeOutcome:
        host = await host_of(tmp_path, sleep)
        (task,) = await host.tasks("train")
        running = asyncio.create_task(
            host.run_episode(replace(ORDER, task_id=task.task_id, endpoint=ENDPOINT, timeout_s=600.0))
        )
        await asyncio.sleep(0)
        host.cancel(ORDER.episode_id, ORDER.attempt)
        return await running

    outcome = asyncio.run(body())
    assert (outcome.state, outcome.reward, outcome.boundary) == ("scored", 1.0, "deadline")
    assert outcome.failure == "its programs were stopped at the deadline"


def test_a_second_cancel_ends_a_workflow_that_does_not_come_to_an_end(tmp_path: Path) -> None:
    async def stubborn(task: Any, team: Any) -> Any:
        await sleep(task, team)
        await asyncio.sleep(600)

    async def body() -> EpisodeOutcome:
        host = await host_of(tmp_path, stubborn)
        (task,) = await host.tasks("train")
        running = asyncio.create_task(
            host.run_episode(replace(ORDER, task_id=task.task_id, endpoint=ENDPOINT, timeout_s=600.0))
        )
        await asyncio.sleep(0)
        host.cancel(ORDER.episode_id, ORDER.attempt)
        host.cancel(ORDER.episode_id, ORDER.attempt)
        return await running

    outcome = asyncio.run(body())
    assert (outcome.state, outcome.boundary) == ("failed", "deadline")


def test_an_attempt_without_programs_is_cancelled_at_once(tmp_path: Path) -> None:
    async def waits(task: Any, team: Any) -> Any:
        await asyncio.sleep(600)

    async def body() -> EpisodeOutcome:
        host = await host_of(tmp_path, waits)
        (task,) = await host.tasks("train")
        running = asyncio.create_task(host.run_episode(replace(ORDER, task_id=task.task_id)))
        await asyncio.sleep(0)
        host.cancel(ORDER.episode_id, ORDER.attempt)
        return await running

    assert asyncio.run(body()).boundary == "deadline"
