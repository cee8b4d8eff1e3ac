"""The tiny system as programs: both agents are called over HTTP, one whole, one as a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from megloom.compute.workload import Score, Training, Workload
from tests.tiny_system import make, rows


async def ask(team: Any, agent: str, text: str, *, stream: bool) -> str:
    """What a client library does."""
    place = team.endpoint(agent)
    body = {"model": place.model, "messages": [{"role": "user", "content": text}], "stream": stream}
    headers = {"Authorization": f"Bearer {place.token}"}
    url = f"{place.openai_url}/chat/completions"
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as response:
        answer = await response.text()
        if response.status != 200:
            raise ConnectionError(f"status {response.status}: {answer[:300]}")
    if not stream:
        return json.loads(answer)["choices"][0]["message"]["content"] or ""
    events = [block[6:] for block in answer.split("\n\n") if block.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def converse(task: Any, team: Any) -> list[str]:
    first = await ask(team, "writer", task.prompt, stream=True)
    second = await ask(team, "critic", f"{task.prompt} {first}", stream=False)
    return [first, second]


async def linger(task: Any, team: Any) -> list[str]:
    """Long enough for a test to kill something meanwhile."""
    first = await ask(team, "writer", task.prompt, stream=False)
    await asyncio.sleep(1.0)
    return [first, await ask(team, "critic", task.prompt, stream=True)]


def score(task: Any, episode: Any) -> Score:
    """The share of 'a' in the writer's text; the critic's own text must not be empty."""
    writer, critic = episode.result
    return Score(team=writer.count("a") / max(1, len(writer)), agents={"critic": float(bool(critic))})


def system(**overrides: Any) -> Workload:
    values: dict[str, Any] = {
        "workflow": converse,
        "reward": score,
        "uses_gateway": True,
        "demonstrate": None,
        "training": Training(tasks_per_step=3, group_size=3, micro_batch_groups=1, eval_draws=1),
    }
    return make(**{**values, **overrides})


workload = system()
lingering = system(workflow=linger, eval_tasks=rows("a"))
