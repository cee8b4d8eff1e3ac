"""The coding system runs the unchanged program against an endpoint, and its episodes are scored."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from megloom.compute.rollout.harness import Programs
from megloom.compute.rollout.protocol import Endpoint
from megloom.compute.rollout.team import TeamHandle
from megloom.compute.workload import HarnessResult
from megloom.pipelines.systems.coding_harness import Repair, commands_in, prompt, repair, score, workload
from megloom.pipelines.systems.coding_tasks import FILE, SUBMIT, Grade, bug_of, held_out_rows
from tests.compute.rollout.builders import RecordedEvents, book

ROW = held_out_rows()[0]
TASK = SimpleNamespace(task_id="t", prompt=ROW["prompt"], ground_truth=ROW["answer"], row=ROW)
BUG = bug_of(ROW)


class Model(ThreadingHTTPServer):
    """Gives its answers in order, the last one again and again; remembers the requests."""

    daemon_threads = True
    answers: list[str]
    asked: list[Any]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, Model) and self.path.endswith("/v1/chat/completions")
        server.asked.append(body)
        text = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        message = {"role": "assistant", "content": text}
        reply = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def model(answers: Sequence[str]) -> Iterator[Model]:
    server = Model(("127.0.0.1", 0), Handler)
    server.answers, server.asked = list(answers), []
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield server
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def run_repair(answers: Sequence[str]) -> tuple[Repair, list[Any]]:
    async def body(base: str) -> Repair:
        own = Programs(
            episode_id="e",
            agents=workload.agents,
            endpoint=Endpoint(openai_url=f"{base}/v1", anthropic_url=base, token="secret"),
            left_s=lambda: 100.0,
            slots=asyncio.Semaphore(1),
        )
        return await repair(TASK, TeamHandle(book(RecordedEvents()), own))

    with model(answers) as server:
        base = f"http://127.0.0.1:{server.server_port}/r/x/e/e/a/0"
        return asyncio.run(body(base)), server.asked


needs_program = pytest.mark.skipif(
    importlib.util.find_spec("minisweagent") is None,
    reason="mini-swe-agent is not installed (extra: harness)",
)


@needs_program
@pytest.mark.slow
def test_the_unchanged_program_repairs_a_repository_through_the_endpoint() -> None:
    done, asked = run_repair([BUG.repair(BUG.right), SUBMIT])
    assert done.program.exit_code == 0, done.program.output
    assert (done.num_commands, done.has_changed, done.grade) == (1, True, Grade(works=True, passed=1.0))
    assert [request["model"] for request in asked] == ["coder", "coder"]
    turns = [[{key: m[key] for key in ("role", "content")} for m in r["messages"]] for r in asked]
    assert turns[0] == prompt(BUG.issue)
    assert turns[1] == prompt(BUG.issue, BUG.repair(BUG.right), "exit 0"), "the teacher shows the same form"
    assert score(TASK, SimpleNamespace(result=done)).team == 1.0


@needs_program
def test_words_that_are_no_command_end_the_program_and_earn_nothing() -> None:
    done, asked = run_repair(["sed sed"])
    assert len(asked) == 2 and done.num_commands == 0 and not done.has_changed
    assert score(TASK, SimpleNamespace(result=done)).team == 0.0


def result(**workspace: bytes) -> HarnessResult:
    return HarnessResult(exit_code=0, timed_out=False, over_disk=False, output="", workspace=workspace)


@pytest.mark.parametrize(
    ("num_commands", "has_changed", "works", "passed", "reward"),
    [
        (0, False, True, 0.2, 0.0),
        (1, False, True, 0.2, 0.1),
        (1, True, False, 0.0, 0.1),
        (1, True, True, 0.4, 0.2),
        (2, True, True, 1.0, 1.0),
    ],
)
def test_the_reward_has_steps_and_doing_nothing_earns_nothing(
    num_commands: int, has_changed: bool, works: bool, passed: float, reward: float
) -> None:
    done = Repair(
        program=result(),
        num_commands=num_commands,
        has_changed=has_changed,
        grade=Grade(works=works, passed=passed),
    )
    assert score(TASK, SimpleNamespace(result=done)).team == pytest.approx(reward)


@pytest.mark.parametrize("text", [b"", b"no json", b"[]", b'{"messages": 3}', b'{"messages": ["x"]}'])
def test_a_record_that_the_agent_spoilt_counts_no_command(text: bytes) -> None:
    assert commands_in(text) == 0


def test_the_repository_holds_no_test() -> None:
    assert set(BUG.files) == {FILE}
