"""Pure: which copies leave a tier so that new bytes fit. The least recently used go first, one tier down.

A copy is kept if its object is pinned, leased or being read. An object never loses its last copy: what has
none below is moved, so the tier below needs room too, and so on down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megloom.compute.state.keys import Key
from megloom.compute.state.tiers import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A copy in a tier. `used` orders by last use; `is_kept` forbids to move or drop it."""

    key: Key
    tier: Tier
    size_bytes: int
    used: int
    is_kept: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Take `key` out of `source`, after copying it to `target`; None if a lower tier has it already."""

    key: Key
    source: Tier
    target: Tier | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What tiers hold. `budgets` go from the fastest tier down, None is no limit; `reserved` for drafts."""

    held: Sequence[Held]
    budgets: Mapping[Tier, int | None]
    reserved: Mapping[Tier, int]


def make_room(room: Room, tier: Tier, need_bytes: int) -> tuple[Move, ...] | None:
    """The moves, in the order to do them, after which `need_bytes` fit in `tier`; None if they cannot."""
    budget = room.budgets[tier]
    if budget is None:
        return ()
    here = [copy for copy in room.held if copy.tier == tier]
    over = sum(copy.size_bytes for copy in here) + room.reserved.get(tier, 0) + need_bytes - budget
    if over <= 0:
        return ()
    order = list(room.budgets)
    below = order[order.index(tier) + 1 :]
    safe = {copy.key for copy in room.held if copy.tier in below}
    moves: list[Move] = []
    moved_bytes = 0
    for copy in sorted(here, key=lambda copy: (copy.used, copy.key)):
        if over <= 0:
            break
        if copy.is_kept or (copy.key not in safe and not below):
            continue
        moves.append(Move(key=copy.key, source=tier, target=None if copy.key in safe else below[0]))
        moved_bytes += 0 if copy.key in safe else copy.size_bytes
        over -= copy.size_bytes
    if over > 0:
        return None
    if not moved_bytes:
        return tuple(moves)
    # What is on its way down must not lose the lower copy that it is dropped in favour of.
    dropped = {move.key for move in moves if move.target is None}
    held = [copy if copy.key not in dropped else _kept(copy) for copy in room.held if copy.tier in below]
    first = make_room(Room(held=held, budgets=room.budgets, reserved=room.reserved), below[0], moved_bytes)
    return None if first is None else (*first, *moves)


def _kept(copy: Held) -> Held:
    return Held(key=copy.key, tier=copy.tier, size_bytes=copy.size_bytes, used=copy.used, is_kept=True)
