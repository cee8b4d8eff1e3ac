"""Trains on an environment of the `verifiers` package: its rollout calls an agent, its rubric is the reward.

    environment = cached(lambda: my_package.load_environment())
    workload = Workload(..., workflow=play(environment, agent="solver"), reward=rubric_reward,
                        tasks=rows_of(environment, "train"), eval_tasks=rows_of(environment, "eval"),
                        uses_gateway=True)

The environment runs in the workload worker with the OpenAI client of its own package. Needs the extra
`harness`; nothing of it is imported before the environment is loaded.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Literal

from megloom.compute.graph.seeds import canonical_json
from megloom.compute.workload import Rows, Score, Workflow

Load = Callable[[], Any]
KEYS = ("prompt", "answer", "info", "example_id", "task")  # of a row that a rollout reads


def cached(load: Load) -> Load:
    """The environment, loaded when it is first needed: listing a system must not load it."""
    return functools.cache(load)


def rows_of(load: Load, split: Literal["train", "eval"], num: int = -1) -> Rows:
    """The environment's own dataset as ours; -1 takes all of it. A task keeps the whole row."""

    def rows() -> list[dict[str, Any]]:
        environment = load()
        dataset = environment.get_dataset(num) if split == "train" else environment.get_eval_dataset(num)
        return [_row(dict(row)) for row in dataset]

    return rows


def play(load: Load, *, agent: str) -> Workflow:
    """A workflow: one rollout of the environment on the task. Its result is the package's rollout output."""

    async def rollout(task: Any, team: Any) -> Any:
        import openai
        from verifiers.clients import OpenAIChatCompletionsClient

        endpoint = team.endpoint(agent)
        row = json.loads(task.row["extra_info"]["rollout_input"])
        # No retry by the client: a second request is a second sample, which the environment did not ask for.
        async with openai.AsyncOpenAI(
            base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0
        ) as client:
            output = await load().run_rollout(row, OpenAIChatCompletionsClient(client), endpoint.model, {})
        if output.get("error") is not None:
            raise RuntimeError(f"environment on task {task.task_id}: {output['error']}")
        return output

    return rollout


def rubric_reward(task: Any, episode: Any) -> Score:
    """The rubric's verdict; its parts become metrics."""
    output = episode.result
    metrics = {f"rubric/{name}": (float(value), 1) for name, value in (output.get("metrics") or {}).items()}
    return Score(team=float(output["reward"]), metrics=metrics)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    own = {key: row[key] for key in KEYS if row.get(key) is not None}
    return {
        "prompt": _text(own["prompt"]),
        "answer": str(own.get("answer", "")),
        "data_source": "verifiers",
        # As text: rows of one dataset differ in their fields, and a table would give all of them to each.
        "extra_info": {"rollout_input": canonical_json(own)},
    }


def _text(prompt: Any) -> str:
    """The last message of a prompt, for readers; the rollout gets the whole."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
