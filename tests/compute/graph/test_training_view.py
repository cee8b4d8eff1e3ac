"""The training view: which groups a loss may take, late fields, late results, and the same rows as Arrow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megloom.compute.graph.meg import Vertex
from megloom.compute.graph.states import InvocationState
from megloom.compute.graph.training_view import Candidate, FieldValue, TrainingView, TrainingViewError


def candidate(name: str, *, policy: str = "solver", member: int = 0, version: int = 3) -> Candidate:
    vertex = Vertex(
        invocation_id=name,
        episode_id=name.rpartition("-i")[0],
        agent=policy,
        policy=policy,
        index=0,
        parents=(),
        registered_s=0.0,
        seed=0,
        temperature=1.0,
        max_tokens=8,
        state=InvocationState.DONE,
        prompt_ids=(1, 2),
        token_ids=(7, 8),
        logprobs=(-0.5, -0.25),
        version_spans=((version, 0, 1), (version + 1, 1, 2)),
    )
    return Candidate(vertex=vertex, member=member, reward=1.0)


def ready(value: Any) -> FieldValue:
    return FieldValue(value=value, source="test", ready_s=2.0)


def view_with_group(num_members: int = 2, **needs: set[str]) -> TrainingView:
    view = TrainingView(needs or {"solver": set()})
    view.open_group("g", num_members=num_members)
    return view


def test_a_group_is_trainable_when_its_last_member_has_ended() -> None:
    view = view_with_group()
    assert view.member_ended("g", 1, 0, [candidate("b")]) == [] and view.trainable("solver") == []
    assert view.member_ended("g", 0, 0, [candidate("a")]) == [("solver", "g")]
    assert [call.vertex.invocation_id for call in view.take("solver", "g")] == ["b", "a"]
    assert len(view) == 0 and view.trainable("solver") == []


def test_a_late_critic_value_holds_only_the_policy_whose_loss_needs_it() -> None:
    view = view_with_group(1, solver={"value"}, verifier=set())
    calls = [candidate("a"), candidate("b", policy="verifier")]
    assert view.member_ended("g", 0, 0, calls) == [("verifier", "g")]
    assert view.waiting("solver", "g") == [("a", "value")]
    with pytest.raises(TrainingViewError, match=r"g is not trainable for solver: waits for .*value"):
        view.take("solver", "g")
    assert view.set_field("a", "value", ready([0.1, 0.2])) == [("solver", "g")]
    assert view.take("solver", "g")[0].vertex.fields["value"].value == [0.1, 0.2]


def test_a_late_judge_score_of_every_call_is_waited_for() -> None:
    view = view_with_group(1, solver={"judge"})
    view.member_ended("g", 0, 0, [candidate("a"), candidate("b")])
    assert view.set_field("a", "judge", ready(1.0)) == []
    assert view.set_field("b", "judge", ready(0.0)) == [("solver", "g")]


def test_a_field_that_came_before_the_end_of_its_episode_is_not_waited_for() -> None:
    view = view_with_group(1, solver={"judge"})
    early = candidate("a")
    early.vertex.fields["judge"] = ready(1.0)
    assert view.member_ended("g", 0, 0, [early]) == [("solver", "g")]


def test_the_first_value_of_a_field_counts() -> None:
    view = view_with_group(1, solver={"judge"})
    view.member_ended("g", 0, 0, [candidate("a")])
    view.set_field("a", "judge", ready(1.0))
    assert view.set_field("a", "judge", ready(0.0)) == [] and view.num_late == 1
    assert view.take("solver", "g")[0].vertex.fields["judge"].value == 1.0


def test_what_is_missing_is_named_and_leaves() -> None:
    view = view_with_group(1, solver={"judge"})
    view.member_ended("g", 0, 0, [candidate("a"), candidate("b")])
    view.set_field("b", "judge", ready(0.0))
    assert [(call.vertex.invocation_id, name) for call, name in view.give_up("solver", "g")] == [
        ("a", "judge")
    ]
    assert [call.vertex.invocation_id for call in view.take("solver", "g")] == ["b"]
    assert view.set_field("a", "judge", ready(1.0)) == [] and view.num_late == 1


def test_a_late_result_of_an_older_attempt_changes_nothing() -> None:
    view = view_with_group(1)
    view.begin_attempt("g", 0, 1)
    assert view.member_ended("g", 0, 0, [candidate("old")]) == []
    assert view.member_ended("g", 0, 1, [candidate("new")]) == [("solver", "g")]
    assert view.member_ended("g", 0, 1, [candidate("again")]) == [] and view.num_late == 2
    assert [call.vertex.invocation_id for call in view.take("solver", "g")] == ["new"]


def test_a_group_without_a_usable_call_is_trainable_and_empty() -> None:
    view = view_with_group()
    view.member_ended("g", 0, 0, [])
    assert view.member_ended("g", 1, 0, []) == [("solver", "g")]
    assert view.take("solver", "g") == []


def test_calls_of_a_frozen_policy_are_not_kept() -> None:
    view = view_with_group(1)
    view.member_ended("g", 0, 0, [candidate("a", policy="frozen")])
    assert len(view) == 0


def test_a_group_is_taken_once_and_leaves_when_every_policy_has_taken_it() -> None:
    view = view_with_group(1, solver=set(), planner=set())
    view.member_ended("g", 0, 0, [candidate("a")])
    view.take("solver", "g")
    with pytest.raises(TrainingViewError, match="g is not trainable for solver"):
        view.take("solver", "g")
    view.take("planner", "g")
    view.open_group("g", num_members=1)


def test_where_no_policy_is_trained_nothing_is_kept() -> None:
    view = TrainingView({})
    view.open_group("g", num_members=1)
    assert view.member_ended("g", 0, 0, [candidate("a")]) == [] and len(view) == 0
    view.open_group("g", num_members=1)


def test_a_list_with_a_known_call_is_refused_whole() -> None:
    view = view_with_group()
    view.member_ended("g", 0, 0, [candidate("a")])
    with pytest.raises(TrainingViewError, match="call a is in the training view already"):
        view.member_ended("g", 1, 0, [candidate("b"), candidate("a")])
    assert view.member_ended("g", 1, 0, [candidate("b")]) == [("solver", "g")]


def test_errors_name_the_group_the_member_or_the_call() -> None:
    view = view_with_group(1)
    with pytest.raises(TrainingViewError, match="group g is open already"):
        view.open_group("g", num_members=1)
    with pytest.raises(TrainingViewError, match="group g: member 1 of 1"):
        view.member_ended("g", 1, 0, [])
    with pytest.raises(TrainingViewError, match="call a is in the training view already"):
        view.member_ended("g", 0, 0, [candidate("a"), candidate("a")])


def test_the_view_as_arrow_has_the_trainable_calls_of_a_policy_and_version() -> None:
    view = TrainingView({"solver": {"judge"}, "planner": set()})
    for group, version in (("g0", 3), ("g1", 4), ("g2", 4)):
        view.open_group(group, num_members=1)
        view.member_ended(group, 0, 0, [candidate(f"{group}-m0-a0-i000", version=version)])
    view.set_field("g0-m0-a0-i000", "judge", ready(0.5))
    view.set_field("g1-m0-a0-i000", "judge", ready(0.25))
    assert view.table("solver").num_rows == 2 and view.table("planner").num_rows == 0
    (row,) = view.table("solver", 4).to_pylist()
    assert (row["group_id"], row["version_min"], row["version_max"]) == ("g1", 4, 5)
    assert row["token_ids"] == [7, 8] and row["logprobs"] == [-0.5, -0.25]
    assert {name: json.loads(value) for name, value in row["fields"]} == {"judge": 0.25}
