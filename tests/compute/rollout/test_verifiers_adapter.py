"""An environment of the `verifiers` package rolls out against an episode's endpoint."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megloom.compute.rollout.dataset import load_tasks
from megloom.compute.rollout.episode import run_episode
from megloom.compute.rollout.harness import Programs
from megloom.compute.rollout.protocol import Endpoint, EpisodeOutcome
from megloom.compute.rollout.verifiers_adapter import cached, play, rows_of, rubric_reward

from .builders import ORDER, RecordedEvents, agent, book, workload


def adder() -> Any:
    """A small environment of two turns: it asks for a sum, then to say it again."""
    vf = pytest.importorskip("verifiers", reason="verifiers is not installed (extra: harness)")
    datasets = pytest.importorskip("datasets")

    class Twice(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "again"}]

    def is_right(completion: Any, answer: str, **_: Any) -> float:
        return float(completion[-1]["content"] == answer)

    data = datasets.Dataset.from_list(
        [{"question": f"{n}+{n}", "answer": str(2 * n), "info": {"n": n}} for n in (1, 2, 3)]
    )
    return Twice(
        dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[is_right], weights=[1.0]), max_turns=2
    )


class Handler(BaseHTTPRequestHandler):
    """Answers every request with "4"."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked: list[Any] = self.server.asked  # type: ignore[attr-defined]
        asked.append((self.path, self.headers["Authorization"], body))
        message = {"role": "assistant", "content": "4"}
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
def endpoint() -> Iterator[tuple[Endpoint, list[Any]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.asked = []  # type: ignore[attr-defined]
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    base = f"http://127.0.0.1:{server.server_port}/r/x/e/e/a/0"
    try:
        yield Endpoint(openai_url=f"{base}/v1", anthropic_url=base, token="secret"), server.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_environment_plays_its_turns_through_the_endpoint_and_its_rubric_is_the_reward(
    tmp_path: Path,
) -> None:
    load = cached(adder)
    tasks = dict(load_tasks(rows_of(load, "train"), split="train", cache=tmp_path / "rows.parquet"))
    by_answer = {task.ground_truth: task for task in tasks.values()}
    assert {task.prompt for task in tasks.values()} == {"1+1", "2+2", "3+3"}
    system = workload(
        agents={"solver": agent()},
        workflow=play(load, agent="solver"),
        reward=rubric_reward,
        uses_gateway=True,
    )

    async def run(task: Any, place: Endpoint) -> EpisodeOutcome:
        own = Programs(
            episode_id="e",
            agents=["solver"],
            endpoint=place,
            left_s=lambda: 60.0,
            slots=asyncio.Semaphore(1),
        )
        return await run_episode(system, task, ORDER, book(RecordedEvents()), programs=own)

    async def both(place: Endpoint) -> list[EpisodeOutcome]:
        return [await run(by_answer[answer], place) for answer in ("4", "6")]

    with endpoint() as (place, asked):
        right, wrong = asyncio.run(both(place))
    assert (right.state, right.reward, right.failure) == ("scored", 1.0, None)
    assert (wrong.state, wrong.reward) == ("scored", 0.0)
    assert right.metrics["rubric/is_right"] == (1.0, 1)
    paths, tokens, bodies = zip(*asked, strict=True)
    assert set(paths) == {"/r/x/e/e/a/0/v1/chat/completions"} and set(tokens) == {"Bearer secret"}
    assert [body["model"] for body in bodies] == ["solver"] * 4
    assert [message["content"] for message in bodies[1]["messages"]] == ["2+2", "4", "again"]


def test_an_environment_that_fails_is_no_zero() -> None:
    pytest.importorskip("verifiers.clients", reason="verifiers is not installed (extra: harness)")

    class Broken:
        async def run_rollout(self, *_: Any) -> dict[str, Any]:
            return {"reward": 0.0, "error": {"error": "ModelError"}}

    team = SimpleNamespace(
        endpoint=lambda name: SimpleNamespace(openai_url="http://127.0.0.1:9/v1", token="t", model=name)
    )
    task = SimpleNamespace(task_id="t7", row={"extra_info": {"rollout_input": "{}"}})
    with pytest.raises(RuntimeError, match="environment on task t7: .*ModelError"):
        asyncio.run(play(Broken, agent="solver")(task, team))  # type: ignore[arg-type]


def test_loading_is_put_off_until_a_row_is_wanted() -> None:
    loads: list[int] = []
    rows_of(cached(lambda: loads.append(1)), "train")
    assert loads == []


def test_a_rollouts_output_becomes_a_score_with_its_parts_as_metrics() -> None:
    episode = SimpleNamespace(result={"reward": 0.25, "metrics": {"form": 0.5, "num_turns": 2}})
    scored = rubric_reward(None, episode)
    assert scored.team == 0.25
    assert scored.metrics == {"rubric/form": (0.5, 1), "rubric/num_turns": (2.0, 1)}
