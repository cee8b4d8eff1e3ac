from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import pytest

from megloom.compute.store import sqlite_journal
from megloom.compute.store.errors import ConflictingRecord, StoreError
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.sqlite_journal import SqliteJournal

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

WRITER = """
import asyncio, sys
from pathlib import Path
from megloom.compute.graph.records import EdgeRecord
from megloom.compute.store.offload import ThreadOffload
from megloom.compute.store.sqlite_journal import SqliteJournal

async def main():
    with ThreadOffload("journal") as offload:
        async with SqliteJournal.open(Path(sys.argv[1]), offload) as journal:
            for number in range(100_000):
                journal.append(EdgeRecord(episode_id="e", run="r", step=1, parent=f"p{number}", child="c",
                                          kind="data"), 1)
                if number % 10 == 9:
                    await journal.flush()
                    print(number + 1, flush=True)

asyncio.run(main())
"""


class GatedOffload:
    """Runs a piece of work inline once `gate` is open; counts the inserts."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_inserts = 0

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        if fn.__name__ == "insert":
            self.num_inserts += 1
        await self.gate.wait()
        return fn(*args)


class LateOffload:
    """Runs inline; word of an insert comes only when `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        result = fn(*args)
        if fn.__name__ == "insert":
            await self.gate.wait()
        return result


class FailingOffload:
    """Runs inline; the first `num_failures` writes fail as on a full disk."""

    def __init__(self, num_failures: int, failing: str = "insert") -> None:
        self.num_failures, self.failing = num_failures, failing

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        if fn.__name__ == self.failing and self.num_failures:
            self.num_failures -= 1
            raise StoreError("disk full")
        return fn(*args)


def stored(path: Path) -> int:
    """Rows that another process would find now."""
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT coalesce(sum(num_rows), 0) FROM frames").fetchone()[0])


def test_what_a_flush_acknowledged_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        lines = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = max([*lines, *map(int, writer.stdout.read().split())])
    writer.wait()

    async def survivors() -> list[str]:
        async with SqliteJournal.open(path, InlineOffload()) as journal:
            return [record.parent for record in await journal.load(1)]

    found = asyncio.run(survivors())
    assert len(found) >= acknowledged >= 200
    assert found == [f"p{number}" for number in range(len(found))]


def test_records_that_were_loaded_from_the_file_are_known_by_their_content(
    tmp_path: Path, build: Any
) -> None:
    records = [
        build.invocation(reward=1.0, text="a ü b"),
        build.segment(logprobs=[-0.1, -1 / 3, float("-inf")]),
        build.segment("s2", sampled=False, logprobs=None, version_spans=None, token_ids=[]),
        build.micro_batch(sample_ids=["x1", "x2"]),
        build.task(),
        build.episode(reward=None),
    ]

    async def life() -> None:
        async with SqliteJournal.open(tmp_path / "j.sqlite", InlineOffload()) as journal:
            for record in records:
                journal.append(record, 1)
            assert dict(journal.open_steps()) == {1: len(records)}
            with pytest.raises(ConflictingRecord, match="segments s1: already recorded in step 1"):
                journal.append(build.segment(logprobs=[-0.1, -1 / 3, -5.0]), 1)

    asyncio.run(life())
    asyncio.run(life())
    assert stored(tmp_path / "j.sqlite") == len(records)


def test_order_is_kept_over_a_restart_and_over_steps_and_tables(tmp_path: Path, build: Any) -> None:
    records = [build.edge(f"a{n}", "b", step=1 + n % 2) if n % 3 else build.task(f"t{n}") for n in range(12)]

    async def append(part: list[Any]) -> list[Any]:
        async with SqliteJournal.open(tmp_path / "j.sqlite", InlineOffload()) as journal:
            for record in part:
                journal.append(record, getattr(record, "step", 1))
            return await journal.load()

    assert asyncio.run(append(records[:7])) == records[:7]
    assert asyncio.run(append(records[7:])) == records


def test_a_conflict_is_found_against_a_record_of_the_killed_process(tmp_path: Path, build: Any) -> None:
    path = tmp_path / "journal.sqlite"

    async def first() -> None:
        async with SqliteJournal.open(path, InlineOffload()) as journal:
            journal.append(build.edge(), 1)
            await journal.flush()

    async def second() -> None:
        async with SqliteJournal.open(path, InlineOffload()) as journal:
            journal.append(build.edge(), 1)
            assert dict(journal.open_steps()) == {1: 1}
            with pytest.raises(ConflictingRecord):
                journal.append(build.edge(episode_id="e2"), 1)

    asyncio.run(first())
    asyncio.run(second())


def test_flushes_that_overlap_share_one_commit(tmp_path: Path, build: Any) -> None:
    async def main() -> None:
        offload = GatedOffload()
        async with SqliteJournal.open(tmp_path / "j.sqlite", offload) as journal:
            offload.gate.clear()
            flushes = []
            for record in build.edges(20):
                journal.append(record, 1)
                flushes.append(asyncio.create_task(journal.flush()))
                await asyncio.sleep(0)
            offload.gate.set()
            await asyncio.gather(*flushes)
            assert offload.num_inserts == 2  # the first record alone, then all that came meanwhile
            assert stored(tmp_path / "j.sqlite") == 20

    asyncio.run(main())


def test_a_flush_without_new_records_does_not_touch_the_disk(tmp_path: Path, build: Any) -> None:
    async def main() -> None:
        offload = GatedOffload()
        async with SqliteJournal.open(tmp_path / "j.sqlite", offload) as journal:
            journal.append(build.edge(), 1)
            await journal.flush()
            await journal.flush()
            assert offload.num_inserts == 1

    asyncio.run(main())


def test_a_failed_flush_is_raised_and_the_next_one_writes_everything(tmp_path: Path, build: Any) -> None:
    async def main() -> None:
        async with SqliteJournal.open(tmp_path / "j.sqlite", FailingOffload(1)) as journal:
            journal.append(build.edge(), 1)
            with pytest.raises(StoreError, match="disk full"):
                await journal.flush()
            journal.append(build.edge("b", "c"), 1)
            await journal.flush()
            assert stored(tmp_path / "j.sqlite") == 2

    asyncio.run(main())


def test_a_cancelled_flush_loses_nothing(tmp_path: Path, build: Any) -> None:
    async def main() -> None:
        offload = GatedOffload()
        async with SqliteJournal.open(tmp_path / "j.sqlite", offload) as journal:
            offload.gate.clear()
            journal.append(build.edge(), 1)
            flush = asyncio.create_task(journal.flush())
            await asyncio.sleep(0)
            flush.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flush
            offload.gate.set()
            await journal.flush()
            assert stored(tmp_path / "j.sqlite") == 1

    asyncio.run(main())


def test_what_was_cancelled_in_mid_write_is_not_written_twice(tmp_path: Path, build: Any) -> None:
    async def main() -> None:
        offload = LateOffload()
        async with SqliteJournal.open(tmp_path / "j.sqlite", offload) as journal:
            journal.append(build.edge("a", "b"), 1)
            flush = asyncio.create_task(journal.flush())
            await asyncio.sleep(0)
            flush.cancel()  # its insert is done on disk, and nobody heard of it
            with pytest.raises(asyncio.CancelledError):
                await flush
            offload.gate.set()
            journal.append(build.edge("c", "d"), 1)
            assert await journal.load() == [build.edge("a", "b"), build.edge("c", "d")]
            assert stored(tmp_path / "j.sqlite") == 2

    asyncio.run(main())


def test_a_process_killed_while_it_keeps_some_records_has_all_or_the_kept_ones(
    tmp_path: Path, build: Any
) -> None:
    async def main() -> None:
        async with SqliteJournal.open(tmp_path / "j.sqlite", FailingOffload(1, "replace")) as journal:
            for record in build.edges(3):
                journal.append(record, 1)
            with pytest.raises(StoreError, match="disk full"):
                await journal.keep_only(build.edges(2))
            assert stored(tmp_path / "j.sqlite") == 3
            journal.append(build.edges(3)[2], 1)
            assert await journal.load() == build.edges(3)
            assert await journal.keep_only(build.edges(2)) == 1
            assert stored(tmp_path / "j.sqlite") == 2

    asyncio.run(main())


def test_dropping_steps_also_forgets_what_no_flush_has_written(tmp_path: Path, build: Any) -> None:
    async def main() -> None:
        async with SqliteJournal.open(tmp_path / "j.sqlite", FailingOffload(1)) as journal:
            journal.append(build.edge("a", "b"), 1)
            with pytest.raises(StoreError):
                await journal.flush()
            journal.append(build.edge("c", "d"), 1)
            journal.append(build.edge("e", "f", step=2), 2)
            assert await journal.drop_through(1) == 2
            assert await journal.load() == [build.edge("e", "f", step=2)]

    asyncio.run(main())


def test_many_records_start_a_flush_by_themselves(
    tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_journal, "FLUSH_AT_RECORDS", 10)

    async def main() -> None:
        async with SqliteJournal.open(tmp_path / "j.sqlite", InlineOffload()) as journal:
            for record in build.edges(11):
                journal.append(record, 1)
            await asyncio.sleep(0)
            assert stored(tmp_path / "j.sqlite") == 11

    asyncio.run(main())


def test_a_failed_flush_of_its_own_is_logged_and_tried_again(
    tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite_journal, "FLUSH_AT_RECORDS", 10)

    async def main() -> None:
        async with SqliteJournal.open(tmp_path / "j.sqlite", FailingOffload(1)) as journal:
            for record in build.edges(11):
                journal.append(record, 1)
            await asyncio.sleep(0)
            await journal.flush()
            assert stored(tmp_path / "j.sqlite") == 11

    asyncio.run(main())
    assert "disk full" in caplog.text


def test_a_stalled_disk_stops_the_run_before_the_memory_is_full(
    tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_journal, "MAX_WAITING_RECORDS", 5)

    async def main() -> None:
        async with SqliteJournal.open(tmp_path / "j.sqlite", InlineOffload()) as journal:
            with pytest.raises(StoreError, match="5 records wait for the disk"):
                for record in build.edges(6):
                    journal.append(record, 1)

    asyncio.run(main())


def test_a_clean_exit_flushes_and_an_exit_by_exception_does_not(tmp_path: Path, build: Any) -> None:
    async def main(name: str, error: Exception | None) -> None:
        async with SqliteJournal.open(tmp_path / name, InlineOffload()) as journal:
            journal.append(build.edge(), 1)
            if error:
                raise error

    asyncio.run(main("clean", None))
    with pytest.raises(RuntimeError):
        asyncio.run(main("crash", RuntimeError()))
    assert (stored(tmp_path / "clean"), stored(tmp_path / "crash")) == (1, 0)


def test_a_journal_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")

    async def main() -> None:
        async with SqliteJournal.open(path, InlineOffload()):
            pass

    with pytest.raises(StoreError, match=r"j\.sqlite: schema version 99, expected 2: .* move the file away"):
        asyncio.run(main())


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)

    async def main() -> None:
        async with SqliteJournal.open(path, InlineOffload()):
            pass

    with pytest.raises(StoreError, match=r"journal \S+j\.sqlite: file is not a database"):
        asyncio.run(main())
