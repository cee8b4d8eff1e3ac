"""`Policy(trained=False)` in a whole session: it is sampled and recorded as any other, and never trained."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.simulation.run import Simulated, simulate
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.simulation.team import simulated_team
from megloom.compute.workload import Score, Training

STEPS, NUM_EPISODES, NUM_SOLVERS = 6, 2 * 4, 3
FROZEN, LEARNER = "planner", "solver"


async def plan_and_solve(task: Any, team: Any) -> Any:
    plan = team.planner(task.prompt)
    tries = [team.solver(task.prompt, plan) for _ in range(NUM_SOLVERS)]
    return [await call for call in tries]


def digits(task: Any, episode: Any) -> Score:
    """Every call has a reward of its own, the frozen agent's too."""
    calls = {call.invocation_id: float(sum(map(int, call.text))) for call in episode.calls}
    return Score(team=sum(calls.values()), calls=calls)


def run(store: MemoryStore, mode: str) -> Simulated:
    training = Training(tasks_per_step=2, group_size=4, micro_batch_groups=1)
    team = simulated_team(training)
    workload = replace(
        team,
        policies={
            FROZEN: team.policies[FROZEN].model_copy(update={"trained": False}),
            LEARNER: team.policies[LEARNER],
        },
        agents={name: team.agents[name] for name in (FROZEN, LEARNER)},
        workflow=plan_and_solve,
        reward=digits,
    )
    config = SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": "frozen",
            "steps": STEPS,
            "mode": mode,
            "lease_s": 1e9,
            "training": {"eval_tasks": 1},
        }
    )
    return simulate(workload, config, store=store)


@pytest.fixture(scope="module", params=["frozen", "sync"])
def ended(request: pytest.FixtureRequest) -> tuple[Simulated, MemoryStore]:
    store = MemoryStore(keep_steps=STEPS + 1)
    simulated = run(store, request.param)
    assert (simulated.state, simulated.failure, len(store.sealed)) == ("finished", None, STEPS + 1)
    return simulated, store


def records(store: MemoryStore, table: str) -> list[Any]:
    return [record for step in store.sealed for record in step.records.get(table, [])]


def test_its_calls_and_what_it_sampled_are_stored(ended: tuple[Simulated, MemoryStore]) -> None:
    _, store = ended
    for sealed in store.sealed[1:]:
        trained = {e.episode_id for e in sealed.records["episodes"] if e.purpose == "train"}
        calls = [call for call in sealed.records["invocations"] if call.episode_id in trained]
        assert Counter(call.agent for call in calls) == {
            FROZEN: NUM_EPISODES,
            LEARNER: NUM_EPISODES * NUM_SOLVERS,
        }
        segments = {segment.segment_id: segment for segment in sealed.records["segments"]}
        for call in calls:
            answer = segments[call.completion_segment]
            assert call.state == "done" and call.reward is not None and call.num_completion_tokens > 0
            assert len(answer.token_ids) == len(answer.logprobs) == call.num_completion_tokens
            assert answer.version_spans[-1][2] == call.num_completion_tokens


def test_it_is_sampled_by_version_0_and_makes_no_other(ended: tuple[Simulated, MemoryStore]) -> None:
    simulated, store = ended
    versions = records(store, "policy_versions")
    assert [version.version for version in versions if version.policy == FROZEN] == [0]
    sampled = {(c.version_min, c.version_max) for c in records(store, "invocations") if c.agent == FROZEN}
    assert sampled == {(0, 0)}
    assert FROZEN not in {name for report in simulated.reports[1:] for name in report.policies}


def test_nothing_of_it_is_trained(ended: tuple[Simulated, MemoryStore]) -> None:
    simulated, store = ended
    assert {sample.policy for sample in records(store, "samples")} == {LEARNER}
    batches = records(store, "micro_batches")
    assert batches and {batch.policy for batch in batches} == {LEARNER}
    owned = {call for sample in records(store, "samples") for call in sample.invocation_ids}
    agents = {call.invocation_id: call.agent for call in records(store, "invocations")}
    assert {agents[call] for call in owned} == {LEARNER}
    of_it = {line["kind"] for line in map(json.loads, simulated.events) if line.get("policy") == FROZEN}
    assert of_it <= {"trainer_bound", "trainer_offloaded"}, "its trainer made version 0, and nothing else"
    at_work = {interval.policy for interval in records(store, "cell_intervals") if interval.role == "train"}
    assert at_work == {LEARNER}


def test_the_other_is_trained_at_every_step(ended: tuple[Simulated, MemoryStore]) -> None:
    simulated, store = ended
    assert all(report.policies[LEARNER].trained for report in simulated.reports[1:])
    versions = [v.version for v in records(store, "policy_versions") if v.policy == LEARNER]
    assert versions == list(range(STEPS + 1))
    applied = [sample for sample in records(store, "samples") if sample.state == "applied"]
    assert {sample.step for sample in applied} == set(range(1, STEPS + 1))
