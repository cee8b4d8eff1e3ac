"""The contract of every journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megloom.compute.graph.schemas import SCHEMAS, from_table
from megloom.compute.store.errors import ConflictingRecord
from megloom.compute.store.journal import Journal, MemoryJournal
from megloom.compute.store.offload import InlineOffload, ThreadOffload
from megloom.compute.store.sqlite_journal import SqliteJournal

Check = Callable[[Callable[[Journal], Awaitable[Any]]], Any]


@pytest.fixture(params=["memory", "sqlite, inline", "sqlite, thread"])
def with_journal(request: pytest.FixtureRequest, tmp_path: Path) -> Check:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Journal]:
        if request.param == "memory":
            yield MemoryJournal()
        elif request.param == "sqlite, inline":
            async with SqliteJournal.open(tmp_path / "journal.sqlite", InlineOffload()) as journal:
                yield journal
        else:
            with ThreadOffload("journal") as offload:
                async with SqliteJournal.open(tmp_path / "journal.sqlite", offload) as journal:
                    yield journal

    def run(check: Callable[[Journal], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with opened() as journal:
                return await check(journal)

        return asyncio.run(main())

    return run


def test_records_come_back_in_the_order_of_their_append(with_journal: Check, build: Any) -> None:
    records = [build.edge("b", "c"), build.segment(), build.edge("a", "b"), build.invocation()]

    async def check(journal: Journal) -> list[Any]:
        for record in records:
            journal.append(record, 1)
        return await journal.load()

    assert with_journal(check) == records


@pytest.mark.parametrize("with_journal", ["memory", "sqlite, inline"], indirect=True)
def test_rows_are_the_records_of_one_step_as_arrow(with_journal: Check, build: Any) -> None:
    segments = [
        build.segment("s1"),
        build.segment("s2", sampled=False, logprobs=None, version_spans=None, token_ids=[]),
        build.segment("s3", token_ids=[2**31 - 1, -1], logprobs=[float("-inf"), 0.5]),
    ]

    async def check(journal: Journal) -> None:
        for segment in segments:
            journal.append(segment, 1)
            await journal.flush()
        journal.append(build.edge(), 1)
        journal.append(build.segment("s4"), 2)
        rows = await journal.rows(1)
        assert sorted(rows) == ["edges", "segments"]
        for _ in range(2):
            batches = list(rows["segments"])
            assert from_table("segments", pa.Table.from_batches(batches)) == segments
            assert batches[0].schema.equals(SCHEMAS["segments"], check_metadata=True)
        assert await journal.rows(3) == {}

    with_journal(check)


def test_keeping_some_records_forgets_the_others(with_journal: Check, build: Any) -> None:
    kept = [build.edge("c", "d"), build.edge("a", "b")]

    async def check(journal: Journal) -> None:
        for record in (build.edge("a", "b"), build.segment(), build.edge("c", "d")):
            journal.append(record, 1)
        assert await journal.keep_only(kept) == 1
        assert await journal.load() == kept
        assert dict(journal.open_steps()) == {1: 2}
        journal.append(build.edge("a", "b"), 1)
        journal.append(build.segment(token_ids=[9, 9, 9]), 1)
        assert await journal.load() == [*kept, build.segment(token_ids=[9, 9, 9])]
        with pytest.raises(ConflictingRecord):
            journal.append(build.edge("a", "b", episode_id="e2"), 1)

    with_journal(check)


def test_load_gives_the_records_of_one_step(with_journal: Check, build: Any) -> None:
    async def check(journal: Journal) -> None:
        journal.append(build.task("t1"), 1)
        journal.append(build.task("t2"), 2)
        assert await journal.load(2) == [build.task("t2")]
        assert await journal.load(3) == []
        assert dict(journal.open_steps()) == {1: 1, 2: 1}

    with_journal(check)


def test_the_same_record_twice_is_stored_once_under_its_first_step(with_journal: Check, build: Any) -> None:
    async def check(journal: Journal) -> None:
        journal.append(build.task(), 1)
        await journal.flush()
        journal.append(build.task(), 1)
        journal.append(build.task(), 2)
        assert await journal.load() == [build.task()]
        assert dict(journal.open_steps()) == {1: 1}

    with_journal(check)


def test_other_content_under_a_known_key_is_an_error_that_names_the_key(
    with_journal: Check, build: Any
) -> None:
    async def check(journal: Journal) -> None:
        journal.append(build.episode("e7", reward=1.0), 3)
        with pytest.raises(ConflictingRecord, match=r"episodes e7\|0: already recorded in step 3"):
            journal.append(build.episode("e7", reward=0.0), 3)
        assert await journal.load() == [build.episode("e7", reward=1.0)]

    with_journal(check)


def test_dropping_forgets_a_step_and_the_earlier_ones_only(with_journal: Check, build: Any) -> None:
    async def check(journal: Journal) -> None:
        for step in (1, 2, 3):
            journal.append(build.task(f"t{step}"), step)
        assert await journal.drop_through(2) == 2
        assert await journal.load() == [build.task("t3")]
        assert dict(journal.open_steps()) == {3: 1}
        journal.append(build.task("t1", prompt="other"), 4)
        assert len(await journal.load()) == 2

    with_journal(check)


def test_dropping_covers_records_that_were_not_flushed_yet(with_journal: Check, build: Any) -> None:
    async def check(journal: Journal) -> None:
        journal.append(build.task(), 1)
        await journal.drop_through(1)
        await journal.flush()
        assert await journal.load() == []

    with_journal(check)
