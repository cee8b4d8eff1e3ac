"""Suspended states are kept whole or not at all, and a session leaves none behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from megloom.compute.state.errors import StateError
from megloom.compute.trainers.suspended import FolderShelf, StateShelf, StoreShelf


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
