from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.forward import reward_influence, task_influence
from megloom.compute.store.seal import write_step
from tests.compute.store.lineage.test_lineage_backward import step_0, step_1, step_2


@pytest.fixture
def sealed(tmp_path: Path, build: Any) -> str:
    root = str(tmp_path)
    for step, records in enumerate((step_0(build), step_1(build), step_2(build))):
        write_step(Folder(root), "r", step, records, step - 1 if step else None, {})
    return root


def test_a_task_influences_its_samples_versions_and_those_made_from_their_data(sealed: str) -> None:
    found = task_influence(sealed, "r", "t1")
    assert [(u.policy, u.version, u.step, u.agent, u.num_samples) for u in found.direct] == [
        ("planner", 2, 1, "planner", 1),
        ("solver", 1, 1, "solver", 2),
    ]
    assert [(r.policy, r.version, r.step, r.num_hops) for r in found.reached] == [("solver", 2, 2, 1)]
    assert (found.prompt, found.num_versions) == ("prompt of t1", 6)


def test_a_reward_function_influences_the_versions_of_the_samples_that_it_scored(sealed: str) -> None:
    found = reward_influence(sealed, "r", "h")
    assert {(u.policy, u.version, u.agent) for u in found.direct} == {
        ("planner", 2, None),
        ("solver", 1, None),
        ("solver", 2, None),
    }
    assert found.reached == ()


def test_a_task_that_no_version_was_made_from_influenced_nothing(tmp_path: Path, build: Any) -> None:
    root = str(tmp_path)
    write_step(Folder(root), "r", 0, [build.task("idle"), build.version("solver", 0, step=0)], None, {})
    found = task_influence(root, "r", "idle")
    assert (found.direct, found.reached, found.prompt) == ((), (), "prompt of idle")


def test_an_unknown_task_is_refused_with_the_one_that_begins_most_like_it(sealed: str) -> None:
    with pytest.raises(FileNotFoundError, match="run r has no task t3, did you mean 't2'"):
        task_influence(sealed, "r", "t3")


def test_an_unknown_reward_is_refused_with_the_nearest(sealed: str) -> None:
    with pytest.raises(FileNotFoundError, match="scored by reward hh, did you mean 'h'"):
        reward_influence(sealed, "r", "hh")
