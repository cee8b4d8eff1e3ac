"""Suspended states are kept whole or not at all, and a session leaves none behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from megloom.compute.state.errors import StateError, StateFull
from megloom.compute.state.tiers import Tier, TierPlan
from megloom.compute.trainers import suspended
from megloom.compute.trainers.lifecycle import GroupLife
from megloom.compute.trainers.suspended import FolderShelf, StateShelf, StoreShelf

from .group_parts import Stage, stage
from .test_group import loaded, micro_batches, plan_of


@pytest.fixture(params=["folder", "store"])
def shelf_in(request: pytest.FixtureRequest) -> Callable[[Path], StateShelf]:
    if request.param == "folder":
        return FolderShelf
    return lambda folder: StoreShelf(folder, run="a-run")


def test_a_kept_state_is_fetched_until_it_is_dropped(
    tmp_path: Path, shelf_in: Callable[[Path], StateShelf]
) -> None:
    async def work() -> None:
        shelf = shelf_in(tmp_path / "shelf")
        handles = []
        for content in (b"first", b"second" * 1000):
            draft = await shelf.draft("solver")
            Path(draft).write_bytes(content)
            handles.append(await shelf.keep("solver", draft))
        assert Path(await shelf.fetch(handles[0])).read_bytes() == b"first"
        await shelf.drop(handles[0])
        await shelf.drop(handles[0])
        with pytest.raises(FileNotFoundError):
            await shelf.fetch(handles[0])
        assert Path(await shelf.fetch(handles[1])).read_bytes() == b"second" * 1000
        await shelf.drop(handles[1])
        if isinstance(shelf, StoreShelf):
            await shelf.close()

    asyncio.run(work())


def test_a_draft_that_is_not_kept_leaves_nothing(
    tmp_path: Path, shelf_in: Callable[[Path], StateShelf]
) -> None:
    async def work() -> None:
        shelf = shelf_in(tmp_path / "shelf")
        for half in (b"half", None):
            draft = await shelf.draft("solver")
            if half is not None:
                Path(draft).write_bytes(half)
            await shelf.drop_draft(draft)
            assert not Path(draft).exists()
        if isinstance(shelf, StoreShelf):
            await shelf.close()

    asyncio.run(work())


def test_a_session_leaves_no_file_and_begins_without_those_of_a_killed_one(tmp_path: Path) -> None:
    async def work() -> None:
        killed = StoreShelf(tmp_path / "shelf", run="a-run")
        draft = await killed.draft("solver")
        Path(draft).write_bytes(b"left")
        await killed.keep("solver", draft)
        await killed._stack.aclose()  # its process is gone: no clean-up
        shelf = StoreShelf(tmp_path / "shelf", run="a-run")
        draft = await shelf.draft("solver")
        Path(draft).write_bytes(b"new")
        handle = await shelf.keep("solver", draft)
        path = Path(await shelf.fetch(handle))
        assert path.read_bytes() == b"new"
        await shelf.close()
        assert not path.exists() and not (tmp_path / "shelf").exists()

    asyncio.run(work())


def test_a_corrupt_state_is_an_error(tmp_path: Path) -> None:
    async def work() -> None:
        shelf = StoreShelf(tmp_path / "shelf", run="a-run")
        draft = await shelf.draft("solver")
        Path(draft).write_bytes(b"intact")
        handle = await shelf.keep("solver", draft)
        Path(await shelf.fetch(handle)).write_bytes(b"broken")
        with pytest.raises((StateError, FileNotFoundError)):
            await shelf.fetch(handle)
        await shelf.close()

    asyncio.run(work())


def tiny_memory(
    disk_budget_bytes: int | None, *, budget_bytes: int = 2 << 20
) -> Callable[[Path], tuple[TierPlan, ...]]:
    """A memory that takes a first draft, and no state of three megabytes."""
    return lambda folder: (
        TierPlan(tier=Tier.TMPFS, root=str(folder / "memory"), budget_bytes=budget_bytes),
        TierPlan(tier=Tier.DISK, root=str(folder / "disk"), budget_bytes=disk_budget_bytes),
    )


def test_a_state_that_is_too_large_for_memory_goes_to_the_disk_and_so_do_the_policys_next_ones(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        shelf = StoreShelf(tmp_path, run="a-run", tiers=tiny_memory(None))
        for state, tries in (("first", 2), ("second", 1)):
            for number in range(tries):
                draft = await shelf.draft("solver")
                Path(draft).write_bytes(state.encode() * (1 << 19))
                if number == tries - 1:
                    handle = await shelf.keep("solver", draft)
                else:
                    with pytest.raises(StateFull):
                        await shelf.keep("solver", draft)
                    assert await shelf.pass_over("solver", draft)
                await shelf.drop_draft(draft)
            path = Path(await shelf.fetch(handle))
            assert path.is_relative_to(tmp_path / "disk") and path.read_bytes().startswith(state.encode())
            await shelf.drop(handle)
        assert Path(await shelf.draft("other")).is_relative_to(tmp_path / "memory")
        await shelf.close()

    asyncio.run(work())


def test_a_policy_that_fits_nowhere_begins_again_at_the_top(tmp_path: Path) -> None:
    async def work() -> None:
        shelf = StoreShelf(tmp_path, run="a-run", tiers=tiny_memory(2 << 20))
        for place, is_left in (("memory", True), ("disk", False), ("memory", True)):
            draft = await shelf.draft("solver")
            assert Path(draft).is_relative_to(tmp_path / place)
            assert await shelf.pass_over("solver", draft) is is_left
            await shelf.drop_draft(draft)
        await shelf.close()

    asyncio.run(work())


def test_a_group_whose_state_does_not_fit_the_memory_is_suspended_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspended, "_FIRST_SIZE_BYTES", 100)

    async def work(stage: Stage) -> None:
        tiers = tiny_memory(None, budget_bytes=1000)  # the state has many thousand
        shelf = StoreShelf(tmp_path / "states", run="a-run", tiers=tiers)
        put, tries = shelf.keep, []

        async def keep(policy: str, draft: str, digest: str | None = None) -> str:
            tries.append(draft)
            return await put(policy, draft, digest)

        shelf.keep = keep  # type: ignore[method-assign]
        group = await loaded(stage, stage.add(plan_of("a"), shelf=shelf))
        for number, taken in enumerate(micro_batches("a", 1), start=1):
            await group.forward_backward(taken)
            group.leave("trainers/0")
            while group.life is not GroupLife.DESTROYED:  # noqa: ASYNC110 - told by nobody else
                await asyncio.sleep(0.001)
            assert stage.kinds()["trainer_offloaded"] == number
        assert not stage.kinds()["trainer_stays"]
        assert [Path(draft).is_relative_to(tmp_path / "states" / "disk") for draft in tries] == [0, 1, 1]
        await group.close()
        await shelf.close()

    async def main() -> None:
        async with asyncio.timeout(60), stage(tmp_path, num_cells=1) as made:
            await work(made)

    asyncio.run(main())
