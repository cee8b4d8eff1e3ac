"""Builders for the state store's tests: keys, stores of some hundred bytes, hand-fed time."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from megloom.compute.state.drafts import Surroundings
from megloom.compute.state.keys import Key
from megloom.compute.state.store import StateStore
from megloom.compute.state.tiers import Tier, TierPlan
from megloom.compute.state.transports.protocol import Transport
from megloom.compute.store.offload import InlineOffload, Offload


def key(version: int = 0, **overrides: Any) -> Key:
    return Key(**({"run": "r", "policy": "solver", "kind": "trainer", "version": version} | overrides))


class Clock:
    """Wall time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def plans(
    folder: Path, budgets: Mapping[Tier, int | None], roots: Mapping[Tier, Path] | None = None
) -> list[TierPlan]:
    """Tiers in folders under `folder`, but for `roots`; the URL tier is a folder too."""
    return [
        TierPlan(tier=tier, root=str((roots or {}).get(tier, folder / tier)), budget_bytes=size)
        for tier, size in budgets.items()
    ]


@asynccontextmanager
async def a_store(
    folder: Path,
    *,
    node: str = "a",
    budgets: Mapping[Tier, int | None] | None = None,
    roots: Mapping[Tier, Path] | None = None,
    peers: Mapping[str, Transport] | None = None,
    clock: Clock | None = None,
    bulk: Offload | None = None,
) -> AsyncIterator[StateStore]:
    numbers = itertools.count()
    around = Surroundings(
        offload=InlineOffload(),
        bulk=bulk or InlineOffload(),
        clock=clock or Clock(),
        new_id=lambda: f"id{next(numbers)}",
    )
    tiers = plans(folder, budgets or {Tier.TMPFS: 1000, Tier.DISK: None}, roots)
    async with StateStore.open(node, tiers, folder / "index.sqlite", around, peers=peers) as store:
        yield store


async def tiers_of(store: StateStore, wanted: Key) -> list[str]:
    """The tiers of this node's copies, and `remote`."""
    return [place.tier for place in await store.where(wanted) if place.node in ("", store.node)]


async def content(store: StateStore, wanted: Key) -> bytes:
    return (await store.get(wanted)).read_bytes()


def files_under(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
