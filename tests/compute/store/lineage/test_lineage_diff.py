from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.diff import lineage_diff
from megloom.compute.store.seal import write_step
from tests.compute.store.lineage.test_lineage_backward import step_0, step_1, step_2


@pytest.fixture
def sealed(tmp_path: Path, build: Any) -> str:
    root = str(tmp_path)
    third = [build.version("solver", 3, step=3, code_hash="k2", config_hash="c2", reward_hash="h2")]
    for step, records in enumerate((step_0(build), step_1(build), step_2(build), third)):
        write_step(Folder(root), "r", step, records, step - 1 if step else None, {})
    return root


def test_the_later_version_has_versions_tasks_and_hashes_of_its_own(sealed: str) -> None:
    diff = lineage_diff(sealed, "r", ("solver", 1), ("solver", "last"))
    assert (diff.one.only_versions, diff.one.only_tasks, diff.one.only_code_hashes) == ((), (), ())
    other = diff.other
    assert [(v.policy, v.version) for v in other.only_versions] == [
        ("planner", 2),
        ("solver", 2),
        ("solver", 3),
    ]
    assert [(t.task_id, t.num_samples, t.prompt) for t in other.only_tasks] == [("t2", 1, "prompt of t2")]
    assert (other.only_code_hashes, other.only_config_hashes, other.only_reward_hashes) == (
        ("k2",),
        ("c2",),
        ("h2",),
    )
    assert (diff.one.num_versions, other.num_versions, diff.num_shared_versions) == (4, 7, 4)
    assert (diff.one.num_tasks, other.num_tasks, diff.num_shared_tasks) == (1, 2, 1)
    assert (diff.one.num_samples, other.num_samples) == (3, 5)


def test_what_lies_between_is_told_in_either_order(sealed: str) -> None:
    between = lineage_diff(sealed, "r", ("solver", 1), ("solver", 3)).between
    assert between is not None
    assert (between.earlier, between.later, between.num_hops) == ("solver@1", "solver@3", 2)
    assert [(v.policy, v.version) for v in between.versions] == [("solver", 2)]
    assert lineage_diff(sealed, "r", ("solver", 3), ("solver", 1)).between == between


def test_versions_of_one_step_do_not_stand_behind_each_other(sealed: str) -> None:
    diff = lineage_diff(sealed, "r", ("planner", 2), ("solver", 1))
    assert diff.between is None
    assert [(v.policy, v.version) for v in diff.one.only_versions] == [("planner", 2)]
    assert [(v.policy, v.version) for v in diff.other.only_versions] == [("solver", 1)]


def test_a_version_does_not_differ_from_itself(sealed: str) -> None:
    diff = lineage_diff(sealed, "r", ("solver", 2), ("solver", 2))
    assert (diff.between, diff.one.only_versions, diff.other.only_tasks) == (None, (), ())


def test_an_unknown_policy_is_refused_with_the_nearest(sealed: str) -> None:
    with pytest.raises(FileNotFoundError, match="no version of this policy, did you mean 'solver'"):
        lineage_diff(sealed, "r", ("solvr", 1), ("solver", 1))
