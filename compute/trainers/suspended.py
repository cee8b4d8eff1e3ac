"""Where the full states of suspended groups lie, and the files that replicas hand to each other."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from megloom.compute.state.drafts import Surroundings
from megloom.compute.state.keys import Key
from megloom.compute.state.node_files import Draft
from megloom.compute.state.store import StateStore
from megloom.compute.state.tiers import FILE_TIERS, ORDER, Tier, TierPlan, local_tiers
from megloom.compute.store.offload import ThreadOffload

KIND = "suspended"
_FIRST_SIZE_BYTES = 1 << 20  # of a policy's first draft, before any size is known
_READER = "trainer"
LEASE_S = 3600.0  # a slow load may take as long as a verb; `drop` ends the lease sooner


class StateShelf(Protocol):
    """A draft is written by a trainer's process; kept, it is a state that any later process can have."""

    async def draft(self, policy: str) -> str:
        """A new path for a trainer to write to, then to be kept or dropped. Raises: StateFull."""
        ...

    async def keep(self, policy: str, draft: str, digest: str | None = None) -> str:
        """Makes a finished draft a kept state; returns its handle. `digest` is the file's, if it is known.

        Raises: StateError.
        """
        ...

    async def fetch(self, handle: str) -> str:
        """A path on this node. Raises: FileNotFoundError, or the store's error for a corrupt state."""
        ...

    async def drop(self, handle: str) -> None:
        """Forgets a kept state; one that is gone is fine."""
        ...

    async def drop_draft(self, draft: str) -> None:
        """Removes what was written to a draft's path, if anything; one that was kept is fine."""
        ...

    async def pass_over(self, policy: str, draft: str) -> bool:
        """A draft could not be written or kept: the policy's next is elsewhere. False if nowhere is left."""
        ...


class FolderShelf:
    """States as files of one folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    async def draft(self, policy: str) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        return str(self._folder / f"{policy}-{next(self._numbers):06d}")

    async def keep(self, policy: str, draft: str, digest: str | None = None) -> str:
        return draft

    async def fetch(self, handle: str) -> str:
        if not Path(handle).exists():  # noqa: ASYNC240 - one syscall
            raise FileNotFoundError(f"suspended state {handle} is gone")
        return handle

    async def drop(self, handle: str) -> None:
        Path(handle).unlink(missing_ok=True)  # noqa: ASYNC240 - one syscall

    async def drop_draft(self, draft: str) -> None:
        Path(draft).unlink(missing_ok=True)  # noqa: ASYNC240 - one syscall

    async def pass_over(self, policy: str, draft: str) -> bool:
        return False


class StoreShelf:
    """States in a state store of one session, in memory first (`local_tiers`), opened with the first of them.

    The store is of use to the session only: it begins empty, and `close` leaves nothing. A tier that turned
    out to be full while a policy's state was written is not tried again for that policy, unless all are.
    """

    def __init__(
        self, folder: Path, *, run: str, tiers: Callable[[Path], tuple[TierPlan, ...]] = local_tiers
    ) -> None:
        self._folder, self._run, self._make_tiers = folder, run, tiers
        self._numbers = itertools.count()
        self._drafts: dict[str, Draft] = {}
        self._sizes: dict[str, int] = {}  # of the policy's last state
        self._full: dict[str, Tier] = {}  # the slowest tier that the policy's state did not fit
        self._tiers: tuple[TierPlan, ...] = ()
        self._store: StateStore | None = None
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()

    async def draft(self, policy: str) -> str:
        store = await self._opened()
        size_bytes = self._sizes.get(policy, _FIRST_SIZE_BYTES)
        draft = await store.draft(size_bytes, below=self._full.get(policy))
        self._drafts[str(draft.path)] = draft
        return str(draft.path)

    async def keep(self, policy: str, draft: str, digest: str | None = None) -> str:
        store = await self._opened()
        key = Key(run=self._run, policy=policy, kind=KIND, version=next(self._numbers))
        entry = await store.put(key, self._drafts[draft], digest=digest)
        del self._drafts[draft]
        self._sizes[policy] = entry.size_bytes
        return str(key)

    async def fetch(self, handle: str) -> str:
        store = await self._opened()
        return str(await store.get(Key.parse(handle), holder=_READER, lease_s=LEASE_S))

    async def drop(self, handle: str) -> None:
        store, key = await self._opened(), Key.parse(handle)
        await store.release(key, _READER)
        await store.delete(key)

    async def drop_draft(self, draft: str) -> None:
        if (known := self._drafts.pop(draft, None)) is not None:
            await (await self._opened()).discard(known)

    async def pass_over(self, policy: str, draft: str) -> bool:
        tier = self._drafts[draft].tier
        if any(
            plan.tier in FILE_TIERS and ORDER.index(plan.tier) > ORDER.index(tier) for plan in self._tiers
        ):
            self._full[policy] = tier
            return True
        self._full.pop(policy, None)  # there may be room again the next time
        return False

    async def close(self) -> None:
        """Closes the store and removes its files."""
        if self._store is not None:
            await self._stack.aclose()
            self._remove()

    async def _opened(self) -> StateStore:
        async with self._opening:
            if self._store is None:
                self._tiers = self._make_tiers(self._folder)
                self._remove()  # what a session that was killed left
                self._tiers = self._make_tiers(self._folder)
                offload = self._stack.enter_context(ThreadOffload("state-rows"))
                bulk = self._stack.enter_context(ThreadOffload("state-bulk"))
                around = Surroundings(offload=offload, bulk=bulk)
                opening = StateStore.open("local", self._tiers, self._folder / "index.sqlite", around)
                self._store = await self._stack.enter_async_context(opening)
            return self._store

    def _remove(self) -> None:
        for folder in (self._folder, *(Path(plan.root) for plan in self._tiers)):
            shutil.rmtree(folder, ignore_errors=True)
