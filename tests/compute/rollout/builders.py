"""Builders of small workloads, books and answers for the rollout tests."""

from __future__ import annotations

from typing import Any

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.rollout.protocol import CallAnswer, CallOpened, CallPrompt, EpisodeOrder
from megloom.compute.rollout.team import CallBook
from megloom.compute.simulation.backend import ByteChat
from megloom.compute.workload import Agent, Optimizer, Policy, PretrainedModel, Sampling, Training, Workload

POLICY = Policy(
    model=PretrainedModel(path="unused"), algorithm=Grpo(name="grpo"), optimizer=Optimizer(learning_rate=1e-3)
)
ORDER = EpisodeOrder(episode_id="g1-m000", task_id="t", split="train", attempt=0)


class RecordedEvents:
    """Keeps what a worker announces."""

    def __init__(self) -> None:
        self.opened: list[CallOpened] = []
        self.prompts: list[CallPrompt] = []

    def call_opened(self, call: CallOpened) -> None:
        self.opened.append(call)

    def call_prompt(self, prompt: CallPrompt) -> None:
        self.prompts.append(prompt)


def agent(prompt: Any = lambda *parts: " ".join(parts)) -> Agent:
    return Agent(policy="p", prompt=prompt, sampling=Sampling(max_tokens=8))


def workload(**overrides: Any) -> Workload:
    async def solve(task: Any, team: Any) -> Any:
        return await team.planner(task.prompt)

    values: dict[str, Any] = {
        "name": "tiny",
        "policies": {"p": POLICY},
        "agents": {"planner": agent(), "solver": agent(), "verifier": agent()},
        "workflow": solve,
        "reward": lambda task, episode: 1.0,
        "tasks": "unused",
        "eval_tasks": "unused",
        "training": Training(tasks_per_step=1, group_size=2),
    }
    return Workload(**{**values, **overrides})


def book(events: RecordedEvents, **agents: Agent) -> CallBook:
    return CallBook(
        prefix="g1-m000-a0",
        episode_id="g1-m000",
        agents=agents or {"planner": agent(), "solver": agent(), "verifier": agent()},
        chats={"p": ByteChat()},
        events=events,
    )


def answer(name: str, text: str = "ok", *, failure: str | None = None) -> CallAnswer:
    return CallAnswer(
        invocation_id=name,
        token_ids=tuple(text.encode()),
        finish_reason="stop",
        failure=failure,
    )
