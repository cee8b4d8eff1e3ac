"""Files of exported rows are what common readers expect, and appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.json
import pyarrow.parquet as pq
import pytest

from megloom.compute.store.export_files import write_jsonl, write_parquet


def row(number: int = 0, **overrides: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "näh\n\u2028"},
            {"role": "assistant", "content": str(number)},
        ],
        "agent": "solver",
        "policy": "solver",
        "policy_version": 3,
        "reward": 0.5,
        "run": "r",
        "step": 1,
        "purpose": "train",
        "task_id": "t1",
        "group_id": "g1",
        "episode_id": "e1",
        "invocation_id": f"i{number:05d}",
        "finish_reason": "stop",
        "num_prompt_tokens": 4,
        "num_completion_tokens": 3,
        "task": {"prompt": "p", "reward_model": {"ground_truth": "7"}, "data_source": "toy"},
    }
    return values | overrides


TOKENS: dict[str, Any] = {"token_ids": [1, 2], "logprobs": [None, -0.5], "loss_mask": [0, 1]}
TOOL = {"role": "assistant", "content": [{"text": "a\ud800"}], "tool_calls": [{"id": 2**70}]}


def test_jsonl_gives_back_every_row_and_loads_with_arrow(tmp_path: Path) -> None:
    rows = [row(number, **TOKENS) for number in range(3)] + [row(3, reward=None, task=None)]
    size_bytes = write_jsonl(rows, tmp_path / "out.jsonl")
    data = (tmp_path / "out.jsonl").read_bytes()
    assert [json.loads(line) for line in data.decode().split("\n")[:-1]] == rows and size_bytes == len(data)
    table = pyarrow.json.read_json(tmp_path / "out.jsonl")
    assert table.column("messages").to_pylist() == [each["messages"] for each in rows]
    assert table.column("reward").to_pylist() == [0.5, 0.5, 0.5, None]


def test_a_lone_surrogate_becomes_the_replacement_character_that_readers_take(tmp_path: Path) -> None:
    write_jsonl([row(messages=[TOOL])], tmp_path / "out.jsonl")
    (message,) = json.loads((tmp_path / "out.jsonl").read_bytes())["messages"]
    assert message == {**TOOL, "content": [{"text": "a\ufffd"}]}
    broken = row(messages=[{"role": "user", "content": "\udfff"}])
    write_parquet([broken], tmp_path / "out.parquet", tokens=False)
    assert pq.read_table(tmp_path / "out.parquet").column("messages").to_pylist() == [
        [{"role": "user", "content": "\ufffd", "other": None}]
    ]


def test_parquet_has_typed_columns_and_messages_as_structs(tmp_path: Path) -> None:
    rows = [row(number) for number in range(600)]  # more than a row group
    size_bytes = write_parquet(rows, tmp_path / "out.parquet", tokens=False)
    table = pq.read_table(tmp_path / "out.parquet")
    assert size_bytes == (tmp_path / "out.parquet").stat().st_size
    found = table.drop(["messages"]).to_pylist()
    assert found == [{name: value for name, value in each.items() if name != "messages"} for each in rows]
    assert table.column("messages").to_pylist() == [
        [message | {"other": None} for message in each["messages"]] for each in rows
    ]


def test_parquet_keeps_what_a_message_has_besides_as_json(tmp_path: Path) -> None:
    write_parquet([row(messages=[TOOL])], tmp_path / "out.parquet", tokens=False)
    ((message,),) = pq.read_table(tmp_path / "out.parquet").column("messages").to_pylist()
    assert (message["role"], message["content"]) == ("assistant", None)
    assert json.loads(message["other"]) == {"content": TOOL["content"], "tool_calls": TOOL["tool_calls"]}


def test_parquet_has_token_columns_only_if_tokens_are_wanted(tmp_path: Path) -> None:
    write_parquet([row(**TOKENS)], tmp_path / "with.parquet", tokens=True)
    write_parquet([], tmp_path / "without.parquet", tokens=False)
    with_tokens = pq.read_table(tmp_path / "with.parquet")
    assert {name: with_tokens.column(name).to_pylist()[0] for name in TOKENS} == TOKENS
    without = pq.read_table(tmp_path / "without.parquet")
    assert without.column_names == list(row()) and without.num_rows == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"out.{kind}"
    path.write_text("old")

    def rows() -> Iterator[dict[str, Any]]:
        yield from (row(number) for number in range(600))
        raise RuntimeError("the store broke")

    with pytest.raises(RuntimeError, match="the store broke"):
        write_jsonl(rows(), path) if kind == "jsonl" else write_parquet(rows(), path, tokens=False)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_number_that_json_has_not_is_refused_with_its_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="call i00007: .*not JSON compliant"):
        write_jsonl([row(7, reward=float("nan"))], tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []
