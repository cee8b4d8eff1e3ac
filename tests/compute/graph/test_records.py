from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megloom.compute.graph.records import (
    KEYS,
    RECORDS,
    EdgeRecord,
    SegmentRecord,
    clean_record,
    clean_text,
    record_key,
)
from megloom.compute.graph.schemas import SCHEMA_VERSION, SCHEMAS, from_table, to_table

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXTS,
    "int": INTEGERS,
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "list[str]": st.lists(TEXTS, max_size=4),
    "list[int]": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    "list[float]": st.lists(st.floats(width=32, allow_nan=False), max_size=4),
    "list[list[int]]": st.lists(st.lists(INTEGERS, max_size=3), max_size=3),
}


def values_of(annotation: str) -> st.SearchStrategy[Any]:
    values = SCALARS[annotation.removesuffix(" | None")]
    return st.none() | values if annotation.endswith("| None") else values


def records_of(table: str) -> st.SearchStrategy[Any]:
    record = RECORDS[table]
    return st.builds(record, **{f.name: values_of(str(f.type)) for f in fields(record)})


def edge(**overrides: Any) -> EdgeRecord:
    values: dict[str, Any] = {
        "episode_id": "e1",
        "run": "r",
        "step": 1,
        "parent": "a",
        "child": "b",
        "kind": "data",
    }
    return EdgeRecord(**(values | overrides))


@pytest.mark.parametrize("table", RECORDS)
def test_every_record_comes_back_from_arrow_as_it_went_in(table: str) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.lists(records_of(table), max_size=2))
    def round_trip(records: list[Any]) -> None:
        assert from_table(table, to_table(table, records)) == records

    round_trip()


@pytest.mark.parametrize("table", RECORDS)
def test_columns_stand_in_the_order_of_the_fields_and_are_nullable_where_none_is_allowed(table: str) -> None:
    found = [(column.name, column.nullable) for column in SCHEMAS[table]]
    assert found == [(f.name, str(f.type).endswith("| None")) for f in fields(RECORDS[table])]


@pytest.mark.parametrize("table", RECORDS)
def test_keys_are_fields_that_cannot_be_none(table: str) -> None:
    assert all(not SCHEMAS[table].field(name).nullable for name in KEYS[table])


def test_none_is_stored_as_none_and_not_as_zero_or_empty() -> None:
    prompt = SegmentRecord(
        segment_id="s",
        episode_id="e1",
        run="r",
        step=1,
        policy="p",
        parent=None,
        start=0,
        sampled=False,
        token_ids=[],
        logprobs=None,
        version_spans=None,
    )
    empty = replace(prompt, segment_id="t", logprobs=[], version_spans=[])
    assert from_table("segments", to_table("segments", [prompt, empty])) == [prompt, empty]


def test_the_key_of_a_record_does_not_depend_on_its_other_fields() -> None:
    assert record_key(edge()) == record_key(edge(step=2)) == "a|b|data"
    assert record_key(edge()) != record_key(edge(child="c"))


def test_a_table_written_by_a_newer_program_is_refused() -> None:
    newer = to_table("edges", [edge()]).replace_schema_metadata({"schema_version": str(SCHEMA_VERSION + 1)})
    with pytest.raises(ValueError, match="table edges: schema_version 3 is newer"):
        from_table("edges", newer)


def test_a_lone_surrogate_is_replaced_and_arrow_takes_the_text_then() -> None:
    broken = edge(kind="da\ud800ta")
    with pytest.raises((UnicodeEncodeError, pa.ArrowInvalid)):
        to_table("edges", [broken])
    assert from_table("edges", to_table("edges", [clean_record(broken)])) == [edge(kind="da\ufffdta")]


def test_a_pair_of_surrogates_is_joined_into_its_character() -> None:
    assert clean_text("\ud83d\ude00") == "😀"


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_cleaned_text_is_always_valid_and_cleaning_it_again_changes_nothing(text: str) -> None:
    cleaned = clean_text(text)
    cleaned.encode()
    assert clean_text(cleaned) == cleaned


@settings(max_examples=50, deadline=None)
@given(TEXTS)
def test_cleaning_leaves_valid_text_alone(text: str) -> None:
    assert clean_text(text) == text
