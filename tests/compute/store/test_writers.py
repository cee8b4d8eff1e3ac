from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megloom.compute.graph.schemas import from_table
from megloom.compute.store.draft import Draft
from megloom.compute.store.errors import StoreError
from megloom.compute.store.files import Folder
from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.store import MegStore
from megloom.compute.store.writers import check_writer, claim_writer, newest_writer


class BlindFolder(Folder):
    """Sees no claims of others: as if they came right after it looked."""

    def names(self, path: str) -> list[str]:
        return []


class OvertakenFolder(Folder):
    """A folder whose run is taken over by another store while the first file of a step is written."""

    def keep(self, draft: Draft, path: str) -> None:
        if newest_writer(self, "r") == 1:
            claim_writer(Folder(self.root), "r")
        super().keep(draft, path)


def store_on(folder: Folder) -> MegStore:
    return MegStore(root=folder, journal=MemoryJournal(), offload=InlineOffload())


def test_each_claim_is_the_next_number(root: str) -> None:
    folder = Folder(root)
    assert newest_writer(folder, "r") == 0
    assert [claim_writer(folder, "r"), claim_writer(folder, "r"), claim_writer(folder, "other")] == [1, 2, 1]
    assert newest_writer(folder, "r") == 2


def test_two_stores_that_claim_at_the_same_time_get_different_numbers(root: str) -> None:
    assert [claim_writer(BlindFolder(root), "r"), claim_writer(BlindFolder(root), "r")] == [1, 2]


def test_only_the_newest_writer_passes(root: str) -> None:
    folder = Folder(root)
    claim_writer(folder, "r")
    check_writer(folder, "r", 1)
    claim_writer(folder, "r")
    check_writer(folder, "r", 2)
    with pytest.raises(StoreError, match=r"run r: this store is writer 1, writer 2 has taken the run over"):
        check_writer(folder, "r", 1)


def test_a_store_whose_run_was_taken_over_seals_nothing_more_and_keeps_its_journal(
    root: str, build: Any
) -> None:
    async def main() -> None:
        old, new = store_on(Folder(root)), store_on(Folder(root))
        await old.recover("r")
        old.record(build.edge())
        await old.seal("r", 1)
        assert (await new.recover("r")) is not None
        old.record(build.edge("c", "d", step=2))
        with pytest.raises(StoreError, match="this store is writer 1, writer 2 has taken the run over"):
            await old.seal("r", 2)
        assert await old.unsealed() == [build.edge("c", "d", step=2)]
        assert new.reader.sealed_steps("r") == [1]
        new.record(build.edge("e", "f", step=2))
        await new.seal("r", 2)
        assert from_table("edges", new.reader.read_table("r", "edges", steps=[2])) == [
            build.edge("e", "f", step=2)
        ]

    asyncio.run(main())


def test_a_store_that_is_overtaken_while_it_writes_publishes_no_manifest(root: str, build: Any) -> None:
    async def main() -> None:
        store = store_on(OvertakenFolder(root))
        await store.recover("r")
        store.record(build.edge())
        with pytest.raises(StoreError, match="this store is writer 1, writer 2"):
            await store.seal("r", 1)
        assert store.reader.sealed_steps("r") == []

    asyncio.run(main())


def test_a_store_that_did_not_recover_claims_at_its_first_seal(root: str, build: Any) -> None:
    async def main() -> None:
        store = store_on(Folder(root))
        store.record(build.edge())
        await store.seal("r", 1)
        assert newest_writer(Folder(root), "r") == 1

    asyncio.run(main())
