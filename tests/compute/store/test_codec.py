from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megloom.compute.graph.records import EdgeKind
from megloom.compute.graph.schemas import SCHEMAS, from_table, to_table
from megloom.compute.store.codec import Entry, encode, to_batch, to_entries, to_records


def decode(entry: Entry) -> Any:
    return to_records([(entry.table, entry.row)])[0]


def test_a_body_gives_the_record_back(build: Any) -> None:
    for record in (build.task(), build.segment(), build.invocation(), build.sample(), build.version()):
        assert decode(encode(record)) == record


def test_logprobs_are_float32_from_the_start_as_parquet_keeps_them(build: Any) -> None:
    record = build.segment(logprobs=[-0.1, -1 / 3, float("-inf")])
    in_parquet = from_table("segments", to_table("segments", [record]))
    assert [decode(encode(record))] == in_parquet != [record]


def test_equal_records_have_equal_digests_and_other_content_another(build: Any) -> None:
    assert encode(build.edge()).digest == encode(build.edge()).digest
    assert encode(build.edge()).digest != encode(build.edge(kind="order")).digest


def test_a_lone_surrogate_from_a_model_becomes_the_replacement_character(build: Any) -> None:
    stored = decode(encode(build.invocation(text="ok \udcff 好", failure="\ud800")))
    assert (stored.text, stored.failure) == ("ok \ufffd 好", "\ufffd")


def test_a_missing_required_value_is_refused_with_the_key_and_the_field(build: Any) -> None:
    with pytest.raises(ValueError, match="invocations i9: agent must not be None"):
        encode(build.invocation("i9", agent=None))


@pytest.mark.parametrize(
    "field, value",
    [
        ("index", 1.5),
        ("index", True),
        ("text", 7),
        ("temperature", "hot"),
        ("reward", "1"),
        ("version_min", 2**63),
        ("registered_s", None),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_key_and_the_field(
    build: Any, field: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=rf"invocations i1: .*{field}"):
        encode(build.invocation(**{field: value}))


@pytest.mark.parametrize(
    "field, value",
    [
        ("token_ids", [2**31]),
        ("token_ids", [0.5]),
        ("token_ids", None),
        ("logprobs", ["x"]),
        ("version_spans", [[0.5]]),
        ("version_spans", [[2**63]]),
        ("version_spans", 3),
    ],
)
def test_arrays_that_do_not_fit_their_columns_are_refused_now(build: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match="segments s1: "):
        encode(build.segment(**{field: value}))


def test_numbers_and_texts_of_kindred_types_become_those_of_their_columns(build: Any) -> None:
    entry = encode(build.edge(kind=EdgeKind.ORDER))
    assert type(entry.row[SCHEMAS["edges"].names.index("kind")]) is str
    assert entry.digest == encode(build.edge(kind="order")).digest
    assert encode(build.invocation(reward=1)).digest == encode(build.invocation(reward=1.0)).digest
    spans = [(0, 0, 2), (1, 2, 3)]
    assert encode(build.segment(version_spans=spans)).digest == encode(build.segment()).digest


def test_entries_are_found_again_in_a_batch_of_rows(build: Any) -> None:
    for table, records in {
        "segments": [build.segment("s1"), build.segment("s2", logprobs=None, token_ids=[])],
        "micro_batches": [build.micro_batch(sample_ids=[])],
        "invocations": [build.invocation(), build.invocation("i2", reward=-1.0)],
    }.items():
        entries = [encode(record) for record in records]
        assert list(to_entries(table, to_batch(table, [entry.row for entry in entries]))) == entries


def test_rewards_of_minus_one_and_minus_two_are_told_apart(build: Any) -> None:
    assert encode(build.episode(reward=-1.0)).digest != encode(build.episode(reward=-2.0)).digest


def test_a_seed_beyond_64_bits_is_refused_now_and_not_at_the_seal(build: Any) -> None:
    with pytest.raises(
        ValueError, match=r"invocations i1: cannot be stored: seed: integers must be below 2\*\*63"
    ):
        encode(build.invocation(seed=2**63))
    encode(build.invocation(seed=2**63 - 1))


def test_a_numpy_scalar_is_refused_and_the_next_record_is_not_harmed(build: Any) -> None:
    with pytest.raises(ValueError, match="samples x1: cannot be stored"):
        encode(replace(build.sample(), num_tokens=np.int64(3)))
    assert decode(encode(build.sample())) == build.sample()
