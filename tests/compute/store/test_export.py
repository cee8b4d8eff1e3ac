"""Exported rows: the messages of the prompt and the answer, with what is known of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sealed_steps import seal_steps

from megloom.compute.graph.messages import message_records
from megloom.compute.graph.seeds import canonical_json
from megloom.compute.store.errors import TokensDropped
from megloom.compute.store.export import Exported, Selection, export_rows
from megloom.compute.store.reader import MegReader
from megloom.compute.store.retention import apply, plan_retention

OLD = Path(__file__).parents[2] / "data" / "meg_v1"
SYSTEM = {"role": "system", "content": "be brief", "name": "é\ud800"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def episode(build: Any, name: str, step: int, **overrides: Any) -> list[Any]:
    """Two turns of one agent; the second prompt leaves the first answer after one token."""
    turns = [[SYSTEM, user("1+2?")]]
    turns.append([*turns[0], {"role": "assistant", "content": "3"}, user("sure?")])
    calls = {f"{name}-a0-i{index:03d}": list(map(canonical_json, turn)) for index, turn in enumerate(turns)}
    kept = message_records(calls, episode_id=name, run="r", step=step)
    one, two = calls
    own = {"episode_id": name, "step": step}
    sampled = {**own, "version_spans": [[4, 0, 2]]}
    plain = {**own, "sampled": False, "logprobs": None, "version_spans": None}
    call = {**own, "version_min": 4, "version_max": 5, "reward": 0.5, **overrides}
    return [
        build.episode(name, step=step, purpose="train"),
        *kept.records,
        build.segment(f"{one}-p", token_ids=[1, 2, 3], **plain),
        build.segment(f"{one}-c", parent=f"{one}-p", start=3, token_ids=[4, 5], logprobs=[-1, -2], **sampled),
        build.segment(f"{two}-p", parent=f"{one}-c", start=4, token_ids=[6], **plain),
        build.segment(f"{two}-c", parent=f"{two}-p", start=5, token_ids=[7, 8], logprobs=[-3, -4], **sampled),
        build.invocation(
            one, index=0, message=kept.last[one], completion_segment=f"{one}-c", text="3", **call
        ),
        build.invocation(
            two, index=1, message=kept.last[two], completion_segment=f"{two}-c", text="yes", **call
        ),
    ]


def rows_of(root: str, notices: list[str] | None = None, **chosen: Any) -> list[dict[str, Any]]:
    notices = [] if notices is None else notices
    selection = Selection(**{"run": "r", **chosen})
    return list(export_rows(MegReader(root), selection, exported=Exported(), notice=notices.append))


@pytest.fixture
def three_steps(root: str, build: Any) -> str:
    """A version a step; step 2 has an evaluation besides, with a failed call and one whose text was lost."""
    held_out = {"step": 2, "episode_id": "v1"}
    lost = {"reward_status": "infrastructure", "text": "", "num_completion_tokens": 9}
    seal_steps(
        root,
        {
            0: [build.task("t1", data_source="toy"), build.version("solver", 0)],
            1: [*episode(build, "e1", 1), build.version("solver", 1)],
            2: [
                *episode(build, "e2", 2, reward=None, agent="planner"),
                build.episode("v1", step=2, purpose="eval"),
                build.invocation("v1-a0-i000", reward=1.0, text="eval", **held_out),
                build.invocation("v1-a0-i001", state="failed", text="", **held_out),
                build.invocation("v1-a0-i002", **held_out, **lost),
                build.version("solver", 2),
            ],
        },
    )
    return root


def test_a_row_is_the_prompts_messages_the_answer_and_what_is_known_of_the_call(three_steps: str) -> None:
    first, second = rows_of(three_steps, first_step=1, last_step=1)
    assert first["messages"] == [SYSTEM, user("1+2?"), {"role": "assistant", "content": "3"}]
    answer = {"role": "assistant", "content": "yes"}
    assert second.pop("messages") == [*first["messages"], user("sure?"), answer]
    assert second == {
        "agent": "solver",
        "policy": "solver",
        "policy_version": 4,
        "reward": 0.5,
        "run": "r",
        "step": 1,
        "purpose": "train",
        "task_id": "t1",
        "group_id": "g1",
        "episode_id": "e1",
        "invocation_id": "e1-a0-i001",
        "finish_reason": "stop",
        "num_prompt_tokens": 4,
        "num_completion_tokens": 3,
        "task": {"prompt": "prompt of t1", "reward_model": {"ground_truth": "7"}, "data_source": "toy"},
    }


def test_tokens_are_the_whole_path_and_each_sampled_token_is_marked_in_one_row(three_steps: str) -> None:
    first, second = rows_of(three_steps, tokens=True, last_step=1)
    assert (first["token_ids"], first["loss_mask"]) == ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    assert first["logprobs"] == [None, None, None, -1.0, -2.0]
    # Of the first answer one token is context here, with its log-probability.
    assert (second["token_ids"], second["loss_mask"]) == ([1, 2, 3, 4, 6, 7, 8], [0, 0, 0, 0, 0, 1, 1])
    assert second["logprobs"] == [None, None, None, -1.0, None, -3.0, -4.0]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, ["e1-a0-i000", "e1-a0-i001", "e2-a0-i000", "e2-a0-i001"]),
        ({"purpose": "eval"}, ["v1-a0-i000"]),
        ({"purpose": "all", "first_step": 2}, ["e2-a0-i000", "e2-a0-i001", "v1-a0-i000"]),
        ({"agent": "planner", "purpose": "all"}, ["e2-a0-i000", "e2-a0-i001"]),
        ({"min_reward": 0.5, "purpose": "all"}, ["e1-a0-i000", "e1-a0-i001", "v1-a0-i000"]),
        ({"min_reward": 0.6}, []),
        ({"last_step": 0}, []),
    ],
)
def test_rows_are_chosen_by_purpose_step_agent_and_reward(
    three_steps: str, chosen: dict[str, Any], expected: list[str]
) -> None:
    assert [row["invocation_id"] for row in rows_of(three_steps, **chosen)] == expected


def test_calls_without_an_answer_or_with_a_lost_text_are_counted_and_left_out(three_steps: str) -> None:
    exported = Exported()
    selection = Selection(run="r", purpose="eval")
    rows = list(export_rows(MegReader(three_steps), selection, exported=exported, notice=[].append))
    assert (len(rows), exported.num_rows, exported.num_unanswered) == (1, 1, 2)


def test_wrong_names_are_refused_with_what_there_is(three_steps: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"run x: no sealed step \(runs here: r\)"):
        rows_of(three_steps, run="x")
    with pytest.raises(ValueError, match="no sealed step in 5:9 .has 0 to 2"):
        rows_of(three_steps, first_step=5, last_step=9)
    with pytest.raises(ValueError, match="steps 0 to 2: no agent 'solvr' .agents: planner, solver"):
        rows_of(three_steps, agent="solvr")


def test_where_messages_were_dropped_the_tasks_prompt_stands_for_them_and_it_is_said(
    three_steps: str,
) -> None:
    reader = MegReader(three_steps)
    apply(reader.folder, plan_retention(reader, "r", 1), at="now")
    notices: list[str] = []
    first, _, kept, _ = rows_of(three_steps, notices)
    assert first["messages"] == [user("prompt of t1"), {"role": "assistant", "content": "3"}]
    assert kept["messages"][0] == SYSTEM
    assert len(notices) == 1 and "task's prompt" in notices[0] and "step" in notices[0]


def test_tokens_of_a_dropped_step_are_refused_with_the_step_and_the_reason(three_steps: str) -> None:
    reader = MegReader(three_steps)
    apply(reader.folder, plan_retention(reader, "r", 1), at="now")
    with pytest.raises(TokensDropped, match=r"step.*1.*newest 1 versions"):
        rows_of(three_steps, tokens=True)
    assert len(rows_of(three_steps, tokens=True, first_step=2)) == 2


def test_a_store_of_schema_1_gives_the_tasks_prompt_and_says_so_once() -> None:
    notices: list[str] = []
    rows = rows_of(str(OLD), notices, run="old", purpose="all", tokens=True)
    assert len(notices) == 1 and "schema 1" in notices[0]
    assert {row["step"] for row in rows} == {0, 1, 2}
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["messages"][0]["content"] == row["task"]["prompt"]
        assert len(row["token_ids"]) == row["num_prompt_tokens"] + row["num_completion_tokens"]
        assert sum(row["loss_mask"]) == row["num_completion_tokens"]
