"""A system of two agents that share one policy, so one SGLang serves it: one is a program, one is called."""

from __future__ import annotations

from typing import Any

from megloom.compute.workload import Agent, Sampling, Score, Training
from tests.gateway_system import ask
from tests.tiny_system import POLICY, make


async def converse(task: Any, team: Any) -> str:
    first = await ask(team, "writer", task.prompt, stream=True)
    return f"{first}{(await team.critic(task.prompt, first)).text}"


def score(task: Any, episode: Any) -> Score:
    """The share of 'a' in what both wrote."""
    return Score(team=episode.result.count("a") / max(1, len(episode.result)))


workload = make(
    policies={"solver": POLICY},
    agents={
        "writer": Agent(policy="solver", prompt=lambda text: text, sampling=Sampling(max_tokens=6)),
        "critic": Agent(
            policy="solver", prompt=lambda *texts: " ".join(texts), sampling=Sampling(max_tokens=4)
        ),
    },
    workflow=converse,
    reward=score,
    uses_gateway=True,
    demonstrate=None,
    training=Training(tasks_per_step=3, group_size=3, micro_batch_groups=1, eval_draws=1),
)
