"""Programs that call through the gateway, in virtual time: nothing is lost, nothing leaks, a seed replays."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.simulation.backend import Faults
from megloom.compute.simulation.gateway import ConnectionLost, Switchboard
from megloom.compute.simulation.run import Simulated, simulate
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.simulation.team import simulated_team
from megloom.compute.workload import Score, Training

NUM_TURNS = 3


class Harness:
    """A workflow that is a program: it converses with two agents at once, each over several turns."""

    def __init__(self) -> None:
        self.board = Switchboard()

    async def converse(self, team: Any, agent: str) -> list[str]:
        place = team.endpoint(agent)
        return [
            await self.board.call(place.openai_url, place.token, agent, f"turn {number}")
            for number in range(NUM_TURNS)
        ]

    async def run(self, task: Any, team: Any) -> list[str]:
        talks = [self.converse(team, agent) for agent in ("planner", "solver")]
        return [text for talk in await asyncio.gather(*talks) for text in talk]


def digits(task: Any, episode: Any) -> Score:
    """The verdict of what the program left, with one agent's own."""
    total = sum(int(letter) for text in episode.result or () for letter in text)
    if not episode.result:
        raise ValueError("the program left nothing")
    return Score(team=float(total % 2), agents={"solver": float(total % 3)})


def run(
    *,
    steps: int = 3,
    seed: int = 1,
    harness: Harness | None = None,
    workflow: Any = None,
    reward: Any = digits,
    faults: Faults | None = None,
    store: MemoryStore | None = None,
    cells: dict[str, int] | None = None,
    **training: Any,
) -> Simulated:
    harness = harness or Harness()
    sizes = {"tasks_per_step": 2, "group_size": 2, "micro_batch_groups": 1, "call_timeout_s": 5}
    workload = replace(
        simulated_team(Training.parse({**sizes, **training})),
        workflow=workflow or harness.run,
        reward=reward,
        uses_gateway=True,
    )
    config = SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": "sim",
            "steps": steps,
            "seed": seed,
            "lease_s": 1e9,
            "cells": cells or {},
            "training": {"eval_tasks": 2},
        }
    )
    return simulate(workload, config, faults=faults, store=store, switchboard=harness.board)


def lines(simulated: Simulated, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, simulated.events) if line["kind"] == kind]


def records(store: MemoryStore, table: str) -> list[Any]:
    return [record for step in store.sealed for record in step.records.get(table, [])]


def test_calls_of_programs_are_recorded_trained_and_replayed_like_calls_of_workflows() -> None:
    store = MemoryStore(keep_steps=4)
    first, again = run(store=store), run()
    assert (first.state, first.failure) == ("finished", None)
    assert first.events == again.events
    calls = [call for call in records(store, "invocations") if call.step == 1]
    by_purpose = Counter((call.agent, call.state) for call in calls if not call.episode_id.startswith("e"))
    assert by_purpose == {("planner", "done"): 4 * NUM_TURNS, ("solver", "done"): 4 * NUM_TURNS}
    assert all(call.text.isdigit() and call.reward is not None for call in calls)
    extends = [edge for edge in records(store, "edges") if edge.kind == "extends" and edge.step == 1]
    assert len(extends) == len(calls) // NUM_TURNS * (NUM_TURNS - 1)
    assert any(sample.state == "applied" for sample in records(store, "samples"))


def test_each_token_of_a_conversation_is_stored_once() -> None:
    store = MemoryStore(keep_steps=2)
    run(steps=1, store=store)
    segments = {segment.segment_id: segment for segment in records(store, "segments")}
    for call in records(store, "invocations"):
        path, segment, num_tokens = call.prompt_segment, segments[call.prompt_segment], 0
        while segment is not None:
            path, num_tokens = segment.parent, num_tokens + len(segment.token_ids)
            segment = segments.get(path) if path else None
        assert num_tokens == call.num_prompt_tokens, call.invocation_id


def test_an_agents_own_reward_counts_for_its_calls_and_the_teams_for_the_others() -> None:
    store = MemoryStore(keep_steps=4)
    run(steps=2, store=store)
    episodes = {episode.episode_id: episode for episode in records(store, "episodes")}
    calls = records(store, "invocations")
    solvers = [call for call in calls if call.agent == "solver"]
    assert {call.reward for call in calls if call.agent == "planner"} <= {0.0, 1.0}
    assert any(call.reward != episodes[call.episode_id].reward for call in solvers)
    for call in calls:
        if call.agent == "planner":
            assert call.reward == episodes[call.episode_id].reward


