"""The real conductor in virtual time: faults change only the time, and a seed replays byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.conductor.config import SessionConfig
from megloom.compute.graph.records import CellIntervalRecord
from megloom.compute.simulation.backend import Faults
from megloom.compute.simulation.cells import Costs
from megloom.compute.simulation.run import Simulated, simulate
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.simulation.team import simulated_team
from megloom.compute.workload import Demonstration, Training

FAULTS = Faults(engine_deaths={"engine/solver/0": (10.0, 40.0)}, hang_probability=0.003)


def run(
    *,
    steps: int,
    seed: int = 1,
    faults: Faults = FAULTS,
    store: MemoryStore | None = None,
    mode: str = "frozen",
    engines: int = 1,
    costs: Costs | None = None,
    duration_s: float | None = None,
    workflow: Any = None,
    **training: Any,
) -> Simulated:
    values: dict[str, Any] = {
        "tasks_per_step": 2,
        "group_size": 2,
        "micro_batch_groups": 1,
        "call_timeout_s": 5,
    }
    workload = simulated_team(Training.parse({**values, **training}))
    config = SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": "sim",
            "steps": steps,
            "seed": seed,
            "mode": mode,
            "lease_s": 1e9,
            "duration_s": duration_s,
            "cells": {"engines_per_policy": engines},
            "training": {"eval_tasks": 2},
        }
    )
    return simulate(workload, config, faults=faults, store=store, costs=costs)


def kinds(simulated: Simulated) -> Counter[str]:
    return Counter(json.loads(line)["kind"] for line in simulated.events)


def test_two_hundred_steps_survive_a_dying_engine_and_hanging_calls_and_replay_byte_for_byte() -> None:
    first, again, other = run(steps=200), run(steps=200), run(steps=20, seed=2)
    assert (first.state, first.failure, len(first.reports)) == ("finished", None, 201)
    assert first.events == again.events
    assert first.events[: len(other.events)] != other.events
    seen = kinds(first)
    assert seen["cell_exit"] == 2 and seen["call_reentered"] > 0
    assert all(not report.failures for report in first.reports)


def test_no_fault_means_no_reentry_and_less_time() -> None:
    calm, faulty = run(steps=30, faults=Faults()), run(steps=30)
    assert kinds(calm)["call_reentered"] == 0
    assert calm.virtual_s < faulty.virtual_s


def test_every_sample_of_a_step_is_applied_once() -> None:
    store = MemoryStore(keep_steps=40)
    run(steps=30, store=store)
    for sealed in store.sealed:
        batches = sealed.records.get("micro_batches", [])
        batched = Counter(sample for batch in batches for sample in batch.sample_ids)
        samples = sealed.records.get("samples", [])
        applied = {sample.sample_id for sample in samples if sample.state == "applied"}
        assert set(batched) == applied and all(count == 1 for count in batched.values())
        assert all(sample.advantage != 0 for sample in samples if sample.state == "applied")


def test_every_call_is_recorded_with_its_edges_and_segments() -> None:
    store = MemoryStore(keep_steps=4)
    run(steps=3, store=store)
    records = store.sealed[1].records
    calls = {call.invocation_id: call for call in records["invocations"]}
    assert Counter(call.agent for call in calls.values()) == {"planner": 4, "solver": 12, "verifier": 4}
    assert len(records["edges"]) == 4 * (3 + 3)
    segments = {segment.segment_id: segment for segment in records["segments"]}
    for call in calls.values():
        assert len(segments[call.prompt_segment].token_ids) == call.num_prompt_tokens
        sampled = segments[call.completion_segment]
        assert sampled.parent == call.prompt_segment
        assert len(sampled.token_ids) == len(sampled.logprobs or []) == call.num_completion_tokens
    for edge in records["edges"]:
        assert calls[edge.parent].finished_s <= calls[edge.child].started_s


def test_gradients_begin_while_other_episodes_still_run_but_not_in_sync_mode() -> None:
    def overlaps(mode: str) -> bool:
        store = MemoryStore(keep_steps=20)
        run(steps=10, store=store, mode=mode, tasks_per_step=6)
        spans: list[CellIntervalRecord] = [
            s for step in store.sealed for s in step.records.get("cell_intervals", [])
        ]
        ends = {
            step: max(s.end_s for s in spans if s.step == step and s.role == "roll") for step in range(1, 11)
        }
        return any(s.activity == "gradient" and s.start_s < ends[s.step] for s in spans)

    assert overlaps("frozen") and not overlaps("sync")


def test_all_policies_move_together_and_each_step_is_sampled_by_one_version() -> None:
    simulated = run(steps=20)
    for report in simulated.reports[1:]:
        assert all(check.passed for check in report.checks if check.blocking)
        for policy in report.policies.values():
            if policy.trained:
                assert policy.version == (policy.parent_version or 0) + 1
    last = simulated.reports[-1].policies
    trained = {name: sum(r.policies[name].trained for r in simulated.reports) for name in last}
    assert {name: policy.version for name, policy in last.items()} == trained


def test_a_policy_without_samples_in_a_step_keeps_its_version_and_the_run_goes_on() -> None:
    simulated = run(steps=40, tasks_per_step=1)
    skipped = [r for r in simulated.reports[1:] if not all(p.trained for p in r.policies.values())]
    assert simulated.state == "finished" and skipped
    assert all(p.num_samples == 0 for r in skipped for p in r.policies.values() if not p.trained)


@pytest.mark.parametrize("duration_s", [3.0, 7.3, 11.9])
def test_a_run_that_ends_by_time_ends_with_a_full_evaluation(duration_s: float) -> None:
    simulated = run(steps=500, faults=Faults(), duration_s=duration_s)
    full = [report.step for report in simulated.reports if report.evaluation and report.evaluation.full]
    assert full == [0, simulated.reports[-1].step] and simulated.virtual_s >= duration_s


@pytest.mark.parametrize("dies_at", [1, 3, 4, 6])
def test_a_trainer_that_is_lost_in_a_step_is_replayed_and_every_sample_counts_once(dies_at: int) -> None:
    store, calm = MemoryStore(keep_steps=4), MemoryStore(keep_steps=4)
    run(steps=2, faults=Faults(), store=calm)
    lossy = run(steps=2, faults=Faults(trainer_deaths={"trainer/solver": dies_at}), store=store)
    assert (lossy.state, kinds(lossy)["trainer_lost"]) == ("finished", 1)

    def numbers(sealed: list[Any]) -> list[Any]:
        versions = [v for step in sealed for v in step.records["policy_versions"]]
        return sorted((v.policy, v.version, v.num_samples, v.num_trainable, v.grad_norm) for v in versions)

    assert numbers(store.sealed) == numbers(calm.sealed)


@pytest.mark.parametrize("dies_at", [1, 2, 4, 5, 6])
def test_a_trainer_that_is_lost_in_the_warm_start_begins_it_again(dies_at: int) -> None:
    def examples(num_per_agent: int, seed: int) -> list[Demonstration]:
        return [Demonstration(agent="solver", arguments=(str(n),), answer="7") for n in range(num_per_agent)]

    sizes = {"tasks_per_step": 1, "group_size": 2, "warm_examples": 4, "warm_batch": 2}
    workload = replace(simulated_team(Training.parse(sizes)), demonstrate=examples)
    config = SessionConfig.parse({"workload": "simulated.team:workload", "run": "warm", "steps": 0})
    store, calm = MemoryStore(), MemoryStore()
    lost = simulate(workload, config, store=store, faults=Faults(trainer_deaths={"trainer/solver": dies_at}))
    straight = simulate(workload, config, store=calm)
    assert (lost.state, kinds(lost)["trainer_lost"], straight.state) == ("finished", 1, "finished")
    for table, names in (("samples", ("sample_id", "state")), ("micro_batches", ("sample_ids",))):
        rows = [
            [getattr(r, name) for r in s.sealed[0].records[table] for name in names] for s in (store, calm)
        ]
        assert rows[0] == rows[1]


def test_a_second_engine_shares_the_calls_of_its_policy() -> None:
    store = MemoryStore(keep_steps=10)
    run(steps=5, store=store, engines=2, tasks_per_step=8)
    cells = Counter(c.cell for step in store.sealed for c in step.records.get("invocations", []))
    assert cells["engine/solver/0"] > 0 and cells["engine/solver/1"] > 0


def test_a_call_that_never_answers_ends_at_the_episodes_deadline_and_names_it() -> None:
    simulated = run(steps=2, faults=Faults(hang_probability=1.0), episode_timeout_s=3.0)
    assert simulated.state == "finished"
    assert simulated.reports[1].failures == {"deadline": 4}
    causes = [json.loads(line) for line in simulated.events if '"episode_failed"' in line]
    assert "waiting for: planner call" in causes[0]["cause"]


def test_calls_registered_while_their_parents_answer_is_on_its_way_are_not_lost() -> None:
    async def hesitant(task: Any, team: Any) -> Any:
        plan = team.planner(task.prompt)
        await asyncio.sleep(0.3)  # the planner has answered by then, and the answer has not arrived
        return await team.verifier(task.prompt, *[team.solver(task.prompt, plan) for _ in range(3)])

    instant = Costs(call_s=0.0, token_s=0.0, prompt_token_s=0.0, message_s=0.5)
    simulated = run(steps=5, costs=instant, workflow=hesitant)
    assert simulated.state == "finished"
    assert all(not report.failures for report in simulated.reports)


def test_an_engine_that_dies_again_and_again_fails_the_session_with_the_cell_and_the_cause() -> None:
    times = tuple(2.0 + 40.0 * number for number in range(30))
    simulated = run(steps=2000, faults=Faults(engine_deaths={"engine/solver/0": times}))
    assert simulated.state == "failed"
    assert simulated.failure is not None and "engine/solver/0 ended" in simulated.failure


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_faults_of_many_seeds_lose_no_sample(seed: int) -> None:
    deaths = {f"engine/{name}/0": (5.0 + seed, 30.0 + 2 * seed) for name in ("planner", "solver", "verifier")}
    faults = Faults(engine_deaths=deaths, hang_probability=0.01, seed=seed)
    simulated = run(steps=40, seed=seed, faults=faults, engines=2)
    assert simulated.state == "finished" and len(simulated.reports) == 41
    assert all(report.num_episodes == 4 for report in simulated.reports[1:])
