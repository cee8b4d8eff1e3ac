"""Many policies on few trainer cells, in virtual time: slower, the same updates; a seed replays its log."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.algorithms.grpo import Grpo
from megloom.compute.conductor.config import SessionConfig
from megloom.compute.simulation import backend
from megloom.compute.simulation.backend import Faults
from megloom.compute.simulation.cells import Costs
from megloom.compute.simulation.run import Simulated, simulate
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.simulation.team import simulated_team
from megloom.compute.simulation.trainers import ModelledTrainer
from megloom.compute.workload import Agent, Optimizer, Policy, PretrainedModel, Sampling, Trainer, Training

NAMES = tuple(f"p{number}" for number in range(8))


async def ask_all(task: Any, team: Any) -> Any:
    answers = [getattr(team, name)(task.prompt) for name in NAMES]
    for answer in answers:
        await answer
    return answers[0]


def run(
    *,
    trainers: int | None,
    replicas: int = 1,
    faults: Faults | None = None,
    steps: int = 6,
    store: MemoryStore | None = None,
    idle_s: float | None = None,
    costs: Costs | None = None,
    num_tasks: int = 4,
) -> Simulated:
    sizes = {"tasks_per_step": num_tasks, "group_size": 2, "micro_batch_groups": 1, "call_timeout_s": 20}
    policy = Policy(
        model=PretrainedModel(path="simulated"),
        algorithm=Grpo(),
        optimizer=Optimizer(learning_rate=1e-3),
        trainer=Trainer(replicas=replicas),
    )
    workload = replace(
        simulated_team(Training.parse(sizes)),
        policies=dict.fromkeys(NAMES, policy),
        agents={
            name: Agent(policy=name, prompt=lambda *parts: " ".join(parts), sampling=Sampling(max_tokens=32))
            for name in NAMES
        },
        workflow=ask_all,
    )
    config = SessionConfig.parse(
        {
            "workload": "simulated.team:workload",
            "run": "groups",
            "steps": steps,
            "lease_s": 1e9,
            "cells": {"trainers": trainers, "trainer_idle_s": idle_s},
            "training": {"eval_tasks": 1},
        }
    )
    return simulate(workload, config, faults=faults or Faults(), store=store, costs=costs)


def kinds(simulated: Simulated) -> Counter[str]:
    return Counter(json.loads(line)["kind"] for line in simulated.events)


def updates(store: MemoryStore) -> list[Any]:
    """What every update consumed: times aside, all that the trainers did."""
    versions = [version for step in store.sealed for version in step.records.get("policy_versions", [])]
    return sorted((v.policy, v.version, v.num_samples, v.num_trainable, v.grad_norm) for v in versions)


def digests(store: MemoryStore) -> dict[tuple[str, int], str]:
    """Of every version: they tell in which order its micro-batches were summed."""
    versions = [version for step in store.sealed for version in step.records.get("policy_versions", [])]
    return {(v.policy, v.version): v.digest for v in versions}


@pytest.fixture(scope="module")
def spacious() -> tuple[Simulated, list[Any]]:
    """A cell for every policy."""
    store = MemoryStore(keep_steps=10)
    return run(trainers=None, store=store), updates(store)


def test_eight_policies_on_one_cell_make_the_updates_that_they_make_on_eight(
    spacious: tuple[Simulated, list[Any]],
) -> None:
    store = MemoryStore(keep_steps=10)
    crowded = run(trainers=1, store=store)
    assert (crowded.state, crowded.failure) == ("finished", None)
    assert updates(store) == spacious[1] and crowded.virtual_s > spacious[0].virtual_s
    assert kinds(crowded)["trainer_offloaded"] >= 8 and kinds(spacious[0])["trainer_offloaded"] == 0


def test_never_more_trainers_than_cells(spacious: tuple[Simulated, list[Any]]) -> None:
    holders: dict[str, str] = {}
    for line in run(trainers=2).events:
        event = json.loads(line)
        if event["kind"] == "trainer_bound":
            holders[event["cell"]] = event["policy"]
        assert set(holders) <= {"trainers/0", "trainers/1"}
    assert set(holders) == {"trainers/0", "trainers/1"}


def test_a_steps_timeline_shows_binding_loading_and_offloading() -> None:
    store = MemoryStore(keep_steps=10)
    run(trainers=1, store=store)
    intervals = [i for step in store.sealed for i in step.records.get("cell_intervals", [])]
    activities = {interval.activity for interval in intervals if interval.role == "train"}
    assert activities == {"bind", "load", "offload", "gradient", "update", "publish"}
    assert all(interval.end_s >= interval.start_s for interval in intervals)


def test_idle_trainers_leave_and_come_back(spacious: tuple[Simulated, list[Any]]) -> None:
    store = MemoryStore(keep_steps=10)
    leaving = run(trainers=None, idle_s=0.01, store=store)
    assert updates(store) == spacious[1] and kinds(leaving)["trainer_offloaded"] > 8


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 60))]
)
def test_random_deaths_of_trainers_cost_time_and_nothing_else(
    spacious: tuple[Simulated, list[Any]], seed: int
) -> None:
    """Two deaths of each trainer at most: three in one verb are a bug by rule, and end the session."""
    rng = random.Random(seed)
    kills = {
        f"trainer/{name}": tuple(sorted(rng.uniform(0, 2 * spacious[0].virtual_s) for _ in range(2)))
        for name in NAMES[1:]
    }
    cells = rng.choice([1, 2, 3, None])
    faults = Faults(trainer_kills=kills, trainer_deaths={"trainer/p0": rng.randrange(1, 20)})
    stores = [MemoryStore(keep_steps=10), MemoryStore(keep_steps=10)]
    first, again = (run(trainers=cells, faults=faults, store=store) for store in stores)
    assert (first.state, first.failure) == ("finished", None)
    assert updates(stores[0]) == spacious[1]
    assert first.events == again.events and kinds(first)["trainer_lost"] >= 1


SLOW = Costs(gradient_token_s=0.05, trainer_start_s=0.2)  # a step's gradients take longer than its calls


@pytest.fixture(scope="module")
def calm() -> tuple[Simulated, MemoryStore]:
    """What the runs below must come to."""
    store = MemoryStore(keep_steps=10)
    return run(trainers=None, store=store, costs=SLOW, steps=3, num_tasks=10), store


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 60))]
)
def test_a_trainer_that_is_killed_again_in_its_replay_makes_the_same_versions(
    calm: tuple[Simulated, MemoryStore], seed: int
) -> None:
    """Kills come in pairs, the second while the first one's gradients are taken again; or a start fails."""
    rng, until_s = random.Random(seed), calm[0].virtual_s
    kills = {
        f"trainer/{name}": (first := rng.uniform(0, until_s), first + rng.uniform(0.3, 6))
        for name in NAMES[:5]
    } | {f"trainer/{name}": (rng.uniform(0, until_s),) for name in NAMES[5:]}
    starts = {f"trainer/{name}": (rng.randrange(2, 5),) for name in NAMES[5:]}
    store = MemoryStore(keep_steps=10)
    faults = Faults(trainer_kills=kills, trainer_no_starts=starts)
    harmed = run(
        trainers=rng.choice([4, None]), faults=faults, store=store, costs=SLOW, steps=3, num_tasks=10
    )
    assert (harmed.state, harmed.failure) == ("finished", None)
    assert updates(store) == updates(calm[1]) and digests(store) == digests(calm[1])
    assert kinds(harmed)["trainer_lost"] >= 5