def test_an_engine_that_dies_in_mid_answer_costs_no_call_and_no_token() -> None:
    deaths = {"engine/solver/0": (2.35, 5.7), "engine/planner/0": (4.1,)}
    store = MemoryStore(keep_steps=9)
    simulated = run(steps=8, faults=Faults(engine_deaths=deaths), store=store, tasks_per_step=4)
    assert simulated.state == "finished"
    assert lines(simulated, "call_reentered") and not lines(simulated, "episode_failed")
    segments = {segment.segment_id: segment for segment in records(store, "segments")}
    resumed = [call for call in records(store, "invocations") if call.num_reentries]
    assert resumed
    for call in resumed:
        answer = segments[call.completion_segment]
        assert len(answer.token_ids) == len(answer.logprobs) == answer.version_spans[-1][2]


def test_a_lost_gateway_costs_attempts_and_no_episode() -> None:
    store = MemoryStore(keep_steps=9)
    faults = Faults(gateway_deaths={"gateway/0": (2.3, 5.0)})
    simulated = run(steps=6, faults=faults, store=store, tasks_per_step=4)
    assert (simulated.state, simulated.failure) == ("finished", None)
    failed = lines(simulated, "episode_failed")
    assert failed and {line["boundary"] for line in failed} == {"gateway"}
    assert all(not report.failures for report in simulated.reports)
    attempts = Counter(episode.episode_id for episode in records(store, "episodes"))
    assert max(attempts.values()) == 2


def test_episodes_keep_to_their_shard_and_the_loss_of_one_spares_the_others() -> None:
    faults = Faults(gateway_deaths={"gateway/0": (2.3,)})
    simulated = run(steps=4, faults=faults, tasks_per_step=8, cells={"gateways": 2})
    assert simulated.state == "finished"
    causes = {line["cause"].split(":")[0] for line in lines(simulated, "episode_failed")}
    assert causes == {"gateway/0"}
    num_lost = len({line["episode"] for line in lines(simulated, "episode_failed")})
    assert 0 < num_lost < 16


def test_a_call_that_never_answers_is_aborted_placed_again_and_fails_with_its_last_cause() -> None:
    simulated = run(steps=1, faults=Faults(hang_probability=1.0), call_timeout_s=2.0, episode_timeout_s=60.0)
    assert simulated.state == "finished"
    assert simulated.reports[1].failures == {"workflow": 4}
    causes = [line["cause"] for line in lines(simulated, "call_failed")]
    assert causes and all("lost 3 places, the last one to" in cause for cause in causes)


def test_what_was_kept_at_the_deadline_is_scored_and_says_so() -> None:
    harness = Harness()

    async def endless(task: Any, team: Any) -> list[str]:
        answers = await harness.converse(team, "solver")
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            return answers  # what the program had left
        raise AssertionError

    store = MemoryStore()
    simulated = run(steps=1, harness=harness, workflow=endless, store=store, episode_timeout_s=20.0)
    assert simulated.reports[1].failures == {}
    episodes = [episode for episode in records(store, "episodes") if episode.purpose == "train"]
    assert {(e.state, e.failure_boundary) for e in episodes} == {("scored", "deadline")}
    assert all("waiting for: user code" in e.failure and e.reward is not None for e in episodes)
    assert len(lines(simulated, "episode_scored_in_part")) == len(records(store, "episodes"))


def test_an_outcome_after_the_grace_is_late_and_not_counted() -> None:
    async def stubborn(task: Any, team: Any) -> list[str]:
        await team.planner(task.prompt)
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            await asyncio.sleep(7.0)  # the grace is a quarter of the deadline
        return ["1"]

    store = MemoryStore(keep_steps=9)
    simulated = run(steps=2, workflow=stubborn, store=store, episode_timeout_s=20.0)
    assert simulated.reports[1].failures == {"deadline": 4}
    late = lines(simulated, "outcome_late")
    assert {(line["attempt"], line["state"]) for line in late} == {(0, "scored")}
    assert {(e.state, e.reward) for e in records(store, "episodes")} == {("failed", None)}
    assert not records(store, "samples")


