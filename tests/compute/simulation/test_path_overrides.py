"""A session may take other numbers of training paths than its workload says, all of them included."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.conductor.config import SessionConfig, set_path
from megloom.compute.simulation.run import simulate
from megloom.compute.simulation.store import MemoryStore
from megloom.compute.simulation.team import simulated_team
from megloom.compute.workload import Score, Training

NUM_CALLS = 7  # more than the default number of paths
BASE = {"workload": "simulated.team:workload", "run": "paths", "steps": 1, "lease_s": 1e9}


async def ask_often(task: Any, team: Any) -> None:
    for call in [team.solver(f"{task.prompt} {number}") for number in range(NUM_CALLS)]:
        await call


def spread_out(task: Any, episode: Any) -> Score:
    """No two rewards of a group are alike but by chance, so every sample has an advantage."""
    return Score(team=0.0, calls={call.invocation_id: float(hash_of(call.text)) for call in episode.calls})


def hash_of(text: str) -> int:
    return sum(place * ord(letter) for place, letter in enumerate(text, 1))


def paths_of_an_episode(of_workload: int | None, setting: str | None) -> set[int]:
    """How many samples the training episodes of a session gave: one number if it was the same for all."""
    values: dict[str, Any] = {**BASE, "training": {"eval_tasks": 1}}
    if setting is not None:
        set_path(values, f"training.paths_per_episode={setting}")
    training = Training(tasks_per_step=2, group_size=2, paths_per_episode=of_workload)
    workload = replace(simulated_team(training), workflow=ask_often, reward=spread_out)
    store = MemoryStore(keep_steps=2)
    simulated = simulate(workload, SessionConfig.parse(values), store=store)
    assert (simulated.state, simulated.failure) == ("finished", None)
    return set(Counter(sample.episode_id for sample in store.sealed[1].records["samples"]).values())


@pytest.mark.parametrize(
    ("of_workload", "setting", "expected"),
    [
        (5, None, 5),
        (5, "null", 5),
        (5, "2", 2),
        (5, "all", NUM_CALLS),
        (2, "all", NUM_CALLS),
        (None, None, NUM_CALLS),
        (None, "3", 3),
        (2, "9", NUM_CALLS),
    ],
)
def test_an_override_replaces_the_workloads_paths(
    of_workload: int | None, setting: str | None, expected: int
) -> None:
    assert paths_of_an_episode(of_workload, setting) == {expected}


@pytest.mark.parametrize("setting", ["0", "-1", "2.5", "ALL", "every", "true x", '""', "[]"])
def test_another_value_is_refused_in_one_line(setting: str) -> None:
    values: dict[str, Any] = dict(BASE)
    set_path(values, f"training.paths_per_episode={setting}")
    with pytest.raises(ValueError, match="paths_per_episode") as refused:
        SessionConfig.parse(values)
    given = values["training"]["paths_per_episode"]
    expected = 'Value error, expected a whole number of at least 1, or "all"'
    assert str(refused.value) == f"training.paths_per_episode: {expected} (got {given!r})"


def test_all_paths_are_another_configuration_and_survive_json() -> None:
    hashes = set()
    for paths in (None, 5, "all"):
        config = SessionConfig.parse({**BASE, "training": {"paths_per_episode": paths}})
        assert SessionConfig.parse(json.loads(config.model_dump_json())) == config
        hashes.add(config.config_hash())
    assert len(hashes) == 3
