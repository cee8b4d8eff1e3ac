from __future__ import annotations

import pytest

from megloom.compute.graph.ids import episode_of_id, is_gateway_call, step_of_id


@pytest.mark.parametrize(
    ("record_id", "step"),
    [
        ("g000012-0003", 12),
        ("g000012-0003-m001-a0-i003-s", 12),
        ("e000007-9f86d081-m000", 7),
        ("g1234567-0003-m001", 1234567),
        ("solver-d000000-000012", 0),
        ("my-agent-d000004-000012", 4),
        ("solver-s000021-b0003", 21),
    ],
)
def test_an_id_tells_its_step(record_id: str, step: int) -> None:
    assert step_of_id(record_id) == step


@pytest.mark.parametrize("record_id", ["", "x1", "g12-0003", "g000012", "solver-d000000", "run-s1-b2"])
def test_an_id_of_another_form_tells_none(record_id: str) -> None:
    assert step_of_id(record_id) is None


@pytest.mark.parametrize("end", ["", "-a0-i003", "-a0-i003-s", "-a0-p4e1b47dc", "-a12-i003-c"])
def test_the_ids_of_an_episodes_records_tell_the_episode(end: str) -> None:
    assert episode_of_id(f"g000012-0003-m001{end}") == "g000012-0003-m001"
    assert episode_of_id(f"e000012-some-task-m001{end}") == "e000012-some-task-m001"


@pytest.mark.parametrize("record_id", ["g000012-0003", "e1", "solver-d000000-000012", "g000012-0003-m001-x"])
def test_ids_without_an_episode_tell_none(record_id: str) -> None:
    assert episode_of_id(record_id) is None


def test_calls_through_the_gateway_are_told_from_the_workflows_own() -> None:
    assert is_gateway_call("g000001-0000-m000-a0-g003")
    assert not is_gateway_call("g000001-0000-m000-a0-i003")
    assert step_of_id("g000001-0000-m000-a0-g003") == 1
    assert episode_of_id("g000001-0000-m000-a0-g003-s") == "g000001-0000-m000"