def test_a_kill_after_the_publish_replaces_the_version_that_satellites_had_a_part_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replay sums in another order, so its version has another digest than the finished one."""
    slow, killed = Costs(gradient_token_s=0.3), set()

    class DiesInSave(ModelledTrainer):
        async def save(self, *, state_path: str) -> None:
            if not state_path.startswith("shelf/") and self._plan.policy not in killed:
                killed.add(self._plan.policy)
                self.die()
            await super().save(state_path=state_path)

    def versions(steps: int) -> tuple[Simulated, MemoryStore]:
        store = MemoryStore(keep_steps=10)
        return run(trainers=24, replicas=3, store=store, costs=slow, steps=steps), store

    _, whole = versions(2)
    monkeypatch.setattr(backend, "ModelledTrainer", DiesInSave)
    harmed, store = versions(2)
    assert (harmed.state, harmed.failure) == ("finished", None)
    assert updates(store) == updates(whole) and kinds(harmed)["trainer_lost"] == len(killed) == 8
    replaced = [key for key, digest in digests(store).items() if digests(whole)[key] != digest]
    assert replaced, "satellites had a part"


def test_satellites_take_their_share_and_a_dying_one_costs_nothing(
    spacious: tuple[Simulated, list[Any]],
) -> None:
    slow = Costs(gradient_token_s=0.3)
    stores = [MemoryStore(keep_steps=10) for _ in range(3)]
    alone = run(trainers=24, store=stores[0], costs=slow)
    helped = run(trainers=24, replicas=3, store=stores[1], costs=slow)
    kills = {"trainer/p3.1": tuple(3.0 + 0.7 * number for number in range(40))}
    faults = Faults(trainer_kills=kills, trainer_deaths={"trainer/p5.1": 2})
    harmed = run(trainers=24, replicas=3, store=stores[2], costs=slow, faults=faults)
    assert updates(stores[0]) == updates(stores[1]) == updates(stores[2])
    assert kinds(helped)["satellite_joined"] > 8 and kinds(harmed)["satellite_lost"] >= 1
    assert helped.virtual_s < 0.8 * alone.virtual_s
