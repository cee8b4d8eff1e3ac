from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megloom.compute.graph.records import RECORDS
from megloom.compute.graph.schemas import from_table, to_table
from megloom.compute.store import seal
from megloom.compute.store.draft import Draft
from megloom.compute.store.errors import StoreError
from megloom.compute.store.files import Folder
from megloom.compute.store.lineage.index_tables import INDEX_SCHEMAS
from megloom.compute.store.manifest import Manifest
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.seal import write_rows, write_step
from megloom.compute.store.sqlite_journal import SqliteJournal
from megloom.compute.store.store import MegStore

STEP = 9  # ends the first window of the index, so that a seal also writes a block


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


class DyingFolder(Folder):
    """A folder whose process dies when it is about to do its `num_writes`-th change."""

    def __init__(self, root: str, num_writes: int) -> None:
        super().__init__(root)
        self.num_left = num_writes

    def write(self, path: str, data: bytes | memoryview) -> None:
        self._spend()
        super().write(path, data)

    def publish(self, path: str, data: bytes) -> None:
        self._spend()
        super().publish(path, data)

    def keep(self, draft: Draft, path: str) -> None:
        self._spend()
        super().keep(draft, path)

    def _spend(self) -> None:
        if not self.num_left:
            raise Killed
        self.num_left -= 1


def records_of_a_step(build: Any) -> list[Any]:
    agents = ("planner", "solver")
    calls = [build.invocation(f"i-{a}-{n}", agent=a, policy=a, step=STEP) for a in agents for n in range(2)]
    samples = [
        build.sample(f"x-{c.invocation_id}", agent=c.agent, invocation_id=c.invocation_id, step=STEP)
        for c in calls
    ]
    return [
        *calls,
        *samples,
        build.segment(step=STEP),
        build.edge("i-planner-0", "i-solver-0", step=STEP),
        build.micro_batch(sample_ids=["x-i-solver-0"], step=STEP),
        build.version(version=1, step=STEP),
    ]


def test_a_step_is_cut_by_table_and_what_an_agents_trainer_reads_also_by_agent(root: str, build: Any) -> None:
    manifest = write_step(Folder(root), "r", STEP, records_of_a_step(build), None, {"cursor": 4})
    assert [(f.table, f.agent, f.num_rows) for f in manifest.files if f.table in RECORDS] == [
        ("edges", None, 1),
        ("invocations", "planner", 2),
        ("invocations", "solver", 2),
        ("micro_batches", None, 1),
        ("policy_versions", None, 1),
        ("samples", "planner", 2),
        ("samples", "solver", 2),
        ("segments", None, 1),
    ]
    assert MegReader(root).read_manifest("r", STEP) == manifest


def test_files_are_named_by_their_content(root: str, build: Any) -> None:
    first = write_step(Folder(root), "r", 1, [build.edge(), build.sample()], None, {})
    second = write_step(Folder(root), "r", 2, [build.edge("x", "y", step=2)], 1, {})
    again = write_step(Folder(f"{root}/again"), "r", 1, [build.edge(), build.sample()], None, {})
    assert [f.name for f in first.files] == [f.name for f in again.files]
    assert [f.name.removesuffix(".parquet") for f in first.files] == [
        f"edges-{first.files[0].digest[:12]}",
        f"samples-solver-{first.files[1].digest[:12]}",
    ]
    assert second.files[0].name != first.files[0].name


def test_a_step_carries_its_index(root: str, build: Any) -> None:
    write_step(Folder(root), "r", STEP, records_of_a_step(build), None, {})
    reader = MegReader(root)
    versions = reader.read_table("r", "index_versions")
    assert versions.schema == INDEX_SCHEMAS["index_versions"]
    assert versions.select(["policy", "version", "num_samples"]).to_pylist() == [
        {"policy": "solver", "version": 1, "num_samples": 1}
    ]
    assert reader.read_table("r", "index_edges", columns=["from_version", "relation"]).num_rows == 3


async def sealed_by(folder: Folder, journal_path: Path, records: list[Any]) -> Manifest:
    """One life of a process: recovers, does what is missing of the step, and seals it."""
    offload = InlineOffload()
    async with SqliteJournal.open(journal_path, offload) as journal:
        store = MegStore(root=folder, journal=journal, offload=offload)
        manifest = await store.recover("r")
        if manifest is None:
            for record in records:
                store.record(record)
            manifest = await store.seal("r", STEP, {"cursor": 4})
        assert await store.unsealed() == []
        return manifest


def test_a_process_killed_at_any_write_is_repaired_by_the_next_one(
    root: str, build: Any, tmp_path: Path
) -> None:
    records = records_of_a_step(build)
    whole = asyncio.run(sealed_by(Folder(f"{root}/whole"), tmp_path / "whole.sqlite", records))
    index = Folder(f"{root}/whole").names("meg/r/index")
    assert index
    for num_writes in count(step=5 if root.startswith("s3") else 1):
        where, journal = f"{root}/{num_writes}", tmp_path / f"{num_writes}.sqlite"
        try:
            asyncio.run(sealed_by(DyingFolder(where, num_writes), journal, records))
            break
        except Killed:
            assert MegReader(where).sealed_steps("r") in ([], [STEP])
        assert asyncio.run(sealed_by(Folder(where), journal, records)) == whole
        found = Folder(where).names(f"meg/r/step={STEP:06d}")
        assert found == sorted([*(f.name for f in whole.files), "manifest.json"])
        assert Folder(where).names("meg/r/index") == index
    assert num_writes > len(whole.files) + 2


def test_a_reader_sees_nothing_of_a_step_without_a_manifest(root: str, build: Any) -> None:
    with pytest.raises(Killed):
        write_step(DyingFolder(root, 3), "r", STEP, records_of_a_step(build), None, {})
    assert MegReader(root).sealed_steps("r") == []
    with pytest.raises(FileNotFoundError, match="run r has no sealed step"):
        MegReader(root).read_table("r", "edges")


def test_the_same_rows_give_the_same_file_however_the_journal_had_cut_them(
    root: str, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal, "ROW_GROUP", 4)
    edges = build.edges(11)
    whole = to_table("edges", edges).to_batches()
    cut = [pa.RecordBatch.from_pylist([row], schema=whole[0].schema) for row in whole[0].to_pylist()]
    first = write_rows(Folder(root), "r", 1, {"edges": whole}, None, {})
    second = write_rows(Folder(root), "r", 2, {"edges": cut}, None, {})
    assert second.files == first.files
    assert from_table("edges", MegReader(root).read_table("r", "edges", steps=[2])) == edges


def test_a_refusal_before_the_manifest_leaves_the_step_unsealed(root: str, build: Any) -> None:
    def refuse() -> None:
        raise StoreError("not you")

    rows = {"edges": to_table("edges", [build.edge()]).to_batches()}
    with pytest.raises(StoreError, match="not you"):
        write_rows(Folder(root), "r", 1, rows, None, {}, refuse)
    assert MegReader(root).sealed_steps("r") == []


def test_an_agent_whose_name_could_leave_the_folder_is_refused_before_anything_is_written(
    root: str, build: Any
) -> None:
    with pytest.raises(ValueError, match="agent"):
        write_step(Folder(root), "r", 1, [build.edge(), build.sample(agent="../x")], None, {})
    assert Folder(root).names("meg/r") == []
