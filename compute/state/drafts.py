"""Drafts that are filled: on the fastest tier that has room, on the next one if its disk is full."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from megloom.compute.state.digests import file_digest
from megloom.compute.state.errors import DISK_FULL, StateFull
from megloom.compute.state.index import Entry
from megloom.compute.state.keys import Key
from megloom.compute.state.node_files import Draft, NodeFiles
from megloom.compute.state.tiers import Tier
from megloom.compute.store.offload import Offload

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What is injected. `offload` runs short row work, `bulk` long copies and digests.

    Two of them, so that a lease is not late because of a copy.
    """

    offload: Offload
    bulk: Offload
    clock: Callable[[], float] = time.time
    new_id: Callable[[], str] = field(default=lambda: uuid.uuid4().hex)


class Drafts:
    """Drafts on the tiers of `files`."""

    def __init__(self, files: NodeFiles, around: Surroundings) -> None:
        self._files, self._around = files, around

    @asynccontextmanager
    async def copied(self, source: Path | bytes) -> AsyncIterator[Draft]:
        """A draft with a file's or these bytes; gone when the block ends.

        Raises: FileNotFoundError; StateFull.
        """
        bulk = self._around.bulk
        size_bytes = (await bulk.run(source.stat)).st_size if isinstance(source, Path) else len(source)

        async def fill(path: Path) -> None:
            await bulk.run(_copy, source, path)

        async with self.filled(size_bytes, fill) as draft:
            yield draft

    @asynccontextmanager
    async def filled(self, size_bytes: int, fill: Callable[[Path], Awaitable[None]]) -> AsyncIterator[Draft]:
        """A draft that `fill` has filled, on the fastest tier that takes it; gone when the block ends."""
        around = self._around
        below: Tier | None = None
        refusals: list[str] = []
        while True:
            draft_id = around.new_id()
            try:
                try:
                    draft = await around.offload.run(
                        self._files.reserve, draft_id, size_bytes, below, around.clock()
                    )
                except StateFull as error:
                    raise StateFull("; ".join([*refusals, str(error)])) from error
                try:
                    await fill(draft.path)
                except OSError as error:
                    if error.errno not in DISK_FULL:
                        raise
                    log.warning("tier=%s: disk full, trying the next tier: %s", draft.tier, error)
                    refusals.append(f"tier {draft.tier}: {error}")
                    below = draft.tier
                    continue
                yield draft
                return
            finally:
                await around.bulk.run(
                    _nothing
                )  # a copy that a cancelled caller began ends before its file goes
                await around.offload.run(self._files.discard, draft_id)


def entry_of(key: Key, source: Path | bytes) -> Entry:
    """The entry that a file or bytes would have under `key`."""
    if isinstance(source, Path):
        return Entry(key=key, digest=file_digest(source), size_bytes=source.stat().st_size)
    return Entry(key=key, digest=blake3(source).hexdigest(), size_bytes=len(source))


def _copy(source: Path | bytes, target: Path) -> None:
    if isinstance(source, Path):
        shutil.copyfile(source, target)
    else:
        target.write_bytes(source)


def _nothing() -> None:
    """Work that takes its turn behind other work."""
