"""Datasets: ids from content, nothing lost, and bad input named by file, row and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.rollout.dataset import load_tasks, write_rows
from megloom.compute.rollout.protocol import WorkloadError


def row(prompt: str = "1+2", truth: str = "3", **extra: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "reward_model": {"ground_truth": truth},
        "data_source": "toy",
        "extra_info": extra,
    }


def load(source: Any, tmp_path: Path) -> Any:
    return load_tasks(source, split="train", cache=tmp_path / "cache.parquet")


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def test_a_functions_rows_are_built_once_and_read_from_parquet(tmp_path: Path) -> None:
    built = []

    def rows() -> list[dict[str, Any]]:
        built.append(1)
        return [row("1+2"), row("2+2", "4", level={"depth": [1, 2]})]

    first, second = load(rows, tmp_path), load(rows, tmp_path)
    assert built == [1]
    assert [r.task_id for r, _ in first] == [r.task_id for r, _ in second]
    assert second[1][1].row["extra_info"] == {"level": {"depth": [1, 2]}}


def test_ids_come_from_the_whole_row_and_repeated_rows_are_numbered(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", row("1+2"), row("1 +2"), row("1+2"))
    first, spaced, again = (record.task_id for record, _ in load(source, tmp_path))
    assert first != spaced and again == f"{first}.2"


def test_answer_may_stand_for_the_ground_truth_and_messages_for_the_prompt(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2"}]
    ((record, task),) = load(jsonl(tmp_path / "d.jsonl", {"prompt": messages, "answer": 3}), tmp_path)
    assert (record.prompt, task.ground_truth) == ("1+2", "3")


def test_unknown_nested_fields_survive(tmp_path: Path) -> None:
    odd = {**row(), "metadata": {"é": [None, {"deep": 1.5}]}}
    ((record, task),) = load(jsonl(tmp_path / "d.jsonl", odd), tmp_path)
    assert json.loads(record.row) == odd and task.row["metadata"] == odd["metadata"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([{"answer": "3"}], "row 0: missing or empty field 'prompt' .has: answer"),
        ([row(), {"prompt": "x"}], "row 1: missing 'reward_model.ground_truth' or 'answer'"),
        (["{not json"], "line 1: not JSON"),
        (["[1]"], "line 1: expected an object, got list"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load(jsonl(tmp_path / "d.jsonl", *rows), tmp_path)


def test_a_missing_file_and_an_unknown_kind_are_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such file"):
        load(str(tmp_path / "none.parquet"), tmp_path)
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(WorkloadError, match=r"expected .parquet or .jsonl"):
        load(str(tmp_path / "d.csv"), tmp_path)


def test_a_failed_build_leaves_no_cache_behind(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError):
        write_rows([row(), {"prompt": ""}], tmp_path / "cache.parquet")
    assert not (tmp_path / "cache.parquet").exists()
