"""A compute service that serves scripted steps over the real HTTP API, from a thread of the test's process.

Also the builders of step reports, and a stand-in workload of three agents with a policy each. Run as a
program it serves an endless session to a Dagster instance, for looking at the UI.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megloom.compute.conductor.client import process_start
from megloom.compute.conductor.reports import (
    AgentReport,
    CheckReport,
    EvaluationReport,
    PolicyReport,
    SessionStatus,
    StepReport,
)
from megloom.compute.workload import (
    Agent,
    Algorithm,
    Optimizer,
    Policy,
    PretrainedModel,
    Sampling,
    Training,
    Workload,
)

POLICIES = ("planner", "solver", "verifier")
WORKLOAD = "tests.fake_service:workload"


async def _solve(task: Any, team: Any) -> Any:
    plan = team.planner(task.prompt)
    return await team.verifier(task.prompt, team.solver(task.prompt, plan))


workload = Workload(
    name="standin_team",
    policies={
        name: Policy(
            model=PretrainedModel(path="nowhere"),
            algorithm=Algorithm(name="grpo"),
            optimizer=Optimizer(learning_rate=1e-3),
        )
        for name in POLICIES
    },
    agents={name: Agent(policy=name, prompt=" ".join, sampling=Sampling(max_tokens=8)) for name in POLICIES},
    workflow=_solve,
    reward=lambda task, episode: 0.0,
    tasks=list,
    eval_tasks=list,
    training=Training(tasks_per_step=8, group_size=4),
)


def policy_report(step: int, name: str = "solver", **overrides: Any) -> PolicyReport:
    """A trained policy; step 0 leaves version 0, the initial weights."""
    noise = random.Random(f"{name}{step}")
    values: dict[str, Any] = {
        "trained": step > 0,
        "version": step,
        "parent_version": step - 1 if step > 0 else None,
        "uri": f"file:///store/weights/{name}/v{step:06d}",
        "digest": f"digest-{name}-{step}",
        "num_samples": 32,
        "num_trainable": 256,
        "num_micro_batches": 2 if step else 0,
        "loss": None if step == 0 else 0.4 / step + 0.05 * noise.random(),
        "grad_norm": None if step == 0 else 0.5 + noise.random(),
        "max_logprob_gap": None if step == 0 else 3e-6,
        "max_off_policy_steps": 0,
        "micro_batches": [
            {
                "position": position,
                "cell": f"train/{name}",
                "samples": 16,
                "tokens": 640,
                "trainable_tokens": 128,
                "loss_sum": 12.5,
                "seconds": 0.21,
            }
            for position in range(2 if step else 0)
        ],
    }
    return PolicyReport(**{**values, **overrides})


def evaluation_report(step: int, **overrides: Any) -> EvaluationReport:
    values: dict[str, Any] = {
        "num_tasks": 100,
        "num_draws": 1,
        "full": False,
        "accuracy": (100 * (1 - math.exp(-step / 12)), 100),
        "rates": {"verifier/agrees": (71.0, 100), "planner/valid": (90.0, 100)},
        "versions": dict.fromkeys(POLICIES, step),
        "num_failed": 0,
        "num_invocations": 300,
        "seconds": 1.9,
    }
    return EvaluationReport(**{**values, **overrides})


def step_report(step: int, run: str = "demo", **overrides: Any) -> StepReport:
    """A step of three policies; step 0 is the start, without episodes."""
    noise = random.Random(step).random()
    values: dict[str, Any] = {
        "run": run,
        "step": step,
        "kind": "train" if step else "start",
        "started_s": 4.0 * step,
        "finished_s": 4.0 * step + 3.5,
        "reward": (32 * min(1.0, 0.1 + 0.03 * step + 0.1 * noise), 32) if step else (0.0, 0),
        "num_tasks": 8,
        "num_groups": 8,
        "num_episodes": 32 if step else 0,
        "num_invocations": 96 if step else 0,
        "num_prompt_tokens": 3100,
        "num_completion_tokens": 770,
        "failures": {"timeout": 1} if step % 3 == 2 else {},
        "seconds_by_activity": {"roll": 5.2, "gradient": 1.3, "update": 0.2, "publish": 0.1},
        "agents": {
            name: AgentReport(
                num_calls=32,
                num_tokens=256,
                reward=(9.5, 32),
                rates={f"{name}/valid": (30.0, 32)},
            )
            for name in POLICIES
        },
        "policies": {name: policy_report(step, name) for name in POLICIES},
        "checks": [
            CheckReport(name="graph_acyclic", passed=True, blocking=True, detail="96 vertices, 64 edges"),
            CheckReport(name="finite_gradient", passed=True, blocking=True, detail="3 of 3 policies"),
            CheckReport(name="all_committed", passed=True, blocking=True, detail="3 of 3 policies"),
            CheckReport(name="reward_varies", passed=True, blocking=False, detail="6 of 8 groups"),
            CheckReport(name="truncation", passed=step != 3, blocking=False, detail="4 of 96 calls cut"),
        ],
        "evaluation": evaluation_report(step) if step % 2 == 0 else None,
        "timeline": _timeline(step),
        "meg_uri": f"file:///store/meg/{run}/step={step:06d}",
        "config_hash": "c0ffee0123456789",
        "code_hash": "5eed5eed5eed5eed",
        "epoch": 1,
        "wall_time": "2026-01-01T00:00:00+00:00",
    }
    return StepReport(**{**values, **overrides})


def step_reports(num_steps: int, run: str = "demo") -> list[StepReport]:
    """The start and `num_steps` training steps."""
    return [step_report(step, run) for step in range(num_steps + 1)]


def _timeline(step: int) -> list[dict[str, Any]]:
    noise, intervals = random.Random(step), []
    for name in POLICIES:
        for i in range(20):
            start = 4.0 * step + 0.14 * i + 0.05 * noise.random()
            roll = {"cell": f"roll/{name}/0", "activity": "roll", "start_s": start, "end_s": start + 0.12}
            intervals.append({**roll, "role": "ROLL", "policy": name})
        for i, activity in enumerate(("gradient", "gradient", "update", "publish")):
            start = 4.0 * step + 1.4 + 0.5 * i
            train = {"cell": f"train/{name}", "activity": activity, "start_s": start, "end_s": start + 0.4}
            intervals.append({**train, "role": "TRAIN", "policy": name})
    return intervals


@dataclass
class FakeService:
    """Serves `reports` as one session of any name; only the first `num_released` are committed yet.

    When all are released the session is finished, or failed if `failure` is set. `on_steps` is called at each
    poll with the number of polls so far. Written to by the test and by the server's threads, under `changed`.
    """

    home: Path = Path("nowhere")
    reports: Sequence[StepReport] = ()
    num_released: int | None = None
    failure: str | None = None
    refusal: str | None = None
    waiting_for: str | None = None
    on_steps: Callable[[int], None] = lambda num_polls: None
    started: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    paused: bool = False
    num_polls: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def release(self, num_reports: int) -> None:
        with self.changed:
            self.num_released = num_reports
            self.changed.notify_all()

    def committed(self) -> Sequence[StepReport]:
        return self.reports[: self.num_released]

    def status(self) -> dict[str, Any]:
        config = self.started[-1] if self.started else {"run": "none", "workload": WORKLOAD, "steps": 0}
        reports = self.committed()
        ended = len(reports) == len(self.reports)
        state = "paused" if self.paused else "running"
        if ended:
            state = "failed" if self.failure else "finished"
        return asdict(
            SessionStatus(
                run=config["run"],
                workload=config["workload"],
                state="cancelled" if self.cancelled else state,
                step=reports[-1].step if reports else -1,
                target_steps=config["steps"],
                config_hash="c0ffee0123456789",
                code_hash="5eed5eed5eed5eed",
                policies=list(POLICIES),
                agents={name: name for name in POLICIES},
                versions={},
                num_tasks=500,
                num_eval_tasks=100,
                store_root="/store",
                failure=self.failure if ended else None,
                waiting_for=self.waiting_for,
            )
        )

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """The status code and body of one request; a route that is not there is 404."""
        url = urllib.parse.urlsplit(path)
        with self.changed:
            match method, url.path.strip("/").split("/"):
                case "GET", ["health"]:
                    return 200, {"status": "ok"}
                case "POST", ["sessions"]:
                    return self._start(body)
                case "GET", ["sessions"]:
                    return 200, {"sessions": [self.status()] if self.started else []}
                case "GET", ["sessions", _]:
                    return 200, self.status()
                case "POST", ["sessions", run, "cancel"]:
                    self.cancelled.append(run)
                    return 200, self.status()
                case "GET", ["sessions", _, "steps"]:
                    return 200, self._steps(dict(urllib.parse.parse_qsl(url.query)))
        return 404, {"error": f"no route {method} {url.path}"}

    def _start(self, config: dict[str, Any]) -> tuple[int, Any]:
        if self.refusal:
            return 409, {"error": self.refusal}
        self.started.append(config)
        self.paused = False
        return 200, self.status()

    def _steps(self, query: Mapping[str, str]) -> dict[str, Any]:
        self.num_polls += 1
        self.on_steps(self.num_polls)
        after, deadline = int(query["after"]), time.monotonic() + float(query["wait_s"])
        while not self._later(after) and self.status()["state"] == "running":
            if not self.changed.wait(deadline - time.monotonic()):
                break
        return {"status": self.status(), "steps": [report.to_json() for report in self._later(after)]}

    def _later(self, after: int) -> list[StepReport]:
        return [report for report in self.committed() if report.step > after]


@contextlib.contextmanager
def serving(service: FakeService) -> Iterator[FakeService]:
    """Runs the service on a free port until the block ends, its address and token in its home."""
    token = secrets.token_hex(16)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            code, answer = 401, {"error": "wrong token"}
            if self.headers.get("Authorization") == f"Bearer {token}":
                code, answer = service.answer(method, self.path, body)
            text = json.dumps(answer).encode()
            with contextlib.suppress(BrokenPipeError):  # an interrupted client has gone
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="fake-service", daemon=True).start()
    service.home.mkdir(parents=True, exist_ok=True)
    (service.home / "service.token").write_text(token)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    pid = os.getpid()
    address = {"url": url, "pid": pid, "started": process_start(pid), "epoch": 1}
    (service.home / "service.json").write_text(json.dumps(address))
    try:
        yield service
    finally:
        (service.home / "service.json").unlink()
        server.shutdown()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description="serves one scripted session, a step per interval")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--run", default="demo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--interval-s", type=float, default=1.0)
    arguments = parser.parse_args()
    service = FakeService(arguments.home, step_reports(arguments.steps, arguments.run), num_released=0)
    with serving(service):
        while True:
            time.sleep(arguments.interval_s)
            if service.started and (service.num_released or 0) < len(service.reports):
                service.release((service.num_released or 0) + 1)


if __name__ == "__main__":
    main()