def test_a_workflow_that_is_cut_is_scored_on_its_calls_if_the_reward_can() -> None:
    async def endless(task: Any, team: Any) -> None:
        await team.planner(task.prompt)
        await asyncio.sleep(1e6)

    def kept(task: Any, episode: Any) -> float:
        assert episode.result is None
        return float(len(episode.calls))

    store = MemoryStore()
    simulated = run(steps=1, workflow=endless, reward=kept, store=store, episode_timeout_s=20.0)
    assert simulated.reports[1].failures == {}
    assert {episode.reward for episode in records(store, "episodes")} == {1.0}


def test_a_program_that_made_no_call_is_a_failure_of_the_workflow_and_not_a_score() -> None:
    async def silent(task: Any, team: Any) -> list[str]:
        return ["1"]

    store = MemoryStore()
    simulated = run(steps=1, workflow=silent, store=store)
    assert simulated.reports[1].failures == {"workflow": 4}
    episodes = records(store, "episodes")
    assert {(e.state, e.reward, e.reward_status) for e in episodes} == {("failed", None, "infrastructure")}
    assert all("no call ended with an answer" in e.failure for e in episodes)


def test_a_reward_that_raises_is_asked_again_and_then_excludes_the_episode() -> None:
    tries: Counter[str] = Counter()

    def broken(task: Any, episode: Any) -> float:
        tries[task.task_id] += 1
        raise ConnectionError("the judge is away")

    store = MemoryStore()
    simulated = run(steps=1, reward=broken, store=store, reward_retries=2)
    assert simulated.reports[1].failures == {"reward": 4}
    assert {(e.state, e.reward) for e in records(store, "episodes")} == {("unscorable", None)}
    train = {name: count for name, count in tries.items() if name.startswith("train")}
    assert set(train.values()) == {2 * 3}  # two members, three tries each
    assert not records(store, "samples")


def test_a_program_that_calls_on_after_its_episode_is_refused_and_changes_nothing() -> None:
    harness, refused = Harness(), []

    async def leaves_one_behind(task: Any, team: Any) -> list[str]:
        place = team.endpoint("planner")

        async def linger() -> None:
            await asyncio.sleep(2.0)
            try:
                await harness.board.call(place.openai_url, place.token, "planner", "late")
            except ConnectionLost as error:
                refused.append(str(error))

        tasks.append(asyncio.create_task(linger()))
        return await harness.converse(team, "solver")

    tasks: list[asyncio.Task[None]] = []
    simulated = run(steps=12, harness=harness, workflow=leaves_one_behind)
    assert simulated.state == "finished" and refused
    assert all("refused" in cause for cause in refused)


@pytest.mark.parametrize("seed", range(8))
def test_random_deaths_of_engines_and_gateways_lose_no_episode(seed: int) -> None:
    faults = Faults(
        engine_deaths={"engine/solver/0": (3.1 + seed, 9.0 + seed), "engine/planner/1": (5.0 + seed / 3,)},
        gateway_deaths={"gateway/0": (2.0 + seed / 2,), "gateway/1": (4.4 + seed / 2, 4.5 + seed)},
        hang_probability=0.01,
        seed=seed,
    )
    store = MemoryStore(keep_steps=30)
    simulated = run(
        steps=12,
        seed=seed,
        faults=faults,
        store=store,
        tasks_per_step=4,
        cells={"gateways": 2, "engines_per_policy": 2},
    )
    assert (simulated.state, simulated.failure) == ("finished", None)
    assert [report.num_episodes for report in simulated.reports[1:]] == [8] * 12
    batched = Counter(name for batch in records(store, "micro_batches") for name in batch.sample_ids)
    assert all(count == 1 for count in batched.values())


def test_a_workflow_may_mix_its_own_calls_with_those_of_a_program() -> None:
    harness = Harness()

    async def mixed(task: Any, team: Any) -> list[str]:
        plan = team.planner(task.prompt)
        talk, own = await asyncio.gather(harness.converse(team, "solver"), team.solver(task.prompt, plan))
        return [*talk, own.text]

    store = MemoryStore(keep_steps=4)
    simulated = run(store=store, harness=harness, workflow=mixed)
    assert (simulated.state, simulated.failure) == ("finished", None)
    calls = [call for call in records(store, "invocations") if call.step == 1]
    trained = [call for call in calls if not call.episode_id.startswith("e")]
    per_episode = Counter((call.episode_id, call.agent) for call in trained)
    assert set(per_episode.values()) == {1, NUM_TURNS + 1} and len(per_episode) == 2 * 4
    assert len({call.invocation_id for call in trained}) == len(trained)
