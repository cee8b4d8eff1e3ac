"""Datasets: ids from content, nothing lost on the way to a sealed step, bad input named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megloom.compute.graph.schemas import from_table
from megloom.compute.graph.seeds import canonical_json
from megloom.compute.rollout.dataset import load_tasks, write_rows
from megloom.compute.rollout.protocol import WorkloadError
from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.store import MegStore


def row(prompt: str = "1+2", truth: str = "3", **extra: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "reward_model": {"ground_truth": truth},
        "data_source": "toy",
        "extra_info": extra,
    }


ODD_ROWS: list[dict[str, Any]] = [
    {**row(level={"depth": [1, None]}), "tools": [{"name": "add", "parameters": {"x": {"type": "int"}}}]},
    {**row(seed=2**70, other={}), "tools": [{"name": "ask", "strict": True}, {}], "weight": 0.1},
    {**row("x" * 1_000_000), "extra_info": None, "tools": []},
    {**row("lone \ud800 here", "\udfff"), "extra_info": {"\ud83d": "\ude00 é \u2028"}, "tools": None},
    {**row("a\r\nb"), "extra_info": [], "tools": {}, "note": "007", "nothing": None},
]


def load(source: Any, tmp_path: Path) -> Any:
    return load_tasks(source, split="train", cache=tmp_path / "cache.parquet")


def jsonl(path: Path, *rows: Any, ascii_only: bool = True) -> str:
    lines = [(r if isinstance(r, str) else json.dumps(r, ensure_ascii=ascii_only)) + "\n" for r in rows]
    path.write_bytes("".join(lines).encode())
    return str(path)


def parquet_with_json_text(path: Path, rows: list[dict[str, Any]], json_type: pa.DataType) -> str:
    """Each nested field as JSON text. The prompts must be valid Unicode."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in ("prompt", "data_source")}
    columns["reward_model"] = [json.dumps(row["reward_model"]) for row in rows]
    for name in ("extra_info", "tools"):
        columns[name] = pa.array([json.dumps(row[name], indent=1) for row in rows], json_type)
    columns["note"] = ['{"kept": "as text"}'] * len(rows)
    columns["missing"] = pa.array([None] * len(rows), pa.string())
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return str(path)


def sealed_rows(source: Any, tmp_path: Path) -> list[str]:
    """The rows of the tasks after the whole way: loaded, recorded, sealed, read."""

    async def way() -> None:
        store = MegStore(root=str(tmp_path / "store"), journal=MemoryJournal(), offload=InlineOffload())
        await store.recover("r")
        for record, _ in load(source, tmp_path):
            store.record(record, step=0)
        await store.seal("r", 0)

    asyncio.run(way())
    records = from_table("tasks", MegReader(str(tmp_path / "store")).read_table("r", "tasks"))
    return [record.row for record in sorted(records, key=lambda record: record.position)]


def test_rows_of_a_jsonl_file_are_sealed_byte_for_byte(tmp_path: Path) -> None:
    assert sealed_rows(jsonl(tmp_path / "d.jsonl", *ODD_ROWS), tmp_path) == list(
        map(canonical_json, ODD_ROWS)
    )


def test_rows_of_a_function_are_sealed_byte_for_byte(tmp_path: Path) -> None:
    assert sealed_rows(lambda: iter(ODD_ROWS), tmp_path) == list(map(canonical_json, ODD_ROWS))


@pytest.mark.parametrize("json_type", [pa.string(), pa.json_(), pa.large_string()])
def test_rows_of_parquet_with_json_text_are_sealed_byte_for_byte(
    tmp_path: Path, json_type: pa.DataType
) -> None:
    rows = [row for row in ODD_ROWS if "\ud800" not in row["prompt"]]
    rows.append({**row(deep="\ud800"), "tools": []})
    names = ("prompt", "reward_model", "data_source", "extra_info", "tools")
    expected = [
        canonical_json({n: row[n] for n in names} | {"note": '{"kept": "as text"}', "missing": None})
        for row in rows
    ]
    source = parquet_with_json_text(tmp_path / "d.parquet", rows, json_type)
    assert sealed_rows(source, tmp_path) == expected


def test_a_task_shows_its_workflow_the_whole_row_whatever_the_source(tmp_path: Path) -> None:
    for source in (jsonl(tmp_path / "d.jsonl", *ODD_ROWS), lambda: ODD_ROWS):
        assert [canonical_json(task.row) for _, task in load(source, tmp_path)] == list(
            map(canonical_json, ODD_ROWS)
        )


def test_recorded_texts_are_valid_unicode_where_the_row_has_a_lone_surrogate(tmp_path: Path) -> None:
    (pair,) = load(jsonl(tmp_path / "d.jsonl", ODD_ROWS[3]), tmp_path)
    assert (pair[0].prompt, pair[0].ground_truth) == ("lone \ufffd here", "\ufffd")
    assert pair[1].prompt == "lone \ud800 here"


