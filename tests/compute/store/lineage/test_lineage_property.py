"""On small random runs the index says what the raw records say, compacted or not."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.backward import version_lineage
from megloom.compute.store.lineage.compaction import compact
from megloom.compute.store.lineage.diff import lineage_diff
from megloom.compute.store.lineage.forward import reward_influence, task_influence
from megloom.compute.store.lineage.path import lineage_path
from megloom.compute.store.seal import write_step
from tests.compute.store.lineage.runs import POLICIES, Raw, random_run

places = count()  # each example has a store of its own


def seal(root: str, steps: list[list[Any]], fan_out: int | None) -> None:
    for step, records in enumerate(steps):
        seal_one(root, step, records, fan_out)


def seal_one(root: str, step: int, records: list[Any], fan_out: int | None) -> None:
    folder = Folder(root)
    write_step(folder, "r", step, records, step - 1 if step else None, {})
    if fan_out is not None:
        compact(folder, "r", step, fan_out=fan_out)


runs = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@runs
@given(seed=st.integers(0, 10**6), num_steps=st.integers(1, 7), fan_out=st.sampled_from([None, 2, 3]))
def test_the_closure_is_that_of_the_raw_records(
    build: Any, seed: int, num_steps: int, fan_out: int | None
) -> None:
    steps = random_run(build, seed, num_steps)
    root, raw = f"memory://property/{next(places)}", Raw(steps)
    seal(root, steps, fan_out)
    for key in raw.versions:
        lineage = version_lineage(root, "r", *key)
        assert {(a.policy, a.version) for a in lineage.ancestors} == raw.closure(key)
        assert {s.sample_id for s in lineage.samples} == {s.sample_id for s in raw.samples_of(key)}
        for behind in raw.closure(key):
            edges = {(e.relation, e.source): e.num_calls for e in lineage.edges if e.made == behind}
            assert edges == raw.edges_of(behind)
        for a in lineage.ancestors:
            own = raw.samples_of((a.policy, a.version)) if (a.policy, a.version) in raw.versions else []
            assert (a.num_samples, a.num_tasks) == (
                len({s.sample_id for s in own}),
                len({s.task_id for s in own if s.task_id is not None}),
            )


@runs
@given(seed=st.integers(0, 10**6), num_steps=st.integers(1, 7), fan_out=st.sampled_from([None, 2, 3]))
def test_forward_is_the_inverse_of_backward(
    build: Any, seed: int, num_steps: int, fan_out: int | None
) -> None:
    steps = random_run(build, seed, num_steps)
    root, raw = f"memory://property/{next(places)}", Raw(steps)
    seal(root, steps, fan_out)
    for task in ("t0", "t1", "t2", "t3"):
        found = task_influence(root, "r", task)
        direct = {(u.policy, u.version) for u in found.direct}
        assert direct | {(r.policy, r.version) for r in found.reached} == raw.influenced(task)
        assert direct == {k for k in raw.versions if any(s.task_id == task for s in raw.samples_of(k))}
    for reward_hash in ("h0", "h1"):
        scored = raw.scored_by(reward_hash)
        if scored:
            found = reward_influence(root, "r", reward_hash)
            assert {(u.policy, u.version) for u in found.direct} == scored
        else:
            with pytest.raises(FileNotFoundError, match=reward_hash):
                reward_influence(root, "r", reward_hash)


@runs
@given(seed=st.integers(0, 10**6), num_steps=st.integers(2, 6))
def test_there_is_a_path_exactly_where_the_closure_holds_a_version_that_the_sample_made(
    build: Any, seed: int, num_steps: int
) -> None:
    steps = random_run(build, seed, num_steps)
    root, raw = f"memory://property/{next(places)}", Raw(steps)
    seal(root, steps, None)
    goal = max(raw.versions, key=lambda key: (raw.versions[key].step, key))
    for sample in raw.samples.values():
        made = {k for k in raw.versions if sample.sample_id in {s.sample_id for s in raw.samples_of(k)}}
        path = lineage_path(root, "r", sample.sample_id, goal)
        assert bool(path.hops) == bool(made & raw.closure(goal)) == (path.why_not is None)
        if path.hops:
            assert (path.hops[0].source, path.hops[-1].to) == (sample.sample_id, f"{goal[0]}@{goal[1]}")


@pytest.mark.parametrize("fan_out", [10, 3])
def test_compacted_and_uncompacted_give_equal_answers_at_every_step_count(build: Any, fan_out: int) -> None:
    steps = random_run(build, 7, 25)
    plain, compacted = (f"memory://property/{next(places)}" for _ in range(2))
    for step, records in enumerate(steps):
        seal_one(plain, step, records, None)
        seal_one(compacted, step, records, fan_out)
        assert answers(plain) == answers(compacted), f"after {step + 1} steps"


def answers(root: str) -> list[Any]:
    """Every kind of answer, without the number of files, which compaction changes."""
    found = [version_lineage(root, "r", policy, "last") for policy in POLICIES]
    found += [task_influence(root, "r", "t1")]
    found += [lineage_diff(root, "r", ("planner", "last"), ("solver", "last"))]
    return [replace(answer, num_files=0, num_files_opened=0) for answer in found]
