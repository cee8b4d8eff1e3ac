"""Sealed steps from records, through the store's public methods."""

from __future__ import annotations

import asyncio
from typing import Any

from megloom.compute.store.journal import MemoryJournal
from megloom.compute.store.offload import InlineOffload
from megloom.compute.store.store import MegStore


def seal_steps(root: str, steps: dict[int, list[Any]], *, run: str = "r") -> None:
    """Seals the records of each step in one store, as one session would."""

    async def session() -> None:
        store = MegStore(root=root, journal=MemoryJournal(), offload=InlineOffload())
        await store.recover(run)
        for step, records in steps.items():
            for record in records:
                store.record(record, step=step)
            await store.seal(run, step)

    asyncio.run(session())
