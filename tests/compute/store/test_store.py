from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import pytest

from megloom.compute.graph.schemas import from_table
from megloom.compute.store.errors import ConflictingRecord, StoreError
from megloom.compute.store.files import Folder
from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload, ThreadOffload
from megloom.compute.store.seal import write_step
from megloom.compute.store.sqlite_journal import SqliteJournal
from megloom.compute.store.store import MegStore

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class DyingOffload:
    """Runs inline; the process "dies" right after the work called `last` is done."""

    def __init__(self, last: str) -> None:
        self.last = last

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        result = fn(*args)
        if fn.__name__ == self.last:
            raise KeyboardInterrupt
        return result


def memory_store(root: str) -> MegStore:
    return MegStore(root=root, journal=MemoryJournal(), offload=InlineOffload())


@asynccontextmanager
async def durable_store(folder: Path) -> AsyncIterator[MegStore]:
    with ThreadOffload("store") as offload:
        async with SqliteJournal.open(folder / "journal.sqlite", offload) as journal:
            yield MegStore(root=str(folder), journal=journal, offload=offload)


def test_sealed_records_are_read_back_and_leave_the_journal(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        records = [build.edge(), build.segment(), build.invocation()]
        for record in records:
            store.record(record)
        manifest = await store.seal("r", 1, {"cursor": 5})
        assert manifest.num_rows == {"edges": 1, "invocations": 1, "segments": 1}
        assert (manifest.previous_step, manifest.snapshot) == (None, {"cursor": 5})
        assert await store.unsealed() == []
        assert from_table("segments", store.reader.read_table("r", "segments")) == [build.segment()]

    asyncio.run(main())


def test_each_manifest_names_the_step_sealed_before_it(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        for step in (0, 1, 4):
            store.record(build.edge(step=step))
            await store.seal("r", step)
        assert [store.reader.read_manifest("r", s).previous_step for s in (0, 1, 4)] == [None, 0, 1]

    asyncio.run(main())


def test_records_of_the_next_step_stay_in_the_journal(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        store.record(build.edge("a", "b", step=1))
        store.record(build.edge("c", "d", step=2))
        await store.seal("r", 1)
        assert await store.unsealed() == [build.edge("c", "d", step=2)]

    asyncio.run(main())


def test_a_record_without_a_step_needs_one(root: str, build: Any) -> None:
    store = memory_store(root)
    store.record(build.task(), step=1)
    with pytest.raises(ValueError, match="a record of tasks has no step of its own"):
        store.record(build.task("t2"))


def test_an_agent_whose_name_cannot_name_a_file_is_refused_at_its_first_record(build: Any) -> None:
    store = memory_store("memory://refused")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"agent '\.\./x' must be"):
            store.record(build.sample(agent="../x"))
    store.record(build.sample())


def test_a_seal_whose_index_failed_is_completed_by_the_same_seal(
    root: str, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacted: list[int] = []

    def compact(folder: Folder, run: str, step: int) -> None:
        compacted.append(step)
        if len(compacted) == 1:
            raise StoreError("disk full")

    monkeypatch.setattr("megloom.compute.store.store.compact", compact)

    async def main() -> None:
        store = memory_store(root)
        store.record(build.edge())
        with pytest.raises(StoreError, match="disk full"):
            await store.seal("r", 1, {"cursor": 1})
        with pytest.raises(StoreError, match="step 1 is sealed"):
            store.record(build.edge("x", "y"))
        assert (await store.seal("r", 1, {"cursor": 1})).num_rows == {"edges": 1}
        await memory_store(root).recover("r")

    asyncio.run(main())
    assert compacted == [1, 1, 1]


def test_the_same_record_twice_is_one_row_and_other_content_an_error(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        store.record(build.episode())
        store.record(build.episode())
        with pytest.raises(ConflictingRecord):
            store.record(build.episode(reward=0.0))
        assert (await store.seal("r", 1)).num_rows == {"episodes": 1}

    asyncio.run(main())


def test_a_sealed_step_takes_no_more_records(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        store.record(build.edge())
        await store.seal("r", 1)
        with pytest.raises(StoreError, match="edges: step 1 is sealed"):
            store.record(build.edge("x", "y"))

    asyncio.run(main())


def test_steps_are_sealed_in_order(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        store.record(build.edge("a", "b", step=1))
        store.record(build.edge("c", "d", step=2))
        with pytest.raises(StoreError, match="cannot seal step 2, step 1 is not sealed"):
            await store.seal("r", 2)
        assert len(await store.unsealed()) == 2
        await store.seal("r", 1)
        await store.seal("r", 2)
        with pytest.raises(StoreError, match="cannot seal step 0, step 2 is sealed"):
            await store.seal("r", 0)

    asyncio.run(main())


def test_a_failed_seal_leaves_the_step_open_for_records(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        store.record(build.edge())
        with pytest.raises(ValueError):
            await store.seal("r", 1, {"loss": float("nan")})
        store.record(build.edge("x", "y"))
        assert (await store.seal("r", 1)).num_rows == {"edges": 2}

    asyncio.run(main())


def test_records_of_another_run_are_not_sealed(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        store.record(build.edge(run="other"))
        with pytest.raises(StoreError, match="step 1 holds records of run other"):
            await store.seal("r", 1)

    asyncio.run(main())


def test_sealing_a_sealed_step_again_changes_nothing(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        store.record(build.edge())
        first = await store.seal("r", 1, {"cursor": 1})
        assert await store.seal("r", 1, {"cursor": 2}) == first
        assert await memory_store(root).seal("r", 1) == first

    asyncio.run(main())


def test_a_sealed_step_that_is_not_the_one_in_the_journal_is_an_error(root: str, build: Any) -> None:
    async def main() -> None:
        first, second = memory_store(root), memory_store(root)
        first.record(build.edge())
        await first.seal("r", 1)
        second.record(build.edge())
        second.record(build.edge("x", "y"))
        with pytest.raises(StoreError, match="sealed with 1 records, the journal has 2"):
            await second.seal("r", 1)
        assert len(await second.unsealed()) == 2

    asyncio.run(main())


def test_a_step_that_another_process_seals_meanwhile_is_an_error(root: str, build: Any) -> None:
    async def main() -> None:
        store = memory_store(root)
        assert await store.recover("r") is None
        store.record(build.edge())
        write_step(Folder(root), "r", 1, [build.edge()], None, {})
        with pytest.raises(StoreError, match="another process has sealed step 1"):
            await store.seal("r", 1)

    asyncio.run(main())


def test_unsealed_records_survive_a_restart_and_can_be_sealed_or_dropped(tmp_path: Path, build: Any) -> None:
    async def main() -> None:
        async with durable_store(tmp_path) as store:
            store.record(build.edge(step=1))
            await store.seal("r", 1, {"cursor": 8})
            store.record(build.edge("c", "d", step=2))
            await store.flush()
        async with durable_store(tmp_path) as store:
            manifest = await store.recover("r")
            assert manifest is not None
            assert manifest.snapshot == {"cursor": 8}
            assert await store.unsealed(2) == [build.edge("c", "d", step=2)]
            assert await store.keep_unsealed([]) == 1
            store.record(build.edge("c", "d", kind="order", step=2))
            assert (await store.seal("r", 2)).previous_step == 1

    asyncio.run(main())


def test_a_process_killed_after_the_manifest_seals_nothing_twice(tmp_path: Path, build: Any) -> None:
    async def dies() -> None:
        offload = DyingOffload(last="write_rows")
        async with SqliteJournal.open(tmp_path / "journal.sqlite", offload) as journal:
            store = MegStore(root=str(tmp_path), journal=journal, offload=offload)
            store.record(build.edge())
            await store.seal("r", 1, {"cursor": 8})

    async def restarts() -> None:
        async with durable_store(tmp_path) as store:
            assert await store.unsealed() == [build.edge()]
            manifest = await store.recover("r")
            assert manifest is not None
            assert (manifest.step, manifest.snapshot) == (1, {"cursor": 8})
            assert await store.unsealed() == []
            with pytest.raises(StoreError, match="step 1 is sealed"):
                store.record(build.edge("x", "y"))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(dies())
    asyncio.run(restarts())
