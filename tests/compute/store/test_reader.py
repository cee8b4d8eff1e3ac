from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megloom.compute.graph.records import RECORDS
from megloom.compute.graph.schemas import SCHEMAS, from_table
from megloom.compute.store.errors import CorruptFile
from megloom.compute.store.files import Folder
from megloom.compute.store.reader import MegReader
from megloom.compute.store.seal import write_step


def seal(root: str, step: int, *records: Any, run: str = "r") -> None:
    write_step(Folder(root), run, step, records, None, {})


def path_of(root: str, table: str, step: int = 1) -> str:
    files = MegReader(root).read_manifest("r", step).files
    return next(f"meg/r/step={step:06d}/{file.name}" for file in files if file.table == table)


def test_a_table_is_the_rows_of_all_sealed_steps_or_of_the_chosen_ones(root: str, build: Any) -> None:
    edges = [build.edge("a", "b", step=step) for step in (1, 2, 3)]
    for edge in edges:
        seal(root, edge.step, edge)
    reader = MegReader(root)
    assert from_table("edges", reader.read_table("r", "edges")) == edges
    assert from_table("edges", reader.read_table("r", "edges", steps=[3, 1])) == [edges[2], edges[0]]
    assert (reader.runs(), reader.sealed_steps("r")) == (["r"], [1, 2, 3])


def test_the_last_sealed_step_is_found_past_steps_without_a_manifest(root: str, build: Any) -> None:
    reader = MegReader(root)
    assert reader.last_sealed_step("r") is None
    for step in (1, 3):
        seal(root, step, build.edge(step=step))
    Folder(root).write("meg/r/step=000004/edges-0123456789ab.parquet", b"half")
    Folder(root).write("meg/r/index/000000-000009.json", b"{}")
    assert reader.last_sealed_step("r") == 3
    assert [reader.is_sealed("r", step) for step in (1, 2, 3, 4)] == [True, False, True, False]
    assert reader.sealed_steps("r") == [1, 3]


def test_all_agents_of_a_table_are_read_together(root: str, build: Any) -> None:
    samples = [build.sample("x1", agent="planner"), build.sample("x2", agent="solver")]
    seal(root, 1, *samples)
    assert from_table("samples", MegReader(root).read_table("r", "samples")) == samples


@pytest.mark.parametrize("table", RECORDS)
def test_a_table_without_rows_is_empty_and_has_its_schema(root: str, build: Any, table: str) -> None:
    seal(root, 1, build.task("t9"))
    if table != "tasks":
        empty = MegReader(root).read_table("r", table)
        assert (empty.num_rows, empty.schema) == (0, SCHEMAS[table])


def test_nested_and_missing_values_survive_parquet(root: str, build: Any) -> None:
    records = [
        build.segment("s1", logprobs=[-0.5, -0.25, 0.0], token_ids=[0, 2**31 - 1, 3]),
        build.segment("s2", sampled=False, logprobs=None, version_spans=None, token_ids=[]),
        replace(build.segment("s3"), parent="s1"),
    ]
    seal(root, 1, *records)
    assert from_table("segments", MegReader(root).read_table("r", "segments")) == records


def test_only_the_wanted_columns_are_read(root: str, build: Any) -> None:
    seal(root, 1, build.sample(agent="planner"), build.sample("x2"))
    found = MegReader(root).read_table("r", "samples", columns=["sample_id", "advantage"])
    assert found.to_pylist() == [{"sample_id": "x1", "advantage": 0.5}, {"sample_id": "x2", "advantage": 0.5}]


def test_one_flipped_bit_is_found_and_the_file_named(root: str, build: Any) -> None:
    seal(root, 1, build.edge(), build.task())
    folder, path = Folder(root), path_of(root, "edges")
    data = bytearray(folder.read(path))
    data[len(data) // 2] ^= 1
    folder.write(path, bytes(data))
    with pytest.raises(CorruptFile, match=r"step=000001/edges-\w+\.parquet: digest"):
        MegReader(root).read_table("r", "edges")
    assert MegReader(root).read_table("r", "tasks").num_rows == 1


def test_a_damaged_manifest_is_found_and_named(root: str, build: Any) -> None:
    seal(root, 1, build.edge())
    Folder(root).write("meg/r/step=000001/manifest.json", b"{}")
    with pytest.raises(CorruptFile, match=r"meg/r/step=000001/manifest\.json"):
        MegReader(root).read_table("r", "edges")


def test_a_manifest_in_the_wrong_folder_is_found(root: str, build: Any) -> None:
    seal(root, 1, build.edge())
    folder = Folder(root)
    folder.write("meg/r/step=000002/manifest.json", folder.read("meg/r/step=000001/manifest.json"))
    with pytest.raises(CorruptFile, match="belongs to run r step 1"):
        MegReader(root).read_manifest("r", 2)


def test_what_is_missing_is_named(root: str, build: Any) -> None:
    reader = MegReader(root)
    assert (reader.runs(), reader.sealed_steps("r")) == ([], [])
    with pytest.raises(FileNotFoundError, match="run r has no sealed step"):
        reader.read_table("r", "edges")
    seal(root, 1, build.edge())
    with pytest.raises(FileNotFoundError, match=r"step=000005/manifest\.json"):
        reader.read_table("r", "edges", steps=[5])
