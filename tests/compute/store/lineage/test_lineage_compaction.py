"""Compaction: which blocks there are, what a kill leaves, and steps that carry no index."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megloom.compute.graph.schemas import to_table
from megloom.compute.store.errors import CorruptFile, StoreError
from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.backward import version_lineage
from megloom.compute.store.lineage.blocks import Window, cover, parse_block, window_of, windows_in
from megloom.compute.store.lineage.compaction import INDEX_SCHEMAS, compact, step_index
from megloom.compute.store.lineage.run_index import RunIndex
from megloom.compute.store.seal import write_step
from tests.compute.store.lineage.runs import random_run

INDEX = "meg/r/index"
V1 = Path(__file__).parents[3] / "data" / "meg_v1"


class Killed(Exception):
    pass


class FailingFolder(Folder):
    """Dies at its operation number `at`; a write that dies leaves half of the file."""

    def __init__(self, root: str, at: int) -> None:
        super().__init__(root)
        self.left = at

    def _count(self) -> bool:
        self.left -= 1
        return self.left < 0

    def read(self, path: str) -> bytes:
        if self._count():
            raise Killed
        return super().read(path)

    def names(self, path: str) -> list[str]:
        if self._count():
            raise Killed
        return super().names(path)

    def write(self, path: str, data: bytes | memoryview) -> None:
        if self._count():
            super().write(path, bytes(data)[: len(data) // 2])
            raise Killed
        super().write(path, data)

    def publish(self, path: str, data: bytes) -> None:
        if self._count():
            raise Killed
        super().publish(path, data)


def seal(root: str, build: Any, num_steps: int, *, first: int = 0, fan_out: int | None = None) -> None:
    for step, records in list(enumerate(random_run(build, 5, num_steps)))[first:]:
        write_step(Folder(root), "r", step, records, step - 1 if step else None, {})
        if fan_out is not None:
            compact(Folder(root), "r", step, fan_out=fan_out)


def blocks(root: str) -> list[str]:
    return [window.name for window in windows_in(Folder(root).names(INDEX))]


def contents(root: str) -> dict[str, bytes]:
    return {name: Folder(root).read(f"{INDEX}/{name}") for name in Folder(root).names(INDEX)}


def answer(root: str) -> Any:
    found = version_lineage(root, "r", "solver", "last")
    return replace(found, num_files=0, num_files_opened=0)


def test_a_step_without_rows_has_empty_tables_of_the_schemas() -> None:
    found = step_index({})
    assert {name: table.schema for name, table in found.items()} == INDEX_SCHEMAS
    assert sum(table.num_rows for table in found.values()) == 0


def test_only_calls_of_the_samples_own_attempt_stand_behind_it(build: Any) -> None:
    tables = step_index(
        {
            "policy_versions": to_table("policy_versions", [build.version("solver", 1)]),
            "micro_batches": to_table("micro_batches", [build.micro_batch()]),
            "samples": to_table("samples", [build.sample(invocation_id="i-a1")]),
            "invocations": to_table(
                "invocations",
                [
                    build.invocation("i-a0", attempt=0, policy="failed"),
                    build.invocation("i-a1", attempt=1),
                    build.invocation("j-a1", attempt=1, policy="judge", version_min=2, version_max=4),
                    build.invocation("aborted", attempt=1, version_min=None, version_max=None),
                ],
            ),
        }
    )
    sampled = [row for row in tables["index_edges"].to_pylist() if row["relation"] == "sampled"]
    assert [(row["from_policy"], row["from_version"], row["num_calls"]) for row in sampled] == [
        ("judge", 2, 1),
        ("judge", 3, 1),
        ("judge", 4, 1),
        ("solver", 0, 1),
    ]


def test_a_sample_whose_call_is_sealed_elsewhere_counts_with_its_own_versions(build: Any) -> None:
    tables = step_index(
        {
            "policy_versions": to_table("policy_versions", [build.version("solver", 5, parent_version=0)]),
            "micro_batches": to_table("micro_batches", [build.micro_batch(step=5)]),
            "samples": to_table("samples", [build.sample(version_min=2, version_max=3)]),
        }
    )
    sampled = [row for row in tables["index_edges"].to_pylist() if row["relation"] == "sampled"]
    assert [(row["from_version"], row["num_calls"]) for row in sampled] == [(2, 1), (3, 1)]


def test_windows_are_aligned_and_the_largest_cover() -> None:
    assert window_of(127, 10) == Window(first=120, last=129)
    names = ["000000-000009.json", "000010-000019.json", "000000-000099.json", "000100-000109.json"]
    others = ["000000-000009-edges.parquet", ".000000-000009.json.77", "notes.txt"]
    assert [w.name for w in cover(windows_in(names + others))] == ["000000-000099", "000100-000109"]


def test_ten_steps_become_a_block_and_ten_blocks_a_larger_one(root: str, build: Any) -> None:
    seal(root, build, 9, fan_out=3)
    assert blocks(root) == ["000000-000002", "000000-000008", "000003-000005", "000006-000008"]
    assert len(RunIndex(root, "r").steps) == 9


def test_a_block_may_lack_steps_at_its_ends_and_in_its_middle(root: str, build: Any) -> None:
    steps = random_run(build, 5, 12)
    for step in (2, 4, 7, 11):
        write_step(Folder(root), "r", step, steps[step], None, {})
    compact(Folder(root), "r", 11, fan_out=3)
    assert RunIndex(root, "r").steps == (2, 4, 7, 11)
    assert blocks(root) == [
        "000000-000002", "000000-000008", "000003-000005", "000006-000008", "000009-000011",
    ]  # fmt: skip


def test_an_unsealed_step_is_in_no_block(root: str, build: Any) -> None:
    seal(root, build, 2)
    Folder(root).write("meg/r/step=000002/samples.parquet", b"half")
    compact(Folder(root), "r", 1, fan_out=2)
    assert (blocks(root), RunIndex(root, "r").steps) == (["000000-000001"], (0, 1))


def test_compaction_of_a_compacted_run_changes_nothing(root: str, build: Any) -> None:
    seal(root, build, 8, fan_out=2)
    before = contents(root)
    compact(Folder(root), "r", 7, fan_out=2)
    assert contents(root) == before


def test_compaction_at_once_gives_the_bytes_of_compaction_step_by_step(tmp_path: Path, build: Any) -> None:
    at_once, stepwise = str(tmp_path / "once"), str(tmp_path / "stepwise")
    seal(stepwise, build, 8, fan_out=2)
    seal(at_once, build, 8)
    compact(Folder(at_once), "r", 7, fan_out=2)
    assert contents(at_once) == contents(stepwise)


def test_a_compaction_killed_at_any_operation_leaves_right_answers(tmp_path: Path, build: Any) -> None:
    whole = str(tmp_path / "whole")
    seal(whole, build, 4, fan_out=2)
    expected, files = answer(whole), contents(whole)
    before = str(tmp_path / "before")
    seal(before, build, 2, fan_out=2)
    seal(before, build, 4, first=2)
    for at in range(1_000):
        root = str(tmp_path / f"killed-{at}")
        shutil.copytree(before, root)
        try:
            compact(FailingFolder(root, at), "r", 3, fan_out=2)
        except Killed:
            assert answer(root) == expected, f"killed at operation {at}"
            compact(Folder(root), "r", 3, fan_out=2)
            assert contents(root) == files, f"completed after a kill at operation {at}"
        else:
            break
    assert at > 30  # two blocks of six files each, their parts and listings
    assert contents(root) == files


def test_a_damaged_block_is_not_read(root: str, build: Any) -> None:
    seal(root, build, 2, fan_out=2)
    Folder(root).write(f"{INDEX}/000000-000001-edges.parquet", b"PAR1")
    with pytest.raises(CorruptFile, match=r"000000-000001-edges\.parquet: digest"):
        version_lineage(root, "r", "solver", "last")
    data = Folder(root).read(f"{INDEX}/000000-000001.json")
    Folder(root).write(f"{INDEX}/000000-000001.json", data.replace(b'"last": 1', b'"last": 2'))
    with pytest.raises(CorruptFile, match=r"000000-000001\.json: its content does not match"):
        version_lineage(root, "r", "solver", "last")


def test_a_block_of_a_newer_program_is_refused_by_name() -> None:
    with pytest.raises(CorruptFile, match=r"x\.json: not an index block"):
        parse_block(b"{}", "x.json")
    content = {"block_version": 99}
    from megloom.compute.store.files import file_digest

    digest = file_digest(json.dumps(content, sort_keys=True).encode())
    with pytest.raises(StoreError, match=r"x\.json: index version 99, this reader knows 1"):
        parse_block(json.dumps({"digest": digest, "block": content}).encode(), "x.json")


def test_the_deleted_index_is_made_again(root: str, build: Any) -> None:
    seal(root, build, 4, fan_out=2)
    before = contents(root)
    for name in before:
        Folder(root).remove(f"{INDEX}/{name}")
    compact(Folder(root), "r", 3, fan_out=2)
    assert contents(root) == before


def test_a_store_of_schema_1_is_indexed_from_its_tables(tmp_path: Path) -> None:
    root = str(tmp_path)
    for path in V1.rglob("*.*"):
        Folder(root).write(str(path.relative_to(V1)), path.read_bytes())
    plain = version_lineage(root, "old", "solver", "last")
    assert (plain.row.version, len(plain.samples), plain.samples[0].task_id) == (2, 12, "train000002")
    compact(Folder(root), "old", 2, fan_out=3)
    compacted = version_lineage(root, "old", "solver", "last")
    assert compacted.num_files_opened < plain.num_files_opened
    count = {"num_files": 0, "num_files_opened": 0}
    assert replace(plain, **count) == replace(compacted, **count)
