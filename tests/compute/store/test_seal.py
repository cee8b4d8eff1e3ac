from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megloom.compute.graph.schemas import from_table
from megloom.compute.store.files import Folder
from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.reader import MegReader
from megloom.compute.store.seal import write_step
from megloom.compute.store.store import MegStore


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


class DyingFolder(Folder):
    """A folder whose process dies when it is about to do its `num_writes`-th write."""

    def __init__(self, root: str, num_writes: int) -> None:
        super().__init__(root)
        self.num_left = num_writes

    def write(self, path: str, data: bytes) -> None:
        self._spend()
        super().write(path, data)

    def publish(self, path: str, data: bytes) -> None:
        self._spend()
        super().publish(path, data)

    def _spend(self) -> None:
        if not self.num_left:
            raise Killed
        self.num_left -= 1


def records_of_a_step(build: Any) -> list[Any]:
    agents = ("planner", "solver")
    calls = [build.invocation(f"i-{a}-{n}", agent=a, policy=a) for a in agents for n in range(2)]
    samples = [
        build.sample(f"x-{c.invocation_id}", agent=c.agent, invocation_id=c.invocation_id) for c in calls
    ]
    return [build.task(), *calls, *samples, build.segment(), build.edge("i-planner-0", "i-solver-0")]


def test_a_step_is_cut_by_table_and_calls_and_samples_also_by_agent(root: str, build: Any) -> None:
    manifest = write_step(Folder(root), "r", 1, records_of_a_step(build), None, {"cursor": 4})
    assert [(f.name, f.num_rows) for f in manifest.files] == [
        ("edges.parquet", 1),
        ("invocations-planner.parquet", 2),
        ("invocations-solver.parquet", 2),
        ("samples-planner.parquet", 2),
        ("samples-solver.parquet", 2),
        ("segments.parquet", 1),
        ("tasks.parquet", 1),
    ]
    assert MegReader(root).read_manifest("r", 1) == manifest


@pytest.mark.parametrize("num_writes", range(8))
def test_a_process_killed_between_two_writes_leaves_the_step_unsealed_and_the_next_seal_completes_it(
    root: str, build: Any, num_writes: int
) -> None:
    records = records_of_a_step(build)
    with pytest.raises(Killed):
        write_step(DyingFolder(root, num_writes), "r", 1, records, None, {})
    reader = MegReader(root)
    assert reader.sealed_steps("r") == []
    with pytest.raises(FileNotFoundError):
        reader.read_table("r", "edges")

    async def restart() -> None:
        store = MegStore(root=root, journal=MemoryJournal(), offload=InlineOffload())
        assert await store.recover("r") is None
        for record in records:
            store.record(record, step=1)
        await store.seal("r", 1)

    asyncio.run(restart())
    assert reader.sealed_steps("r") == [1]
    assert from_table("edges", reader.read_table("r", "edges")) == [r for r in records if hasattr(r, "child")]


def test_an_agent_whose_name_could_leave_the_folder_is_refused_before_anything_is_written(
    root: str, build: Any
) -> None:
    with pytest.raises(ValueError, match="agent"):
        write_step(Folder(root), "r", 1, [build.edge(), build.sample(agent="../x")], None, {})
    assert Folder(root).names("meg/r") == []
