"""One node's store: whole objects under logical keys, kept, demoted, verified; errors say what is wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megloom.compute.state.digests import file_digest
from megloom.compute.state.errors import ConflictingState, NoValidCopy, StateError, StateFull
from megloom.compute.state.node_files import DRAFTS
from megloom.compute.state.path_choice import Place
from megloom.compute.state.tiers import Tier
from tests.compute.state.node_store import Clock, a_store, content, files_under, key, tiers_of

SMALL = {Tier.TMPFS: 100, Tier.DISK: 200, Tier.REMOTE: None}


def test_what_was_put_is_got_as_a_local_file_after_a_restart_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"state")

    async def main() -> None:
        async with a_store(tmp_path) as store:
            entry = await store.put(key(1), source)
            assert entry.digest == file_digest(source) and entry.size_bytes == 5
            await store.put(key(2), b"")
            draft = await store.draft(3)
            draft.path.write_bytes(b"abc")
            await store.put(key(3), draft)
            assert not draft.path.exists() and source.exists()
        async with a_store(tmp_path) as store:
            assert await content(store, key(1)) == b"state"
            assert await content(store, key(2)) == b""
            assert await content(store, key(3)) == b"abc"
            assert await store.keys() == [key(1), key(2), key(3)]
            assert await store.keys(policy="other") == []

    asyncio.run(main())


def test_a_missing_key_and_a_missing_file_are_said_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path) as store:
            for verb in (store.get, store.pin, store.secure):
                with pytest.raises(FileNotFoundError, match="r/solver/trainer/v000007"):
                    await verb(key(7))
            with pytest.raises(FileNotFoundError):
                await store.put(key(7), tmp_path / "nothing")
            assert not await store.delete(key(7))
            assert await store.held_bytes() == {Tier.TMPFS: 0, Tier.DISK: 0}

    asyncio.run(main())


def test_the_same_content_is_put_twice_and_other_content_is_refused_with_both_digests(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path) as store:
            first = await store.put(key(), b"one")
            assert await store.put(key(), b"one") == first
            other = tmp_path / "other"
            other.write_bytes(b"two")
            with pytest.raises(ConflictingState) as refused:
                await store.put(key(), other)
            assert first.digest in str(refused.value) and file_digest(other) in str(refused.value)
            assert await content(store, key()) == b"one"
            assert await store.held_bytes() == {Tier.TMPFS: 3, Tier.DISK: 0}, "no draft is left"
            assert len(files_under(tmp_path / "tmpfs")) == 1

    asyncio.run(main())


def test_concurrent_puts_of_one_key_end_with_one_whole_object(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path) as store:
            puts = [store.put(key(), data) for data in (b"one", b"two", b"one", b"two")]
            results = await asyncio.gather(*puts, return_exceptions=True)
            refused = [result for result in results if isinstance(result, ConflictingState)]
            assert len(refused) == 2 and await content(store, key()) in (b"one", b"two")

    asyncio.run(main())


def test_the_least_recently_used_goes_down_tier_by_tier_and_comes_back_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path, budgets=SMALL) as store:
            for version in range(6):
                await store.put(key(version), bytes([version]) * 50)
                assert (await store.held_bytes())[Tier.TMPFS] <= 100
            found = [await tiers_of(store, key(version)) for version in range(6)]
            assert found == [["disk"], ["disk"], ["disk"], ["disk"], ["tmpfs"], ["tmpfs"]]
            await store.get(key(0))  # now key 1 is the one not used for longest
            await store.put(key(6), b"6" * 50)
            assert await tiers_of(store, key(0)) == ["disk"] and await tiers_of(store, key(1)) == ["remote"]
            for version in range(6):
                assert await content(store, key(version)) == bytes([version]) * 50

    asyncio.run(main())


def test_what_is_pinned_leased_or_read_stays_and_a_put_goes_below_it(tmp_path: Path) -> None:
    async def main() -> None:
        clock = Clock()
        async with a_store(tmp_path, budgets=SMALL, clock=clock) as store:
            await store.put(key(1), b"1" * 50)
            await store.put(key(2), b"2" * 50)
            await store.pin(key(1), "trainer")
            assert await store.lease(key(2), "trainer", 60) == clock.now_s + 60
            await store.put(key(3), b"3" * 50)
            assert await tiers_of(store, key(3)) == ["disk"]
            clock.now_s += 60
            await store.put(key(4), b"4" * 50)
            assert [await tiers_of(store, key(v)) for v in (1, 2, 4)] == [["tmpfs"], ["disk"], ["tmpfs"]]
            async with store.reading(key(4)):
                await store.unpin(key(1), "somebody else")
                await store.put(key(5), b"5" * 50)
                assert [await tiers_of(store, key(v)) for v in (1, 4, 5)] == [["tmpfs"], ["tmpfs"], ["disk"]]
            await store.unpin(key(1), "trainer")
            await store.put(key(6), b"6" * 100)
            assert [await tiers_of(store, key(v)) for v in (1, 6)] == [["disk"], ["tmpfs"]]

    asyncio.run(main())


def test_pins_and_leases_outlive_the_process_and_forbid_to_delete(tmp_path: Path) -> None:
    async def main() -> None:
        clock = Clock()
        async with a_store(tmp_path, clock=clock) as store:
            await store.put(key(), b"x")
            await store.pin(key())
            path = await store.get(key(), holder="trainer-1", lease_s=30)
        async with a_store(tmp_path, clock=clock) as store:
            with pytest.raises(StateError, match=r"kept by pin pinned, lease trainer-1"):
                await store.delete(key())
            await store.unpin(key())
            with pytest.raises(StateError, match="kept by lease trainer-1"):
                await store.delete(key())
            await store.lease(key(), "trainer-1", 60)
            clock.now_s += 59
            with pytest.raises(StateError, match="lease"):
                await store.delete(key())
            clock.now_s += 1
            with path.open("rb") as mapped:
                assert await store.delete(key()) and not path.exists()
                assert mapped.read() == b"x", "whoever has it open keeps it"
            await store.put(key(), b"other content is fine after a delete")
            await store.lease(key(), "trainer-1", 60)
            await store.release(key(), "trainer-1")
            assert await store.delete(key())

    asyncio.run(main())


def test_no_room_names_the_tiers_and_their_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path, budgets={Tier.TMPFS: 100, Tier.DISK: 120}) as store:
            await store.put(key(1), b"1" * 90)
            await store.pin(key(1))
            with pytest.raises(StateFull) as full:
                await store.put(key(2), b"2" * 121)
            assert "tier tmpfs: 121 bytes wanted, budget 100, held 90 (kept 90)" in str(full.value)
            assert "tier disk: 121 bytes wanted, budget 120, held 0" in str(full.value)
            assert await store.keys() == [key(1)] and await content(store, key(1)) == b"1" * 90

    asyncio.run(main())


def test_a_draft_holds_its_room_until_it_is_put_or_discarded(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path, budgets={Tier.TMPFS: 100}) as store:
            draft = await store.draft(80)
            with pytest.raises(StateFull, match="reserved 80"):
                await store.put(key(1), b"1" * 30)
            await store.discard(draft)
            await store.put(key(1), b"1" * 30)
            grown = await store.draft(10)
            grown.path.write_bytes(b"2" * 71)
            with pytest.raises(StateFull, match="tier tmpfs"):
                await store.put(key(2), grown)
            assert not grown.path.exists()
            fits = await store.draft(10)
            fits.path.write_bytes(b"2" * 70)
            await store.put(key(2), fits)
            assert (await store.held_bytes())[Tier.TMPFS] == 100

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_copy_is_dropped_with_its_cause_and_the_next_one_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with a_store(tmp_path) as store:
            await store.put(key(), b"precious state")
            await store.secure(key())
            assert await tiers_of(store, key()) == ["disk", "tmpfs"]
            _damage(await store.get(key()), damage)
            with caplog.at_level(logging.ERROR):
                path = await store.get(key())
            assert path.is_relative_to(tmp_path / "disk") and path.read_bytes() == b"precious state"
            assert "key=r/solver/trainer/v000000 tier=tmpfs: copy dropped" in caplog.text
            assert await tiers_of(store, key()) == ["disk"]
            _damage(path, damage)
            for _ in range(2):  # it stays known as lost: never "missing", never wrong
                with pytest.raises(NoValidCopy, match="no valid copy"):
                    await store.get(key())
            with pytest.raises(ConflictingState):
                await store.put(key(), b"other")
            await store.put(key(), b"precious state")
            assert await content(store, key()) == b"precious state"

    asyncio.run(main())


def test_rot_that_keeps_size_and_time_is_found_by_the_next_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with a_store(tmp_path) as store:
            await store.put(key(), b"precious state")
            path = await store.get(key())
        facts = path.stat()
        path.write_bytes(b"Precious state")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        async with a_store(tmp_path) as store:
            with pytest.raises(NoValidCopy):
                await store.get(key())
            assert "digest" in caplog.text and await store.local_entry(key()) is None

    asyncio.run(main())


def test_memory_that_a_restart_emptied_leaves_the_disk_copy(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path) as store:
            await store.put(key(1), b"secured")
            await store.secure(key(1))
            await store.secure(key(1))
            await store.put(key(2), b"only in memory")
        for path in files_under(tmp_path / "tmpfs"):
            path.unlink()
        async with a_store(tmp_path) as store:
            assert await content(store, key(1)) == b"secured"
            with pytest.raises(NoValidCopy):
                await store.get(key(2))

    asyncio.run(main())


def test_a_state_is_secured_at_the_url_without_a_disk_and_refused_without_both(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        async with a_store(tmp_path / "a", budgets={Tier.TMPFS: 100, Tier.REMOTE: None}) as store:
            await store.put(key(), b"state")
            await store.secure(key())
            assert await tiers_of(store, key()) == ["remote", "tmpfs"]
            await store.delete(key())
            assert await store.where(key()) == [], "neither here nor at the URL"
        async with a_store(tmp_path / "b", budgets={Tier.TMPFS: 100}) as store:
            await store.put(key(), b"state")
            with pytest.raises(StateFull, match="no tier below memory"):
                await store.secure(key())

    asyncio.run(main())


def test_a_url_that_refuses_a_demotion_leaves_the_state_where_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        budgets, roots = {Tier.TMPFS: 10, Tier.REMOTE: None}, {Tier.REMOTE: tmp_path / "bucket"}
        async with a_store(tmp_path / "a", budgets=budgets, roots=roots) as other:
            await other.put(key(1), b"another")
            await other.secure(key(1))
        async with a_store(tmp_path / "b", budgets=budgets, roots=roots) as store:
            await store.put(key(1), b"mine")
            with pytest.raises(StateFull, match="tier remote: cannot take r/solver/trainer/v000001"):
                await store.put(key(2), bytes(9))
            assert await content(store, key(1)) == b"mine"

    asyncio.run(main())


def test_drafts_and_files_without_a_row_go_at_the_next_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path) as store:
            await store.put(key(), b"kept")
            draft = await store.draft(10)
            draft.path.write_bytes(b"half")
        orphan = tmp_path / "tmpfs/r/solver/trainer/v000009-00"
        orphan.write_bytes(b"never acknowledged")
        async with a_store(tmp_path) as store:
            assert not draft.path.exists() and not orphan.exists()
            assert await content(store, key()) == b"kept"

    asyncio.run(main())


def test_only_one_process_opens_a_nodes_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path):
            with pytest.raises(StateError, match=f"process {os.getpid()} has this node's state store open"):
                async with a_store(tmp_path):
                    pass
        async with a_store(tmp_path):
            pass

    asyncio.run(main())


def test_an_index_of_another_schema_is_refused(tmp_path: Path) -> None:
    index = sqlite3.connect(tmp_path / "index.sqlite")
    index.execute("PRAGMA user_version = 99")
    index.close()

    async def main() -> None:
        for _ in range(2):  # the lock is free again
            with pytest.raises(StateError, match="schema version 99, expected 1"):
                async with a_store(tmp_path):
                    pass

    asyncio.run(main())


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Writes beyond it fail with EFBIG, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_refuses_leaves_everything_valid_and_names_each_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with a_store(tmp_path, budgets={Tier.TMPFS: None, Tier.DISK: None}) as store:
            await store.put(key(1), b"old")
            with file_size_limit(1 << 20), pytest.raises(StateFull) as full:
                await store.put(key(2), bytes(2 << 20))
            assert "tier tmpfs: [Errno 27]" in str(full.value) and "tier disk: [Errno 27]" in str(full.value)
            assert await store.keys() == [key(1)] and await content(store, key(1)) == b"old"
            assert (await store.held_bytes())[Tier.TMPFS] == 3
            assert [path.parent.name for path in files_under(tmp_path / "disk")].count(DRAFTS) == 0
            await store.put(key(2), bytes(2 << 20))

    asyncio.run(main())


def test_a_full_disk_during_demotion_keeps_the_demoted_where_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with a_store(tmp_path, budgets={Tier.TMPFS: 3 << 20, Tier.DISK: None}) as store:
            await store.put(key(1), b"1" * (2 << 20))
            with file_size_limit(1 << 20), pytest.raises(StateFull, match="tier disk: .*Errno 27"):
                await store.put(key(2), bytes(3 << 19))
            assert "tier disk: disk full while storing r/solver/trainer/v000001" in caplog.text
            assert await tiers_of(store, key(1)) == ["tmpfs"]
            assert await content(store, key(1)) == b"1" * (2 << 20)
            await store.put(key(2), bytes(3 << 19))
            assert await tiers_of(store, key(1)) == ["disk"]

    asyncio.run(main())


def test_a_full_tmpfs_is_passed_over(small_disk: Path, tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "node").mkdir()
        budgets = {Tier.TMPFS: None, Tier.DISK: None}
        async with a_store(tmp_path / "node", budgets=budgets, roots={Tier.TMPFS: small_disk}) as store:
            await store.put(key(1), bytes(3 << 20))
            await store.put(key(2), bytes(2 << 20))
            assert await tiers_of(store, key(1)) == ["tmpfs"] and await tiers_of(store, key(2)) == ["disk"]

    asyncio.run(main())


def test_the_last_node_and_places_are_hints_for_the_next_trainer(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_store(tmp_path, node="a") as store:
            assert await store.last_node("solver") is None
            await store.put(key(), b"x")
            await store.note_node("r2", "solver", "b")
            assert await store.last_node("solver") == "b" and await store.last_node("solver", run="r") == "a"
            await store.get(key())
            assert await store.last_node("solver") == "a"
        async with a_store(tmp_path, node="a") as store:
            assert await store.last_node("solver") == "a" and await store.last_node("other") is None
            plans = await store.plan(key(), Place(node="a", tier="mapped"))
            assert [step.kind.name for step in plans[0].steps] == ["MMAP"]
            with pytest.raises(FileNotFoundError):
                await store.plan(key(5), Place(node="a", tier="mapped"))

    asyncio.run(main())


def test_a_state_in_a_trainers_memory_is_exported_when_it_is_asked_for(tmp_path: Path) -> None:
    place = Place(node="a", tier=Tier.DEVICE, device="0")
    exported = 0

    async def export(path: Path) -> None:
        nonlocal exported
        exported += 1
        path.write_bytes(b"from the device")

    async def main() -> None:
        async with a_store(tmp_path) as store:
            store.announce(key(), place, 15, export)
            assert await store.where(key()) == [place]
            assert await content(store, key()) == await content(store, key()) == b"from the device"
            assert exported == 1
            store.withdraw(key(), place)
            assert await tiers_of(store, key()) == ["tmpfs"]

    asyncio.run(main())


def _damage(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncate" else bytes([data[0] ^ 1]) + data[1:])
