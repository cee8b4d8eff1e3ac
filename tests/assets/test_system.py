import sys
from pathlib import Path

import pytest

from megloom.assets.system import System, load_system
from tests.fake_service import POLICIES, WORKLOAD


def test_a_workload_is_described_by_its_policies_and_agents():
    system = load_system(WORKLOAD)
    assert system.name == "standin_team"
    assert system.trained_policies == list(POLICIES)
    assert system.agents_of("solver") == ["solver"]


def test_a_frozen_policy_is_not_among_the_trained_ones():
    system = System(name="x", policies={"a": True, "judge": False}, agents={"a": "a", "b": "a", "j": "judge"})
    assert system.trained_policies == ["a"]
    assert system.agents_of("a") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("megloom.no_such_module:workload", "No module named"),
        ("tests.fake_service:no_such_name", "no_such_name"),
        ("tests.fake_service:POLICIES", "expected a Workload, found tuple"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: str, cause: str):
    with pytest.raises(ValueError, match=cause):
        load_system(name)


def test_a_workload_file_that_raises_is_bad_input(tmp_path: Path):
    (tmp_path / "broken_system.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match="broken_system:workload: broken_system.py:1: ZeroDivisionError"):
        load_system("broken_system:workload", import_paths=[str(tmp_path)])


def test_import_paths_are_searched_for_one_import_only(tmp_path: Path):
    (tmp_path / "own_system.py").write_text("from tests.fake_service import workload\n")
    before = list(sys.path)
    assert load_system("own_system:workload", import_paths=[str(tmp_path)]).name == "standin_team"
    assert sys.path == before
