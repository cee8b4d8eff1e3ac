"""A run of two policies and two steps, made by hand.

step 0   planner@0, solver@0 created; the warm start makes planner@1 from one demonstration
step 1   episode e1 (task t1): call p1 by planner@1, calls s1 and s2 by solver@0 → planner@2, solver@1
step 2   episode e2 (task t2): call p2 by planner@2, call s3 begun by solver@0, finished by solver@1
         → solver@2 (the planner is not updated); e3 is an evaluation and makes nothing
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megloom.compute.graph.records import ProvenanceRecord
from megloom.compute.store.errors import CorruptFile
from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.backward import VersionLineage, version_lineage
from megloom.compute.store.lineage.compaction import compact
from megloom.compute.store.lineage.versions import parse_version
from megloom.compute.store.seal import write_step
from tests.compute.store.lineage.runs import random_run


def step_0(build: Any) -> list[Any]:
    return [
        build.version("planner", 0, step=0),
        build.version("solver", 0, step=0),
        build.version("planner", 1, step=0, kind="warm"),
        build.micro_batch("m0", step=0, policy="planner", base_version=0, sample_ids=["d0"]),
        build.sample(
            "d0",
            step=0,
            kind="demonstration",
            policy="planner",
            agent="planner",
            group_id="",
            episode_id="",
            invocation_id=None,
            task_id=None,
            reward=None,
            advantage=1.0,
            version_min=None,
            version_max=None,
            micro_batch_id="m0",
        ),
    ]


def step_1(build: Any) -> list[Any]:
    planner: dict[str, Any] = {"agent": "planner", "policy": "planner"}
    unknown: dict[str, Any] = {"task_id": None, "reward": None, "version_min": None, "version_max": None}
    return [
        build.task("t1"),
        build.episode("e1", task_id="t1", attempt=0, state="failed", reward=None),
        build.episode("e1", task_id="t1", attempt=1, reward=0.25),
        build.invocation("p1", version_min=1, version_max=1, **planner),
        build.invocation("s1", reward=1.0),
        build.invocation("s2"),
        build.sample("xp1", invocation_id="p1", micro_batch_id="mp", version_min=1, version_max=1, **planner),
        build.sample("xs1", invocation_id="s1", micro_batch_id="ms1", advantage=-0.5, **unknown),
        build.sample("xs2", invocation_id="s2", micro_batch_id="ms2", **unknown),
        build.micro_batch("mp", policy="planner", base_version=1, sample_ids=["xp1"]),
        build.micro_batch("ms2", position=1, sample_ids=["xs2"]),
        build.micro_batch("ms1", position=0, sample_ids=["xs1"]),
        build.version("planner", 2, step=1),
        build.version("solver", 1, step=1),
    ]


def step_2(build: Any) -> list[Any]:
    at: dict[str, Any] = {"step": 2}
    return [
        build.task("t2"),
        build.episode("e2", task_id="t2", **at),
        build.episode("e3", task_id="t2", purpose="eval", **at),
        build.invocation(
            "p2", episode_id="e2", agent="planner", policy="planner", version_min=2, version_max=2, **at
        ),
        build.invocation("s3", episode_id="e2", version_min=0, version_max=1, **at),
        build.invocation("s4", episode_id="e3", version_min=1, version_max=1, **at),
        build.sample(
            "xs3",
            episode_id="e2",
            invocation_id="s3",
            task_id="t2",
            version_max=1,
            micro_batch_id="ms3",
            **at,
        ),
        build.micro_batch("ms3", base_version=1, sample_ids=["xs3"], **at),
        build.version("solver", 2, step=2),
    ]


@pytest.fixture
def sealed(root: str, build: Any) -> str:
    for step, records in enumerate((step_0(build), step_1(build), step_2(build))):
        write_step(Folder(root), "r", step, records, step - 1 if step else None, {})
    return root


def edges(lineage: VersionLineage) -> set[tuple[str, str, str, int | None]]:
    return {
        (f"{e.policy}@{e.version}", e.relation, f"{e.from_policy}@{e.from_version}", e.num_calls)
        for e in lineage.edges
    }


def test_a_version_is_made_by_the_micro_batches_taken_on_its_parent(sealed: str, build: Any) -> None:
    lineage = version_lineage(sealed, "r", "solver", 1)
    assert lineage.row == build.version("solver", 1, step=1)
    assert [(m.micro_batch_id, m.position) for m in lineage.micro_batches] == [("ms1", 0), ("ms2", 1)]
    assert [(c.agent, c.step, c.kind, c.num_samples) for c in lineage.sample_counts] == [
        ("solver", 1, "rollout", 2)
    ]


def test_a_sample_tells_its_task_and_the_reward_of_its_call_or_else_of_the_scored_attempt(
    sealed: str,
) -> None:
    lineage = version_lineage(sealed, "r", "solver", 1)
    found = [(s.sample_id, s.task_id, s.episode_id, s.invocation_id, s.reward) for s in lineage.samples]
    assert found == [("xs1", "t1", "e1", "s1", 1.0), ("xs2", "t1", "e1", "s2", 0.25)]
    assert [(t.task_id, t.prompt, t.num_samples) for t in lineage.tasks] == [("t1", "prompt of t1", 2)]


def test_versions_of_every_policy_in_the_samples_episodes_are_counted(sealed: str) -> None:
    lineage = version_lineage(sealed, "r", "solver", 2)
    assert {(f"{e.from_policy}@{e.from_version}", e.num_calls) for e in lineage.sampled_by} == {
        ("planner@2", 1),
        ("solver@0", 1),
        ("solver@1", 1),
    }
    assert [(s.sampled_by_min, s.sampled_by_max) for s in lineage.samples] == [(0, 1)]


def test_the_closure_reaches_version_0_of_both_policies(sealed: str) -> None:
    lineage = version_lineage(sealed, "r", "solver", "last")
    assert edges(lineage) == {
        ("solver@2", "parent", "solver@1", None),
        ("solver@2", "sampled", "planner@2", 1),
        ("solver@2", "sampled", "solver@1", 1),
        ("solver@2", "sampled", "solver@0", 1),
        ("solver@1", "parent", "solver@0", None),
        ("solver@1", "sampled", "planner@1", 1),
        ("solver@1", "sampled", "solver@0", 2),
        ("planner@2", "parent", "planner@1", None),
        ("planner@2", "sampled", "planner@1", 1),
        ("planner@2", "sampled", "solver@0", 2),
        ("planner@1", "parent", "planner@0", None),
    }
    assert [
        (f"{a.policy}@{a.version}", a.step, a.kind, a.num_samples, a.num_tasks) for a in lineage.ancestors
    ] == [
        ("solver@2", 2, "update", 1, 1),
        ("planner@2", 1, "update", 1, 1),
        ("solver@1", 1, "update", 2, 1),
        ("planner@1", 0, "warm", 1, 0),
        ("planner@0", 0, "initial", 0, 0),
        ("solver@0", 0, "initial", 0, 0),
    ]


def test_a_demonstration_has_no_task_no_call_and_no_sampler(sealed: str) -> None:
    lineage = version_lineage(sealed, "r", "planner", 1)
    sample = lineage.samples[0]
    assert (sample.kind, sample.task_id, sample.reward, sample.sampled_by_min) == (
        "demonstration",
        None,
        None,
        None,
    )
    assert (lineage.tasks, lineage.sampled_by) == ((), ())
    assert [(a.policy, a.version) for a in lineage.ancestors] == [("planner", 1), ("planner", 0)]


def test_version_0_has_nothing_behind_it(sealed: str) -> None:
    lineage = version_lineage(sealed, "r", "solver", 0)
    assert (lineage.micro_batches, lineage.samples, lineage.edges) == ((), (), ())
    assert [a.version for a in lineage.ancestors] == [0]


def test_a_frozen_policy_is_an_ancestor_without_a_step(root: str, build: Any) -> None:
    records = [
        build.version("solver", 0, step=0),
        build.version("solver", 1, step=0),
        build.episode("e1", step=0),
        build.invocation("s1", step=0),
        build.invocation("j1", step=0, agent="judge", policy="judge"),
        build.sample("xs1", step=0, invocation_id="s1"),
        build.micro_batch("m1", step=0, sample_ids=["xs1"]),
    ]
    write_step(Folder(root), "r", 0, records, None, {})
    ancestors = version_lineage(root, "r", "solver", 1).ancestors
    assert [(a.policy, a.version, a.step, a.kind) for a in ancestors][-1] == ("judge", 0, None, None)


def test_a_missing_version_is_named_with_what_there_is(sealed: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"r/solver@9 .*versions 0 to 2"):
        version_lineage(sealed, "r", "solver", 9)
    with pytest.raises(FileNotFoundError, match="no version of this policy"):
        version_lineage(sealed, "r", "nobody", "last")
    with pytest.raises(FileNotFoundError, match="run q has no sealed step"):
        version_lineage(sealed, "q", "solver", 1)


def test_a_corrupt_file_is_not_read_as_lineage(sealed: str) -> None:
    path = file_of(sealed, 1, "samples-solver")
    Folder(sealed).write(path, b"PAR1")
    with pytest.raises(CorruptFile, match=path):
        version_lineage(sealed, "r", "solver", 1)


def test_lineage_reads_a_file_url(tmp_path: Path, build: Any) -> None:
    write_step(Folder(f"file://{tmp_path}"), "r", 0, step_0(build), None, {})
    assert version_lineage(f"file://{tmp_path}", "r", "planner", "last").row.version == 1


def file_of(root: str, step: int, begin: str) -> str:
    """The path of the step's one file whose name begins so."""
    where = f"meg/r/step={step:06d}"
    (name,) = (name for name in Folder(root).names(where) if name.startswith(begin))
    return f"{where}/{name}"