def test_jsonl_is_utf8_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "d.jsonl", row("näh \u2028 ö"), row("z"), ascii_only=False)
    marked = tmp_path / "m.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + Path(plain).read_bytes().replace(b"\n", b"\r\n"))
    ids = [[record.task_id for record, _ in load(str(path), tmp_path)] for path in (plain, marked)]
    assert ids[0] == ids[1] and load(plain, tmp_path)[0][0].prompt == "näh \u2028 ö"


def test_a_functions_rows_are_built_once_and_read_from_parquet(tmp_path: Path) -> None:
    built = []

    def rows() -> Iterator[dict[str, Any]]:
        built.append(1)
        yield row("1+2")
        yield row("2+2", "4", level={"depth": [1, 2]})

    first, second = load(rows, tmp_path), load(rows, tmp_path)
    assert built == [1]
    assert [r.task_id for r, _ in first] == [r.task_id for r, _ in second]
    assert second[1][1].row["extra_info"] == {"level": {"depth": [1, 2]}}


def test_a_cache_without_whole_rows_is_built_anew(tmp_path: Path) -> None:
    old = pa.table({"prompt": ["1+2"], "reward_model": [{"ground_truth": "3"}]})
    pq.write_table(old.replace_schema_metadata({"schema_version": "1"}), tmp_path / "cache.parquet")
    ((record, _),) = load(lambda: [{**row(), "tools": ["t"]}], tmp_path)
    assert json.loads(record.row)["tools"] == ["t"]


def test_a_cache_of_more_rows_than_a_group_keeps_their_order(tmp_path: Path) -> None:
    prompts = [str(number) for number in range(2_500)]
    assert [record.prompt for record, _ in load(lambda: map(row, prompts), tmp_path)] == prompts


def test_the_cache_can_be_read_in_the_fields_convention(tmp_path: Path) -> None:
    write_rows([{**row(a=1), "tools": []}, {"prompt": "x", "answer": 3}], tmp_path / "cache.parquet")
    first, second = pq.read_table(tmp_path / "cache.parquet").drop(["row"]).to_pylist()
    assert first == {**row(), "extra_info": '{"a":1}'}
    assert second["reward_model"] == {"ground_truth": "3"} and second["data_source"] == ""


def test_ids_come_from_the_whole_row_and_repeated_rows_are_numbered(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "d.jsonl", row("1+2"), row("1 +2"), row("1+2"))
    first, spaced, again = (record.task_id for record, _ in load(source, tmp_path))
    assert first != spaced and again == f"{first}.2"


def test_answer_may_stand_for_the_ground_truth_and_messages_for_the_prompt(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+2"}]
    ((record, task),) = load(jsonl(tmp_path / "d.jsonl", {"prompt": messages, "answer": 3}), tmp_path)
    assert (record.prompt, task.ground_truth) == ("1+2", "3")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([{"answer": "3"}], r"d.jsonl line 1, row 0: missing or empty field 'prompt' .has: answer"),
        ([row(), "", {"prompt": "x"}], "line 3, row 1: missing 'reward_model.ground_truth' or 'answer'"),
        (["{not json"], "line 1: not JSON"),
        (["[1]"], "line 1: expected an object, got list"),
        (['{"prompt": ' + "9" * 5_000 + "}"], "line 1: not JSON"),
        (["[" * 100_000], "line 1: not JSON"),
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
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(row()).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(WorkloadError, match=r"d.jsonl line 2: not UTF-8 .*byte 12 of the line"):
        load(str(path), tmp_path)


def test_a_cell_of_a_json_column_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "x": pa.array(["{}", "{"], pa.json_())})
    pq.write_table(table, path)
    with pytest.raises(WorkloadError, match=r"d.parquet row 1 field 'x': not JSON"):
        load(str(path), tmp_path)


def test_a_value_that_json_cannot_hold_is_named_by_row_and_field(tmp_path: Path) -> None:
    with pytest.raises(
        WorkloadError, match=r"cache.parquet row 1 field 'tools': cannot be kept as JSON .*bytes"
    ):
        load(lambda: [row(), {**row(), "tools": [b"x"]}], tmp_path)
    with pytest.raises(WorkloadError, match=r"row 0 field 'extra_info': cannot be kept as JSON"):
        load(lambda: [row(when={1, 2})], tmp_path)
    with pytest.raises(WorkloadError, match=r"row 0: expected text as field names, got .*7"):
        load(lambda: [{**row(), 7: "x"}], tmp_path)
    with pytest.raises(WorkloadError, match=r"row 0: expected a mapping, got str"):
        load(lambda: ["1+2"], tmp_path)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_text("no")
    with pytest.raises(WorkloadError, match=r"d.parquet: not a parquet file"):
        load(str(tmp_path / "d.parquet"), tmp_path)
