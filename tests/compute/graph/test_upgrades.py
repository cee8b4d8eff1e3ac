"""The old store was sealed by schema version 1 (`tests/data/meg_v1`, run "old", three steps)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megloom.compute.graph.records import RECORDS
from megloom.compute.graph.schemas import SCHEMA_VERSION, SCHEMAS, from_table
from megloom.compute.graph.upgrades import upgraded
from megloom.compute.store.reader import MegReader

OLD_STORE = Path(__file__).parents[2] / "data" / "meg_v1"


def old(table: str, step: int = 1) -> pa.Table:
    """A table as the old program wrote it."""
    files = sorted((OLD_STORE / "meg" / "old" / f"step={step:06d}").glob(f"{table}*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files])


def new(table: str, steps: list[int] | None = None) -> list[Any]:
    return from_table(table, MegReader(str(OLD_STORE)).read_table("old", table, steps))


@pytest.mark.parametrize("table", RECORDS)
def test_every_table_of_an_old_store_gives_records(table: str) -> None:
    num_old = sum(
        file.num_rows
        for step in range(3)
        for file in MegReader(str(OLD_STORE)).read_manifest("old", step).files
        if file.table == table
    )
    arrow = MegReader(str(OLD_STORE)).read_table("old", table)
    assert arrow.schema.equals(SCHEMAS[table], check_metadata=True)
    assert len(from_table(table, arrow)) == num_old
    assert num_old or table in {"messages", "fields", "provenance"}


def test_calls_learn_their_group_member_and_attempt_from_their_ids() -> None:
    call = next(c for c in new("invocations", [1]) if c.invocation_id == "g000001-0001-m001-a0-i003")
    assert (call.group_id, call.member, call.attempt, call.num_reentries) == ("g000001-0001", 1, 0, 0)
    assert (call.task_id, call.engine, call.message) == (None, None, None)
    assert (call.agent, call.num_prompt_tokens, call.finish_reason) == ("solver", 32, "stop")


def test_what_counted_the_calls_own_attempts_is_its_number_of_reentries() -> None:
    table = old("invocations")
    table = table.set_column(
        table.schema.get_field_index("attempt"),
        table.schema.field("attempt"),
        pa.array([2] * table.num_rows),
    )
    assert set(upgraded("invocations", table)["num_reentries"].to_pylist()) == {2}


def test_segments_learn_their_episode_and_where_they_start_on_their_parents_path() -> None:
    segments = {s.segment_id: s for s in new("segments", [1])}
    completion = segments["g000001-0001-m001-a0-i004-c"]
    prompt = segments[completion.parent]
    assert (prompt.start, prompt.parent, prompt.episode_id) == (0, None, "g000001-0001-m001")
    assert (completion.start, completion.episode_id) == (len(prompt.token_ids), "g000001-0001-m001")
    assert completion.start == 53
    calls = {c.completion_segment: c for c in new("invocations", [1])}
    assert all(s.start == calls[s.segment_id].num_prompt_tokens for s in segments.values() if s.parent)


def test_the_segments_of_demonstrations_belong_to_no_episode() -> None:
    table = old("segments").slice(0, 1)
    ids = table.schema.get_field_index("segment_id")
    table = table.set_column(ids, table.schema.field("segment_id"), pa.array(["d000000-solver-000001-t"]))
    assert upgraded("segments", table)["episode_id"].to_pylist() == [""]


def test_a_sample_ends_at_the_last_segment_of_its_path() -> None:
    paths = {row["sample_id"]: row["segments"] for row in old("samples").to_pylist()}
    samples = new("samples", [1])
    assert {s.sample_id: s.leaf_segment for s in samples} == {name: path[-1] for name, path in paths.items()}
    assert {(s.task_id, s.reward, s.version_max) for s in samples} == {(None, None, None)}


def test_the_reward_function_of_an_old_version_is_unknown() -> None:
    assert {version.reward_hash for version in new("policy_versions")} == {""}


def test_chosen_columns_of_an_old_store_are_read_as_new_ones() -> None:
    found = MegReader(str(OLD_STORE)).read_table(
        "old", "samples", [1], ["leaf_segment", "reward", "sample_id"]
    )
    assert found.column_names == ["leaf_segment", "reward", "sample_id"]
    assert found.num_rows == 20


def test_a_table_of_this_version_stays_as_it_is() -> None:
    table = SCHEMAS["edges"].empty_table()
    assert upgraded("edges", table) is table


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 2, SCHEMA_VERSION + 1])
def test_a_version_that_is_neither_this_one_nor_the_one_before_is_refused(version: int) -> None:
    table = old("edges").replace_schema_metadata({"schema_version": str(version)})
    with pytest.raises(
        ValueError, match=rf"table edges: schema_version {version}, this reader opens 1 and 2"
    ):
        upgraded("edges", table)


def test_an_id_that_no_old_program_wrote_is_named() -> None:
    table = old("invocations").slice(0, 1)
    table = table.set_column(0, table.schema.field(0), pa.array(["call-7"]))
    with pytest.raises(ValueError, match="table invocations: id call-7 is not one of schema_version 1"):
        upgraded("invocations", table)


def test_a_parent_that_is_not_in_the_table_is_named() -> None:
    table = old("segments")
    lost = table.filter(pa.compute.is_valid(table["parent"]))
    with pytest.raises(ValueError, match=r"table segments: parent \S+-p\w+ is not among its rows"):
        upgraded("segments", lost)
