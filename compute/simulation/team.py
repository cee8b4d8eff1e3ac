"""A modelled three-agent system, shaped like the arithmetic team: a plan, three tries, a choice."""

from __future__ import annotations

from typing import Any

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.workload import (
    Agent,
    Optimizer,
    Policy,
    PretrainedModel,
    Sampling,
    Score,
    Training,
    Workload,
)


async def solve(task: Any, team: Any) -> Any:
    plan = team.planner(task.prompt)
    tries = [team.solver(task.prompt, plan) for _ in range(3)]
    return await team.verifier(task.prompt, *tries)


def score(task: Any, episode: Any) -> Score:
    """A verdict from the answers' digits: modelled engines sample digits."""
    calls = {call.invocation_id: float(_digit_sum(call.text) % 2) for call in episode.calls}
    return Score(team=float(_digit_sum(episode.result.text) % 2), calls=calls)


def _digit_sum(text: str) -> int:
    return sum(int(letter) for letter in text if letter.isdigit())


def simulated_team(training: Training) -> Workload:
    """The workload with the given step sizes."""
    policy = Policy(
        model=PretrainedModel(path="simulated"),
        algorithm=Grpo(name="grpo"),
        optimizer=Optimizer(learning_rate=1e-3),
    )
    names = ("planner", "solver", "verifier")
    return Workload(
        name="simulated_team",
        policies=dict.fromkeys(names, policy),
        agents={
            name: Agent(policy=name, prompt=lambda *parts: " ".join(parts), sampling=Sampling(max_tokens=32))
            for name in names
        },
        workflow=solve,
        reward=score,
        tasks="simulated",
        eval_tasks="simulated",
        training=training,
    )
