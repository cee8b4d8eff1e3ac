"""`team.run` and `team.endpoint`: an unchanged program calls its episode, and what it left is scored."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from megloom.compute.rollout.episode import run_episode
from megloom.compute.rollout.harness import Programs
from megloom.compute.rollout.loading import plan_of
from megloom.compute.rollout.protocol import Endpoint, EpisodeOutcome
from megloom.compute.workload import HarnessResult, Score

from .builders import ORDER, RecordedEvents, agent, book, workload

TASK = SimpleNamespace(task_id="t", prompt="1+2", ground_truth="3", row={})
TOKEN = "secret-of-the-episode"
ASK = """
import json, os, pathlib, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "1+2"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as reply:
    text = json.load(reply)["choices"][0]["message"]["content"]
pathlib.Path("answer.txt").write_text(text)
print("asked with", os.environ["OPENAI_API_KEY"])
"""
PROGRAM = (sys.executable, "-I", "ask.py")


class Stub(ThreadingHTTPServer):
    """Answers "3" and remembers what it was asked: path, authorization, body."""

    daemon_threads = True
    asked: list[tuple[str, str | None, Any]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, Stub)
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": "3"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def stub() -> Iterator[tuple[Stub, Endpoint]]:
    server = Stub(("127.0.0.1", 0), Handler)
    server.asked = []
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    base = f"http://127.0.0.1:{server.server_port}/r/run/e/g1-m000/a/0"
    try:
        yield server, Endpoint(openai_url=f"{base}/v1", anthropic_url=base, token=TOKEN)
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


NOWHERE = Endpoint(openai_url="http://127.0.0.1:9/v1", anthropic_url="http://127.0.0.1:9", token=TOKEN)


def programs(endpoint: Endpoint | None = NOWHERE, *, left_s: float = 60.0, slots: int = 4) -> Programs:
    return Programs(
        episode_id=ORDER.episode_id,
        agents=("planner", "coder"),
        endpoint=endpoint,
        left_s=lambda: left_s,
        slots=asyncio.Semaphore(slots),
    )


def episode(own: Programs, workflow: Any, reward: Any, **order: Any) -> EpisodeOutcome:
    system = workload(
        agents={"planner": agent(), "coder": agent()}, workflow=workflow, reward=reward, uses_gateway=True
    )

    async def body() -> EpisodeOutcome:
        calls = book(RecordedEvents())
        return await run_episode(system, TASK, replace(ORDER, **order), calls, programs=own)

    return asyncio.run(body())


def test_a_program_finds_its_endpoint_and_the_reward_sees_what_it_left() -> None:
    results: list[HarnessResult] = []

    async def solve(task: Any, team: Any) -> Any:
        return await team.run(PROGRAM, agent="coder", files={"ask.py": ASK})

    def reward(task: Any, finished: Any) -> float:
        results.append(finished.result)
        return float(finished.result.workspace["answer.txt"] == task.ground_truth.encode())

    with stub() as (server, endpoint):
        outcome = episode(programs(endpoint), solve, reward)
    assert (outcome.state, outcome.reward, outcome.failure) == ("scored", 1.0, None)
    assert server.asked == [
        (
            "/r/run/e/g1-m000/a/0/v1/chat/completions",
            f"Bearer {TOKEN}",
            {"model": "coder", "messages": [{"role": "user", "content": "1+2"}]},
        )
    ]
    assert results[0].output == "asked with ***\n", "a token never reaches a record"


def test_agents_that_only_programs_call_have_rewards_of_their_own() -> None:
    async def solve(task: Any, team: Any) -> Any:
        return None

    outcome = episode(programs(), solve, lambda task, finished: Score(team=0.5, agents={"coder": 0.25}))
    assert (outcome.reward, outcome.calls, outcome.agent_rewards) == (0.5, (), {"coder": 0.25})


def test_a_program_has_no_more_time_than_its_episode_leaves() -> None:
    async def solve(task: Any, team: Any) -> Any:
        return await team.run(("/bin/sleep", "600"), agent="coder", timeout_s=500.0)

    outcome = episode(programs(left_s=0.3), solve, lambda task, finished: float(finished.result.timed_out))
    assert (outcome.state, outcome.reward) == ("scored", 1.0)


def test_programs_that_are_told_to_stop_are_scored_and_the_outcome_says_so() -> None:
    own = programs()

    async def solve(task: Any, team: Any) -> Any:
        own.stop()
        return await team.run(("/bin/sleep", "600"), agent="coder")

    outcome = episode(own, solve, lambda task, finished: float(finished.result.timed_out))
    assert (outcome.state, outcome.reward, outcome.boundary) == ("scored", 1.0, "deadline")


def test_without_time_left_no_program_starts() -> None:
    async def solve(task: Any, team: Any) -> Any:
        return await team.run(("/bin/true",), agent="coder")

    outcome = episode(programs(left_s=0.0), solve, lambda task, finished: 1.0)
    assert outcome.state == "failed" and "no time left to run '/bin/true'" in str(outcome.failure)


def test_programs_wait_for_a_place() -> None:
    async def body() -> list[int]:
        own = programs(slots=1)
        seen: list[int] = []

        async def one() -> None:
            await own.run(("/bin/true",), agent="coder")
            seen.append(own.num_running)

        await asyncio.gather(*(one() for _ in range(3)))
        return seen

    assert max(asyncio.run(body())) <= 1


def test_an_endpoint_names_the_agent_as_its_model() -> None:
    found = programs().endpoint("coder")
    assert (found.openai_url, found.anthropic_url, found.token, found.model) == (
        NOWHERE.openai_url,
        NOWHERE.anthropic_url,
        TOKEN,
        "coder",
    )


def test_an_unknown_agent_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(LookupError, match="no agent 'codr', did you mean 'coder'"):
        programs().endpoint("codr")


def test_a_workload_without_a_gateway_is_told_what_to_declare() -> None:
    with pytest.raises(RuntimeError, match="g1-m000 has no endpoint: declare the workload with uses_gateway"):
        programs(None).endpoint("coder")


def test_a_plan_says_whether_its_workload_uses_the_gateway() -> None:
    assert plan_of(workload(uses_gateway=True), modules=()).uses_gateway
    assert not plan_of(workload(), modules=()).uses_gateway


@pytest.mark.parametrize("name", ["run", "endpoint"])
def test_an_agent_cannot_hide_a_method_of_the_team(name: str) -> None:
    with pytest.raises(ValueError, match=f"agent '{name}' would hide"):
        workload(agents={name: agent()})
