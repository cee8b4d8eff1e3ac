"""An environment of the `verifiers` package rolls out against an episode's endpoint at a real gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megloom.compute.gateway.protocol import AgentRoute, EpisodeCounts, Sampled
from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.rollout.dataset import load_tasks
from megloom.compute.rollout.episode import run_episode
from megloom.compute.rollout.harness import Programs
from megloom.compute.rollout.protocol import EpisodeOutcome
from megloom.compute.rollout.verifiers_adapter import cached, play, rows_of, rubric_reward
from megloom.compute.workload import Workload
from tests.compute.gateway.fakes import Script, Served, pieces, served

from .builders import ORDER, RecordedEvents, agent, book, workload


def greeter() -> Any:
    """A small environment of two turns: it asks for a word, then to say it again."""
    vf = pytest.importorskip("verifiers", reason="verifiers is not installed (extra: harness)")
    datasets = pytest.importorskip("datasets")

    class Twice(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "again"}]

    def is_right(completion: Any, answer: str, **_: Any) -> float:
        return float(completion[-1]["content"] == answer)

    words = {"greet": "hello", "part": "goodbye", "thank": "thanks"}
    data = datasets.Dataset.from_list(
        [
            {"question": question, "answer": answer, "info": {"n": n}}
            for n, (question, answer) in enumerate(words.items())
        ]
    )
    return Twice(
        dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[is_right], weights=[1.0]), max_turns=2
    )


def split(chat: ChatTemplate) -> tuple[int, ...]:
    """ "hello" as the engine samples it; an encoder would write one token."""
    return (*chat.encode("he"), *chat.encode("llo"), chat.stop_ids[0])


def says_hello(chat: ChatTemplate) -> Script:
    return lambda ask: pieces(split(chat))


async def play_one(world: Served, system: Workload, task: Any, episode_id: str) -> EpisodeOutcome:
    """Runs an episode whose agent is behind the gateway."""
    route = AgentRoute(policy="p", max_tokens=16, temperature=1.0)
    own = Programs(
        episode_id=episode_id,
        agents=["solver"],
        endpoint=await world.admit(episode_id, agents={"solver": route}),
        left_s=lambda: 60.0,
        slots=asyncio.Semaphore(1),
    )
    return await run_episode(system, task, ORDER, book(RecordedEvents()), programs=own)


async def check_calls(world: Served, episode_id: str, prompt: str) -> None:
    """Two turns of one conversation, token for token, and nothing else."""
    first, second = [call for call in world.desk.calls.values() if call.episode_id == episode_id]
    asked = [{"role": "user", "content": prompt}]
    more = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "again"}]
    assert (first.agent, first.parents) == ("solver", ())
    assert first.prompt_ids == world.chat.encode(world.chat.render(asked))
    assert (second.agent, second.parents) == ("solver", ((first.invocation_id, "extends"),))
    path = first.prompt_ids + split(world.chat)
    assert second.prompt_ids[: len(path)] == path
    assert world.chat.decode_all(second.prompt_ids) == world.chat.render(asked + more)
    for call in (first, second):
        end = world.desk.end_of(call.invocation_id)
        assert end.sampled == Sampled(
            token_ids=split(world.chat), logprobs=(-0.25, -0.251, -0.252), version_spans=((3, 0, 3),)
        )
        assert (end.text, end.finish_reason, end.failure, end.unusable) == ("hello", "stop", None, None)
    assert [ask.prompt_ids for ask in world.engine.asks[-2:]] == [first.prompt_ids, second.prompt_ids]
    counts = await world.gateway.close_episode(episode_id, 0)
    assert counts == EpisodeCounts(num_calls=2, num_failed=0, num_unusable=0, num_branches=0, late=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_environment_plays_its_turns_through_the_gateway_and_its_rubric_is_the_reward(
    tmp_path: Path,
) -> None:
    load = cached(greeter)
    tasks = dict(load_tasks(rows_of(load, "train"), split="train", cache=tmp_path / "rows.parquet"))
    by_answer = {task.ground_truth: task for task in tasks.values()}
    assert {task.prompt for task in tasks.values()} == {"greet", "part", "thank"}
    system = workload(
        agents={"solver": agent()},
        workflow=play(load, agent="solver"),
        reward=rubric_reward,
        uses_gateway=True,
    )

    async def scenario() -> list[EpisodeOutcome]:
        outcomes = []
        async with served(tmp_path / "chat", says_hello) as world:
            for number, answer in enumerate(("hello", "goodbye")):
                episode_id = f"g000000-0000-m00{number}"
                outcomes.append(await play_one(world, system, by_answer[answer], episode_id))
                await check_calls(world, episode_id, by_answer[answer].prompt)
            assert len(world.desk.calls) == 4
        return outcomes

    right, wrong = asyncio.run(scenario())
    assert (right.state, right.reward, right.failure) == ("scored", 1.0, None)
    assert (wrong.state, wrong.reward, wrong.failure) == ("scored", 0.0, None)
    assert right.metrics["rubric/is_right"] == (1.0, 1)


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