@pytest.mark.parametrize(
    ("name", "expected"), [("solver@17", ("solver", 17)), ("solver@last", ("solver", "last"))]
)
def test_a_version_name_is_parsed(name: str, expected: Any) -> None:
    assert parse_version(name) == expected


@pytest.mark.parametrize("name", ["solver", "solver@", "@3", "solver@-1", "solver@x", "solver@1.5", ""])
def test_another_form_of_version_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected <policy>@<number>"):
        parse_version(name)


def test_the_start_that_was_the_newest_at_the_versions_step_is_its_provenance(root: str, build: Any) -> None:
    def start(epoch: int, step: int) -> ProvenanceRecord:
        return ProvenanceRecord(
            run="r", epoch=epoch, step=step, workload="w", config_hash="c", config="{}", code_hash="k",
            code_hashes="{}", reward_hash="h", packages="{}", started_at="now",
        )  # fmt: skip

    steps = [
        [build.version("solver", 0, step=0), start(1, 0)],
        [build.version("solver", 1, step=1)],
        [build.version("solver", 2, step=2), start(2, 2), start(3, 2)],
    ]
    for step, records in enumerate(steps):
        write_step(Folder(root), "r", step, records, None, {})
    found = [version_lineage(root, "r", "solver", version).provenance for version in range(3)]
    assert [start.epoch if start else None for start in found] == [1, 1, 3]


def test_samples_that_the_step_does_not_hold_are_counted(tmp_path: Path, build: Any) -> None:
    records = [
        build.version("solver", 1, step=1),
        build.micro_batch(sample_ids=["x1", "lost"]),
        build.sample("x1"),
    ]
    write_step(Folder(str(tmp_path)), "r", 1, records, None, {})
    lineage = version_lineage(str(tmp_path), "r", "solver", 1)
    assert ([s.sample_id for s in lineage.samples], lineage.num_missing_samples) == (["x1"], 1)


def test_only_the_versions_own_step_is_opened_beside_the_index(tmp_path: Path, build: Any) -> None:
    root = str(tmp_path)
    for step, records in enumerate(random_run(build, 11, 12)):
        write_step(Folder(root), "r", step, records, None, {})
        compact(Folder(root), "r", step, fan_out=2)
    lineage = version_lineage(root, "r", "solver", "last")
    sizes = [len(list(path.iterdir())) for path in (tmp_path / "meg" / "r").iterdir()]
    assert lineage.num_files == sum(sizes)
    # Blocks of 8 and of 4 steps: their manifests, versions and edges; tasks with their manifest; one step.
    assert lineage.num_files_opened <= 2 * 3 + 2 + max(sizes)
