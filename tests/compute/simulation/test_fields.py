"""Late fields through the real conductor in virtual time: a judge that is slow, fails, or hangs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.graph.records import FieldRecord, SampleRecord
from megloom.compute.simulation.run import Simulated, simulate
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.simulation.team import simulated_team
from megloom.compute.workload import Training, Workload

JUDGE_S = 7.0


def judged_team(judge: Any, *, field_timeout_s: float = 60.0) -> Workload:
    """The modelled team, whose solver is rewarded by a field that comes after the episode."""
    training = Training(tasks_per_step=2, group_size=2, micro_batch_groups=1, field_timeout_s=field_timeout_s)
    team = simulated_team(training)
    solver = team.policies["solver"].model_copy(update={"algorithm": Grpo(reward_field="judge")})
    return replace(team, policies={**team.policies, "solver": solver}, fields={"judge": judge})


def run(workload: Workload, store: MemoryStore) -> Simulated:
    config = SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": "sim",
            "steps": 2,
            "lease_s": 1e9,
            "training": {"eval_tasks": 1},
        }
    )
    return simulate(workload, config, store=store)


async def slow_judge(task: Any, episode: Any) -> Any:
    await asyncio.sleep(JUDGE_S)
    return {call.invocation_id: 10.0 + len(call.text) % 3 for call in episode.calls}


def records(store: MemoryStore, table: str) -> list[Any]:
    return [record for sealed in store.sealed for record in sealed.records.get(table, [])]


def test_the_loss_waits_for_the_late_score_and_uses_it_as_the_reward() -> None:
    store = MemoryStore(keep_steps=4)
    simulated = run(judged_team(slow_judge), store)
    assert (simulated.state, simulated.failure) == ("finished", None)
    fields: list[FieldRecord] = records(store, "fields")
    values = {field.invocation_id: json.loads(field.value or "null") for field in fields}
    assert len(values) == 2 * 4 * 5 and all(field.is_ready for field in fields)
    samples: list[SampleRecord] = records(store, "samples")
    solver = [sample for sample in samples if sample.policy == "solver"]
    assert len(solver) == 2 * 4 * 3
    assert all(sample.reward == values[sample.invocation_id] for sample in solver)
    assert all(sample.reward in (0.0, 1.0) for sample in samples if sample.policy != "solver")
    ended = {episode.episode_id: episode.finished_s for episode in records(store, "episodes")}
    calls = {call.invocation_id: call.episode_id for call in records(store, "invocations")}
    assert all(field.ready_s >= ended[calls[field.invocation_id]] + JUDGE_S - 1e-6 for field in fields)


def test_policies_that_do_not_need_the_field_do_not_wait_for_it() -> None:
    store = MemoryStore(keep_steps=4)
    run(judged_team(slow_judge), store)
    batches = [batch for batch in records(store, "micro_batches") if batch.step == 1]
    first = {
        policy: min((b.started_s for b in batches if b.policy == policy), default=None)
        for policy in ("planner", "solver", "verifier")
    }
    assert first["solver"] is not None
    others = [first[name] for name in ("planner", "verifier") if first[name] is not None]
    assert others and min(others) < first["solver"] - JUDGE_S / 2


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [("raises", "judge raised ValueError: no verdict"), ("hangs", "not ready within 5 s")],
)
def test_a_field_that_never_comes_is_recorded_with_its_cause_and_its_calls_leave(
    behaviour: str, cause: str
) -> None:
    async def judge(task: Any, episode: Any) -> float:
        if behaviour == "raises":
            raise ValueError("no verdict")
        await asyncio.Event().wait()
        return 0.0

    store = MemoryStore(keep_steps=4)
    simulated = run(judged_team(judge, field_timeout_s=5.0), store)
    assert (simulated.state, simulated.failure) == ("finished", None)
    fields: list[FieldRecord] = records(store, "fields")
    assert fields and all(not field.is_ready and field.source == cause for field in fields)
    assert {field.agent for field in fields} == {"solver"}
    assert not [sample for sample in records(store, "samples") if sample.policy == "solver"]
    assert {version.policy for version in records(store, "policy_versions") if version.version > 0} >= {
        "planner"
    }


def test_a_workload_whose_loss_needs_an_undeclared_field_is_refused_with_both_names() -> None:
    team = judged_team(slow_judge)
    with pytest.raises(ValueError, match="policy solver: its loss needs field 'judge' \\(declared: score\\)"):
        replace(team, fields={"score": slow_judge})
